"""The backend contract reports what is wrong: engines with a deliberate error,
and the message for each."""

import copy
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass, fields

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rlcli.api.model import ForwardEngine, ModelBackend
from rlcli.cli.checks import SilentPrinter
from rlcli.registry import load
from rlcli.testing.backend import BackendContract
from rlcli.testing.contract import Violation
from rlcli.testing.runner import Options, run_checks
from rlcli.testing.subjects import subjects

FSDP = load("backends", "fsdp")
ENGINE = sys.modules[FSDP.__module__].FSDPEngine

FOR_GPUS = """
from rlcli.backends.fsdp import FSDP
from rlcli.api.model import register_backend

@register_backend("for_gpus")
class ForGPUs(FSDP):
    DEVICES = ("cuda",)
"""


class Undecayed(ENGINE):
    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.optimizers[0].param_groups[0]["weight_decay"] = 0.0


class Greedy(ENGINE):
    def __init__(self, model, settings):
        super().__init__(model, settings)
        self.optimizers[0].param_groups[1]["weight_decay"] = settings.weight_decay


class Unclipped(ENGINE):
    def optimizer_step(self):
        norm = float(
            nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        )
        self.optimizers[0].step()
        self.optimizer_zero_grad()
        return norm


class Averaging(ENGINE):
    """Divides by the micro-batches of a step, which are three in the check."""

    def backward(self, loss, is_last):
        super().backward(loss / 3, is_last)


class Hoarding(ENGINE):
    def optimizer_zero_grad(self):
        """Keeps its gradients."""


class Late(ENGINE):
    def lr_scheduler_step(self, version_steps):
        return super().lr_scheduler_step(max(0, version_steps - 1))


class Unscheduled(ENGINE):
    """Changes the rate of its first optimizer alone."""

    def lr_scheduler_step(self, version_steps):
        self.optimizers, others = self.optimizers[:1], self.optimizers
        rate = super().lr_scheduler_step(version_steps)
        self.optimizers = others
        return rate


class Balancing(ENGINE):
    """Has twice the losses of routers that it was set."""

    def __init__(self, model, settings):
        super().__init__(model, settings)
        if self.routers is not None:
            self.routers.aux_coef *= 2
            self.routers.z_coef *= 2


class Uneven(ENGINE):
    """Divides the losses of routers by the tokens of each micro-batch."""

    def loss_of(self, micro_batch, loss_fn, divisor):
        if self.routers is not None:
            lengths = micro_batch.sample.flat_seqlens("packed_input_ids")
            self._routed.tokens = torch.tensor(float(sum(lengths)))
        return super().loss_of(micro_batch, loss_fn, divisor)


class Adding(ENGINE):
    """Adds up the auxiliary losses of two layers."""

    def train_batch(self, *args, **kwargs):
        stats = super().train_batch(*args, **kwargs)
        return {name: 2 * value if "aux" in name else value for name, value in stats.items()}


class Unbalanced(ENGINE):
    """Measures losses of routers, and adds none to its own."""

    def loss_of(self, *args):
        loss, stats = super().loss_of(*args)
        return 0 * loss, stats


class Frozen(ENGINE):
    """Generates with the weights of its first generation."""

    first_model = None

    @contextmanager
    def generator(self, packs=False):
        with super().generator(packs=False) as lm:  # packed weights cannot be copied
            self.first_model = self.first_model or copy.deepcopy(lm)
            yield self.first_model


class Leaking(ENGINE):
    """Runs a pack as one sequence."""

    def forward_micro_batch(self, micro_batch, then):
        tokens = micro_batch.data["packed_input_ids"]
        packed = self.packed(tokens, (len(tokens),), lambda output: output)
        lengths = tuple(micro_batch.flat_seqlens("packed_input_ids"))
        layout = self.packed(tokens, lengths, lambda output: output, may_share=False)._packing
        return then(type(packed)(self.lm, packed._hidden, tokens, layout, torch.float32))


class Alone(ENGINE):
    """Skips a rank without samples."""

    def forward_micro_batch(self, micro_batch, then):
        if micro_batch.ids == ["idle"]:
            return torch.zeros((), requires_grad=True)
        return super().forward_micro_batch(micro_batch, then)


class Averaged(ENGINE):
    """Gradients are the mean of the ranks'."""

    def backward(self, loss, is_last):
        super().backward(loss / self.dp_size, is_last)


class Plain(ENGINE):
    """Has only the required methods: no checkpoints; one rank writes the export and the others do
    not wait."""

    state = ForwardEngine.state

    def save_to_hf(self, tokenizer, save_dir):
        weights = dict(self.whole_parameters())
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.lm.save_pretrained(save_dir, state_dict=weights)


class Silent(Plain):
    def save_to_hf(self, tokenizer, save_dir):
        """Writes nothing."""


@dataclass(frozen=True, kw_only=True)
class NoEps(ModelBackend):
    """Its AdamW has torch's own eps, which nobody can set."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def _initialize(self, model):
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        model.module = Plain(model, FSDP(**settings, beta2=0.999, eps=1e-8, dtype="float32"))
        return model


def contract(engine):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(FSDP):
        def _initialize(self, model):
            model.module = engine(model, self)
            return model

    class Subject(BackendContract):
        name = "fsdp"
        families = ("llama",)

        def backend(self, **settings):
            return Wrong(**settings)

    return Subject()


@pytest.mark.parametrize(
    ("engine", "check", "finding", "cause"),
    [
        (
            Greedy,
            "steps_equal_a_plain_loop",
            "weights of llama are off by .* step 0",
            "biases and norms decay",
        ),
        (
            Undecayed,
            "steps_equal_a_plain_loop",
            "weights of llama are off",
            "weight decay is missing",
        ),
        (
            Unclipped,
            "steps_equal_a_plain_loop",
            "weights of llama are off",
            "not clipped to max_grad_norm",
        ),
        (
            Averaging,
            "steps_equal_a_plain_loop",
            "grad_norm of llama is .* at step 0",
            "3 times too little",
        ),
        (
            Hoarding,
            "an_abandoned_gradient_is_forgotten",
            "gradient norm .* without it",
            "optimizer_zero_grad",
        ),
        (
            Late,
            "the_rate_of_each_step",
            r"has 0\.25 of the peak at step 1 of 10; .* 0\.5",
            "one step late",
        ),
        (
            Unscheduled,
            "the_schedule_reaches_every_weight",
            "at 3 times the rate, a first step with optimizer=muon moves .* instead of",
            "all optimizers",
        ),
        (
            Uneven,
            "steps_reduce_the_losses_of_routers",
            "step of gradient descent on 0.5 times router_.*_loss, .* instead of",
            "over all tokens of a step",
        ),
        (
            Balancing,
            "steps_reduce_the_losses_of_routers",
            "step of gradient descent on 0.5 times router_aux_loss, .* instead of",
            "without its coefficient",
        ),
        (
            Unbalanced,
            "steps_reduce_the_losses_of_routers",
            "router_aux_loss, whose gradient norm is 0, reduced it by 0 instead of 0",
            "added to the loss",
        ),
        (
            Adding,
            "the_auxiliary_loss_of_routers_without_preferences",
            "router_aux_loss is 4, with 2 layers of experts, 2 per token",
            "mean over the layers",
        ),
        (Late, "steps_equal_a_plain_loop", "after step 1", "that of the step before"),
        (
            Frozen,
            "training_reaches_generation",
            "changed no greedy answer|greedy answer 0 is",
            "weights",
        ),
        (
            Leaking,
            "scores_are_those_of_each_sequence_alone",
            r"log-probs of llama at temperature 1.0: off by",
            "apart",
        ),
    ],
)
def test_a_wrong_engine_is_reported_with_finding_and_cause(engine, check, finding, cause):
    with pytest.raises(Violation) as caught:
        getattr(contract(engine), f"test_{check}")()
    assert re.search(finding, caught.value.finding), caught.value.finding
    assert cause in caught.value.cause
    file, line = caught.value.where.rsplit(":", 1)
    assert file.endswith(
        ("test_backend_contract.py", "fsdp.py", "_engine.py", "_routed_training.py")
    )
    assert int(line) > 0


def test_ranks_are_tried_in_the_first_layout_or_in_all_of_them():
    subject = contract(ENGINE)
    layouts = (({"pp": 2}, {}), ({"dp": 2}, {}), ({"tp": 2}, {}))
    assert subject.tried(layouts, "llama") == [({"dp": 2}, {})]
    with pytest.raises(pytest.skip.Exception, match="--all-layouts"):
        subject.require_all_layouts()
    subject.all_layouts = True
    assert subject.tried(layouts, "llama") == [({"dp": 2}, {}), ({"tp": 2}, {})]
    subject.require_all_layouts()


@pytest.mark.long
def test_ranks_that_lose_each_other_are_reported_with_a_location(tmp_path):
    subject = contract(Alone)
    subject.rank_seconds = 5
    lives = subject.live(tmp_path)
    with pytest.raises(
        Violation, match=r"within 5 s: rank|rank .: died .+ doesn't match"
    ) as caught:
        subject.test_ranks_get_through(lives)
    assert "idle micro-batches run" in caught.value.cause
    assert "test_backend_contract.py" in caught.value.where


@pytest.mark.long
def test_averaged_gradients_of_ranks_are_reported(tmp_path):
    subject = contract(Averaged)
    subject.dimensions = lambda: ("dp",)  # of what it has; the first layout tells
    lives = subject.live(tmp_path)
    subject.test_ranks_get_through(lives)
    with pytest.raises(
        Violation, match=r"at step 0 on dp 2, .* in a plain loop .*\ngradients are averaged"
    ):
        subject.test_ranks_train_like_a_plain_loop(lives)


@pytest.mark.long
def test_an_engine_without_state_and_eps_passes(tmp_path):
    """Of key biases, as gpt2 has them, rounding noise is all the gradient there is:
    no difference is an alarm."""

    class Subject(BackendContract):
        name = "fsdp"
        families = ("gpt2",)
        family_of_ranks = "gpt2"

        def backend(self, **settings):
            return NoEps(
                **{
                    field.name: settings[field.name]
                    for field in fields(NoEps)
                    if field.name in settings
                }
            )

    subject = Subject()
    subject.test_steps_equal_a_plain_loop()
    subject.test_micro_batches_change_nothing()
    lives = subject.live(tmp_path)
    subject.test_ranks_get_through(lives)
    subject.test_ranks_train_like_a_plain_loop(lives)
    subject.test_ranks_report_alike(lives)


def test_an_export_without_weights_is_reported():
    with pytest.raises(Violation, match="wrote no safetensors") as caught:
        contract(Silent).test_the_model_is_taken_as_it_is()
    assert "test_backend_contract.py" in caught.value.where


def test_the_contract_of_a_backend_for_gpus_needs_tests_with_a_device(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "for_gpus.py").write_text(FOR_GPUS)
    monkeypatch.chdir(tmp_path)
    (tested,) = run_checks(
        subjects("backend", "for_gpus"), SilentPrinter(), Options(keyword="DIMENSIONS")
    )
    assert {(check.outcome, check.reason) for check in tested.checks} == {
        ("skip", "it runs on cuda only, and this contract on the CPU")
    }


def test_certain_entries_are_those_whose_gradient_exceeds_eps():
    """With an eps that is large enough, all of them."""
    subject = contract(ENGINE)
    assert subject.certain() is None
    subject.backend = lambda **_: NoEps()
    certain = subject.certain("gpt2")["transformer.h.0.attn.c_attn.bias"]
    query, key, value = (float(block.float().mean()) for block in certain.chunk(3))
    assert (key, value) == (0, 1)
    assert query > 0.9
