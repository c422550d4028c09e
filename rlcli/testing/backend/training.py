"""Training: a step equals that of a plain loop, however its batch is cut,
and a refused step leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.micro_batches import MicroBatch
from rlcli.api.model import TrainEngine
from rlcli.testing.backend.base import RATES, SETTINGS, BackendChecks, source_of
from rlcli.testing.backend.differences import (
    Weights,
    require_close,
    require_number,
    require_same_weights,
    require_small,
    weights_apart,
)
from rlcli.testing.backend.forward import CUTS, scores
from rlcli.testing.backend.objectives import OBJECTIVES, answer_loss, answer_weight, train
from rlcli.testing.backend.plain import PlainTraining, Stats
from rlcli.testing.backend.samples import batch, groups
from rlcli.testing.contract import Violation, skip_if
from rlcli.testing.tiny_models import tiny_model

SHARED_GRADIENT = (
    "tokens that are computed once for several sequences have the gradients of all of them"
)
ACCUMULATION = "sum the gradients of all micro-batches of a step"


class TrainingStep(NamedTuple):
    """A step of training."""

    title: str
    sample: SequenceSample
    how: dict[str, Any]
    """How its batch is cut."""


BATCHES = [
    TrainingStep(
        f"step {number} of {1 + number} micro-batches",
        batch(number),
        {"mb_spec": MicroBatchSpec(n_mbs=1 + number)},
    )
    for number in range(len(RATES))
]
CUT = {"mb_spec": MicroBatchSpec(max_tokens_per_mb=40), "cut": "sequence"}
ON_GROUPS = [
    TrainingStep("a step on groups", groups(), {}),
    TrainingStep("a step on groups that are cut", groups(), CUT),
]


class BackendTrainingChecks(BackendChecks):
    """`train_batch` and `eval_batch`."""

    def test_steps_equal_a_plain_loop(self) -> None:
        """steps: loss, gradient norm, weights of a plain loop"""
        for family in self.families:
            self._require_plain_steps(family, "lm", BATCHES)

    def test_value_heads_train_like_a_plain_loop(self) -> None:
        """steps of a value head equal those of a plain loop"""
        for family in self.families[:2]:  # below the head all families train as above
            self._require_plain_steps(family, "value", BATCHES)

    def test_sequences_that_begin_alike_train_like_a_plain_loop(self) -> None:
        """steps on groups of sequences equal those of a plain loop"""
        heads = {"lm": self.families, "value": self.families[:2]}
        for head, families in heads.items():
            for family, step in product(families, ON_GROUPS):
                self._require_plain_steps(family, head, [step], SHARED_GRADIENT)

    def test_micro_batches_change_nothing(self) -> None:
        """a step is the same for any micro-batches"""
        family, uncut = self.families[0], self.trained_engine(**SETTINGS)
        stats, weights = train(uncut), self.weights(uncut)
        for how, cut in CUTS.items():
            engine = self.trained_engine(**SETTINGS)
            stats_when_cut = train(engine, mb_spec=cut)
            self._require_stats(engine, stats_when_cut, stats, family, (how, "in one piece"))
            apart = weights_apart(self.weights(engine), weights, self.certain())
            self._require_weights(engine, apart, family, f"after a step {how}", ACCUMULATION)

    def test_evaluation_reports_the_loss_of_training(self) -> None:
        """eval_batch reports what train_batch reports"""
        engine = self.trained_engine(**SETTINGS)
        evaluated = engine.eval_batch(batch(), answer_loss, answer_weight, MicroBatchSpec(n_mbs=3))
        trained = train(engine)
        occasions = "in eval_batch", "in train_batch"
        cause, where = "evaluate the same model in the same way", source_of(engine, "eval_batch")
        for name, value in evaluated.items():
            require_number(name, value, trained[name], self.tolerance, occasions, cause, where)

    def test_a_gradient_that_is_not_finite_changes_nothing(self) -> None:
        """a gradient that is not finite changes nothing"""
        infinite = replace(OBJECTIVES["lm"], loss=lambda *both: answer_loss(*both)[0] * math.nan)
        self._require_no_trace({"not finite": {"objective": infinite}})

    def test_a_refused_step_changes_nothing(self) -> None:
        """a step that step_if refuses changes nothing"""
        self._require_no_trace({"refused": {"step_if": lambda stats: stats["loss"] < -1e9}})

    def test_nothing_to_learn_changes_nothing(self) -> None:
        """a batch without weight, or without samples, changes nothing"""
        weightless = replace(OBJECTIVES["lm"], weight=lambda _: 0)
        self._require_no_trace(
            {
                "without weight": {"objective": weightless},
                "without samples": {"sample": batch().select_indices([])},
            }
        )

    def test_an_abandoned_gradient_is_forgotten(self) -> None:
        """an abandoned gradient is not part of the next step"""
        engine, fresh = self.trained_engine(**SETTINGS), self.trained_engine(**SETTINGS)
        sample = batch(5)
        abandoned = MicroBatch(sample, tuple(range(sample.bs)))
        engine.forward_backward_batch([abandoned], answer_loss, torch.tensor(10.0))
        require_number(
            "gradient norm",
            train(engine)["grad_norm"],
            train(fresh)["grad_norm"],
            self.tolerance,
            ("after an abandoned backward pass", "without it"),
            "drop all gradients in optimizer_zero_grad",
            source_of(engine, "optimizer_zero_grad"),
        )

    def test_dropout_is_off_in_eval_mode(self) -> None:
        """after eval() there is no dropout, not even in recomputed passes"""
        skip_if("gpt2" not in self.families, "not tried: runs none of the tiny models with dropout")
        plain = scores(self.scoring_engine("gpt2"))
        for recompute in (False, True):
            leaky = tiny_model("gpt2", embd_pdrop=0.5, resid_pdrop=0.5).train()
            engine = self.engine(lm=leaky, gradient_checkpointing=recompute)
            engine.train()
            engine.eval()
            how = "with" if recompute else "without"
            require_close(
                f"log-probs of a model with dropout after eval(), {how} gradient_checkpointing",
                scores(engine),
                plain,
                self.tolerance,
                "turn dropout off in all modules",
                source_of(engine, "eval", "__init__"),
            )

    def test_recomputing_activations_changes_nothing(self) -> None:
        """gradient_checkpointing changes no number"""
        engine = self.trained_engine(gradient_checkpointing=True, **SETTINGS)
        self.require_settings("gradient_checkpointing")
        actual, expected = train(engine), train(self.trained_engine(**SETTINGS))
        occasions = "with recomputed activations", "without"
        cause = "the recomputed pass must see the same model in the same mode"
        self._require_stats(engine, actual, expected, self.families[0], occasions, cause)

    # -- comparing ---------------------------------------------------------------------------------

    def _require_plain_steps(
        self, family: str, head: str, steps: Sequence[TrainingStep], usual_cause: str = ""
    ) -> None:
        """Steps of an engine and of a plain loop are equal; without another explanation, the cause
        of a difference is the usual one."""
        engine = self.trained_engine(family, head=head, **SETTINGS)
        plain, certain = self.plain_training(family, head), self.certain(family, head)
        objective = OBJECTIVES[head]
        for number, (step, rate) in enumerate(zip(steps, self.rates(), strict=False)):
            expected = plain.step([step.sample], objective.plain, rate)
            expected |= objective.stats(step.sample)
            actual = train(engine, number, step.sample, objective, **step.how)
            occasions = f"at {step.title}", "in a plain loop"
            self._require_stats(engine, actual, expected, family, occasions, usual_cause)
            weights = self.weights(engine)
            apart = weights_apart(weights, plain.weights(), certain)
            cause = usual_cause
            if apart > self.tolerance and not usual_cause:
                cause = self._mistake(family, head, steps[: number + 1], weights, certain)
            self._require_weights(engine, apart, family, f"after {step.title}", cause)

    def _mistake(
        self,
        family: str,
        head: str,
        steps: Sequence[TrainingStep],
        weights: Weights,
        certain: Weights | None,
    ) -> str:
        """The known mistake with which a plain loop has these weights after these steps."""
        rates = self.rates()
        mistakes = [
            *((cause, changes, rates) for cause, changes in WRONG_SETTINGS.items()),
            (ONE_STEP_LATE, {}, (rates[0], *rates)),
            (UNSCHEDULED, {}, (1.0,) * len(rates)),
        ]
        for cause, changes, rates_with_it in mistakes:
            settings = replace(self.optimizer_settings(**SETTINGS), **changes)
            plain = PlainTraining(tiny_model(family, head=head), settings)
            for step, rate in zip(steps, rates_with_it, strict=False):
                plain.step([step.sample], OBJECTIVES[head].plain, rate)
            if weights_apart(weights, plain.weights(), certain) < self.tolerance:
                return cause
        return (
            "compare optimizer_step with torch's AdamW, and lr_scheduler_step with "
            "rlcli.ops.schedules"
        )

    def _require_weights(
        self, engine: TrainEngine, apart: float, family: str, occasion: str, cause: str
    ) -> None:
        where = _training(engine)
        require_small(f"weights of {family}", apart, self.tolerance, occasion, cause, where)

    def _require_stats(
        self,
        engine: TrainEngine,
        actual: Stats,
        expected: Stats,
        family: str,
        occasions: tuple[str, str],
        cause: str = "",
    ) -> None:
        """Raises Violation for a number that is not as expected; without a cause, with the one that
        its ratio to the expected number suggests."""
        for name, value in expected.items():
            require_number(
                f"{name} of {family}",
                actual[name],
                value,
                self.tolerance,
                occasions,
                cause or _cause_of_ratio(actual[name] / value if value else 0.0),
                _training(engine),
            )

    def _require_no_trace(self, steps: Mapping[str, Mapping[str, Any]]) -> None:
        """Checks after steps that must be refused: the same weights bit for bit,
        and later steps as if they never happened."""
        engine, untouched = self.trained_engine(**SETTINGS), self.trained_engine(**SETTINGS)
        for trained in (engine, untouched):
            train(trained, 0)
        for condition, how in steps.items():
            self._require_refused(engine, condition, how)
        for trained in (engine, untouched):
            train(trained, 2)
        require_same_weights(
            self.weights(engine),
            self.weights(untouched),
            f"after the step that follows a batch {' or '.join(steps)}",
            "leave the optimizer's state as it was, and drop the gradients",
            _updating(engine),
        )

    def _require_refused(self, engine: TrainEngine, condition: str, how: Mapping[str, Any]) -> None:
        before = self.weights(engine)
        skipped = train(engine, 1, **how)["update_skipped"]
        if skipped != 1.0:
            raise Violation(
                f"update_skipped is {skipped:g} for a batch {condition}",
                "skip the update",
                _updating(engine),
            )
        require_same_weights(
            self.weights(engine),
            before,
            f"after a batch {condition}",
            "look at the gradient norm before anything is applied",
            _updating(engine),
        )


def _updating(engine: TrainEngine) -> str:
    return source_of(engine, "optimizer_step", "train_batch")


def _training(engine: TrainEngine) -> str:
    return source_of(engine, "optimizer_step", "backward", "forward_backward_batch", "train_batch")


def _cause_of_ratio(ratio: float) -> str:
    for number in range(2, 10):
        if ratio == pytest.approx(number, rel=1e-3):
            return (
                f"{number} times too much: something is summed, or divided by its "
                "count, once too rarely"
            )
        if ratio == pytest.approx(1 / number, rel=1e-3):
            return (
                f"{number} times too little: only the engine divides, by the weight of "
                "all micro-batches"
            )
    return f"{ACCUMULATION}, and of no other; take the norm before clipping"


WRONG_SETTINGS: dict[str, dict[str, Any]] = {
    "no weight was changed; apply the optimizer": {"lr": 0.0},
    "biases and norms decay too; give them a group with weight_decay 0": {"decays_vectors": True},
    "weight decay is missing": {"weight_decay": 0.0},
    "weight decay is part of the gradient; use AdamW": {"is_decoupled": False},
    "the gradient is not clipped to max_grad_norm": {"max_grad_norm": math.inf},
    "the last step's gradient is still there": {"keeps_gradients": True},
    "beta1 and beta2 are not those of the settings": {"beta1": 0.9, "beta2": 0.999},
    "eps is not that of the settings": {"eps": 1e-8},
}
"""A known mistake → what of `AdamW` it changes in a plain loop."""
ONE_STEP_LATE = "the learning rate is that of the step before; set it before the update"
UNSCHEDULED = "the schedule does not reach the optimizer"
