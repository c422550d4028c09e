"""The optimizer: the rate of each step, updates too small for 16 bits, frozen weights. Its updates
are compared with a plain loop's in `training`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.errors import UsageError
from rlcli.testing.arguments import arguments_of
from rlcli.testing.backend.base import (
    SETTINGS,
    TOTAL_STEPS,
    BackendChecks,
    Weights,
    answer_loss,
    answer_weight,
    batch,
    distance,
    source_of,
    train,
)
from rlcli.testing.backend.plain import PlainTraining, plain_answer_loss
from rlcli.testing.contract import Violation
from rlcli.testing.tiny_models import tiny_model

SCHEDULES = {
    "constant": (0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1),
    "linear": (
        0.25,
        0.5,
        0.75,
        1,
        0.87142857,
        0.74285714,
        0.61428571,
        0.48571429,
        0.35714286,
        0.22857143,
    ),
    "cosine": (
        0.25,
        0.5,
        0.75,
        1,
        0.95543599,
        0.83057041,
        0.65013442,
        0.44986558,
        0.26942959,
        0.14456401,
    ),
}
"""Relative rate of each of ten steps: three of warm-up, then decay to a tenth,
reached one step after the last."""


class OptimizerChecks(BackendChecks):
    """`optimizer_step` and `lr_scheduler_step`."""

    def test_the_rate_of_each_step(self) -> None:
        """warm-up and schedule: the rate of each step"""
        self.trained_engine()
        for schedule, shares in SCHEDULES.items():
            settings: dict[str, Any] = {
                "lr": 1e-3,
                "schedule": schedule,
                "warmup_steps": 3,
                "min_lr_ratio": 0.1,
            }
            self.require_settings(*settings)
            try:
                engine = self.trained_engine(**settings)
            except UsageError:
                continue  # a schedule that it does not offer
            for step, share in enumerate(shares):
                rate = engine.lr_scheduler_step(step) / 1e-3
                if rate != pytest.approx(share, rel=1e-4):
                    finding = (
                        f"the {schedule} schedule has {rate:.4g} of the peak at step "
                        f"{step} of {TOTAL_STEPS}"
                    )
                    raise Violation(
                        f"{finding}; it should be {share:.4g}",
                        _cause_of_rate(rate, step, shares),
                        source_of(engine, "lr_scheduler_step"),
                    )

    def test_the_schedule_counts_steps(self) -> None:
        """the schedule counts training steps, not micro-batches"""
        settings: dict[str, Any] = {"lr": 1e-3, "schedule": "linear", "min_lr_ratio": 0.0}
        engine = self.trained_engine(**settings)
        self.require_settings(*settings)
        stats = [
            engine.train_batch(
                batch(),
                answer_loss,
                answer_weight,
                mb_spec=MicroBatchSpec(n_mbs=3),
                version_steps=step,
            )
            for step in (0, 3, 3)
        ]
        rates = [step_stats["lr"] / 1e-3 for step_stats in stats]
        if rates != pytest.approx([1, 0.7, 0.7], rel=1e-4):
            raise Violation(
                f"rates {rates} of the peak at steps 0, 3, 3 of {TOTAL_STEPS}, "
                "three micro-batches each",
                "compute the rate from version_steps alone; keep no count",
                source_of(engine, "lr_scheduler_step"),
            )

    def test_the_schedule_reaches_every_weight(self) -> None:
        """a first step moves all weights in proportion to its rate, with every optimizer"""
        self.trained_engine()
        self.require_settings("lr", "warmup_steps")
        for choice in self._optimizers():
            low, small = self._first_step(0, **choice)
            high, large = self._first_step(2, **choice)
            for name, moved in small.items():
                expected = moved * (high / low)
                if distance(large[name], expected, least=1e-3) > 1e-3:
                    optimizer = "".join(f" with optimizer={value}" for value in choice.values())
                    raise Violation(
                        f"at {high / low:.3g} times the rate, a first step{optimizer} moves {name} "
                        f"by {large[name].norm():.3g} instead of {expected.norm():.3g}",
                        "set the rate of all groups of all optimizers",
                        source_of(self.trained_engine(), "lr_scheduler_step"),
                    )

    def _optimizers(self) -> list[dict[str, Any]]:
        """The settings that choose each optimizer that the backend has."""
        for argument in arguments_of(self.backend()):
            if argument.name == "optimizer":
                return [{"optimizer": value} for value in (argument.default, *argument.others)]
        return [{}]

    def _first_step(self, step: int, **choice: Any) -> tuple[float, Weights]:
        """The rate of a step that is the first of an engine, and what it adds to the weights."""
        engine = self.trained_engine(**SETTINGS, **choice)
        before = self.weights(engine)
        rate = engine.train_batch(batch(), answer_loss, answer_weight, version_steps=step)["lr"]
        return rate, {name: weight - before[name] for name, weight in self.weights(engine).items()}

    def test_tiny_updates_add_up(self) -> None:
        """in bfloat16, updates too small for 16 bits add up"""
        settings: dict[str, Any] = {
            "lr": 1e-5,
            "weight_decay": 0.0,
            "schedule": "constant",
            "dtype": "bfloat16",
        }
        if not hasattr(self.backend(), "dtype"):
            self.trained_engine()
            pytest.skip("has no setting dtype")
        engine = self.trained_engine(**settings)
        before = self.weights(engine)
        plain = PlainTraining(tiny_model(self.families[0]), self.optimizer_settings(**settings))
        start = {name: weight.clone() for name, weight in plain.weights().items()}
        for step in range(8):
            engine.train_batch(batch(), answer_loss, answer_weight, version_steps=step)
            plain.step([batch()], plain_answer_loss, 1.0)
        after = self.weights(engine)
        share = _way(after, before) / _way(plain.weights(), start)
        if not 0.7 < share < 1.3:
            narrow = sorted({str(w.dtype) for w in after.values() if w.is_floating_point()})
            cause = (
                "keep weights and optimizer state in float32 and cast them for matrix products only"
            )
            raise Violation(
                f"8 steps at lr 1e-5 moved the weights {share:.2g} times as far as "
                f"in float64 ({narrow})",
                cause,
                source_of(engine, "__init__"),
            )

    def test_frozen_parameters_stay(self) -> None:
        """parameters without requires_grad stay as they are"""
        lm = tiny_model(self.families[0])
        for name, parameter in lm.named_parameters():
            parameter.requires_grad_("mlp" in name)
        engine = self.trained_engine(lm=lm, lr=1e-2, weight_decay=0.5)
        before = self.weights(engine)
        train(engine)
        for name, weight in self.weights(engine).items():
            if torch.equal(weight, before[name]) == ("mlp" in name):
                raise Violation(
                    (
                        f"{name} was not trained"
                        if "mlp" in name
                        else f"{name} was trained, though it is frozen"
                    ),
                    "give the optimizer the parameters that require gradients, "
                    "at the time it is made",
                    source_of(engine, "__init__"),
                )


def _way(after: Weights, before: Weights) -> float:
    """The sum of what all numbers of the weights `before` have changed by."""
    return sum(
        float((after[name].double() - weight).abs().sum()) for name, weight in before.items()
    )


def _cause_of_rate(rate: float, step: int, shares: tuple[float, ...]) -> str:
    for neighbour, mistake in ((step - 1, "late"), (step + 1, "early")):
        if step > 0 and rate == pytest.approx(shares[min(neighbour, len(shares) - 1)], rel=1e-4):
            return f"the schedule is one step {mistake}: version_steps counts from 0"
    return "use rlcli.ops.schedules.learning_rate"
