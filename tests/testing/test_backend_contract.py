"""The backend contract says what is wrong: engines that are wrong on purpose, and the message each one gets."""

import copy
import re
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rlcli.registry import load
from rlcli.testing.backend import BackendContract
from rlcli.testing.contract import Violation

FSDP = load("backends", "fsdp")
ENGINE = sys.modules[FSDP.__module__].FSDPEngine


class Undecayed(ENGINE):
    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.optimizer.param_groups[0]["weight_decay"] = 0.0


class Greedy(ENGINE):
    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.optimizer.param_groups[1]["weight_decay"] = settings.weight_decay


class Unclipped(ENGINE):
    def optimizer_step(self):
        norm = float(nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))
        self.optimizer.step()
        self.optimizer_zero_grad()
        return norm


class Averaging(ENGINE):
    """Divides by the micro-batches of a step, which are three in the check."""

    def backward(self, loss):
        super().backward(loss / 3)


class Hoarding(ENGINE):
    def optimizer_zero_grad(self):
        """Keeps what it has."""


class Late(ENGINE):
    def lr_scheduler_step(self, version_steps):
        return super().lr_scheduler_step(max(0, version_steps - 1))


class Frozen(ENGINE):
    """Generates with the weights that it had when it first did."""

    def generator(self):
        if self._whole is None:
            self._whole = copy.deepcopy(super().generator())
        return self._whole


class Leaking(ENGINE):
    """Runs a pack as one sequence."""

    def forward_micro_batch(self, micro_batch, then):
        tokens = micro_batch.data["packed_input_ids"]
        whole = self.packed(tokens, (len(tokens),), lambda output: output)
        lengths = tuple(micro_batch.flat_seqlens("packed_input_ids"))
        return then(type(whole)(self.lm, whole._hidden, tokens, lengths, torch.float32))


class Alone(ENGINE):
    """Thinks that there is nothing to do for a rank without samples."""

    def idle_micro_batch(self):
        return torch.zeros((), requires_grad=True)


class Averaged(ENGINE):
    """Gradients are the mean of the ranks'."""

    def backward(self, loss):
        super().backward(loss / self.dp_size)


def contract(engine):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(FSDP):
        def _initialize(self, model):
            model.module = engine(model, self)
            return model

    class Subject(BackendContract):
        name = "fsdp"
        families = ("llama",)

        def backend(self, **wanted):
            return Wrong(**wanted)

    return Subject()


@pytest.mark.parametrize(
    ("engine", "check", "found", "cause"),
    [
        (Undecayed, "matrices_decay_and_vectors_do_not", r"was scaled by 1 where there is no gradient; .* by 0\.95",
         "in matrices"),
        (Greedy, "matrices_decay_and_vectors_do_not", r"norm.weight \[32\] of llama was scaled by 0\.95 .* by 1$",
         "biases and norms"),
        (Greedy, "steps_equal_a_plain_loop", "weights of llama are off by .* step 0", "biases and norms decay"),
        (Undecayed, "steps_equal_a_plain_loop", "weights of llama are off", "weight decay is missing"),
        (Unclipped, "steps_equal_a_plain_loop", "weights of llama are off", "not clipped to max_grad_norm"),
        (Unclipped, "the_norm_is_reported_before_clipping", r"to 0\.01 scaled the update by 1;", "before the update"),
        (Averaging, "steps_equal_a_plain_loop", "grad_norm of llama is .* at step 0", "3 times too little"),
        (Hoarding, "an_abandoned_gradient_is_forgotten", "gradient norm .* without it", "optimizer_zero_grad"),
        (Late, "the_rate_of_each_step", r"has 0\.25 of the peak at step 1 of 10; .* 0\.5", "one step late"),
        (Late, "steps_equal_a_plain_loop", "after step 1", "that of the step before"),
        (Frozen, "training_reaches_generation", "changed no greedy answer|differs from token", "weights"),
        (Leaking, "scores_are_those_of_each_sequence_alone", r"log-probs of llama at temperature 1.0: off by", "apart"),
    ],
)  # fmt: skip
def test_a_wrong_engine_is_told_what_is_wrong(engine, check, found, cause):
    with pytest.raises(Violation) as caught:
        getattr(contract(engine), f"test_{check}")()
    assert re.search(found, caught.value.found), caught.value.found
    assert cause in caught.value.cause
    file, line = caught.value.where.rsplit(":", 1)
    assert file.endswith(("test_backend_contract.py", "fsdp.py", "_engine.py"))
    assert int(line) > 0


def test_ranks_that_lose_each_other_are_told_where_to_look(tmp_path):
    subject = contract(Alone)
    subject.rank_seconds = 5
    lives = subject.live(tmp_path)
    with pytest.raises(Violation, match=r"within 5 s: rank|of 2 ranks, rank . died .+ doesn't match") as caught:
        subject.test_ranks_get_through(lives)
    assert "runs idle_micro_batch" in caught.value.cause
    assert "test_backend_contract.py" in caught.value.where


def test_ranks_that_average_their_gradients_are_told(tmp_path):
    subject = contract(Averaged)
    lives = subject.live(tmp_path)
    subject.test_ranks_get_through(lives)
    with pytest.raises(Violation, match=r"at step 0 on dp 2, .* in a plain loop .*\ngradients are averaged"):
        subject.test_ranks_train_like_a_plain_loop(lives, lives.told)
