"""The optimizer: the rate of each step, updates too small for 16 bits, frozen weights. Its updates
are compared with a plain loop's in `training`."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.errors import UsageError
from rlcli.testing.arguments import arguments_of
from rlcli.testing.backend.base import SETTINGS, TOTAL_STEPS, BackendChecks, source_of
from rlcli.testing.backend.differences import Weights, distance
from rlcli.testing.backend.objectives import train
from rlcli.testing.backend.plain import PlainTraining, plain_answer_loss
from rlcli.testing.backend.samples import batch
from rlcli.testing.contract import Violation
from rlcli.testing.tiny_models import tiny_model

WARM_UP = (0.25, 0.5, 0.75, 1)
DECAYED = [step / 7 for step in range(1, 7)]
"""Shares of the decay, to a tenth, at the six later ones of ten steps: it ends one step after the
last."""
LINEAR = [1 - 0.9 * share for share in DECAYED]
COSINE = [0.55 + 0.45 * math.cos(math.pi * share) for share in DECAYED]
SCHEDULES = {
    "constant": (*WARM_UP, 1, 1, 1, 1, 1, 1),
    "linear": (*WARM_UP, *LINEAR),
    "cosine": (*WARM_UP, *COSINE),
}
"""Relative rate of each of ten steps."""


class OptimizerChecks(BackendChecks):
    """`optimizer_step` and `lr_scheduler_step`."""

    def test_the_rate_of_each_step(self) -> None:
        """warm-up and schedule: the rate of each step"""
        self.trained_engine()
        settings: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 3, "min_lr_ratio": 0.1}
        self.require_settings("schedule", *settings)
        for schedule, rates in SCHEDULES.items():
            try:
                engine = self.trained_engine(schedule=schedule, **settings)
            except UsageError:
                continue  # a schedule that it does not offer
            for step, expected in enumerate(rates):
                rate = engine.lr_scheduler_step(step) / 1e-3
                if rate != pytest.approx(expected, rel=1e-4):
                    raise Violation(
                        f"the {schedule} schedule has {rate:.4g} of the peak at step {step} of "
                        f"{TOTAL_STEPS}; it should be {expected:.4g}",
                        _cause_of_rate(rate, step, rates),
                        source_of(engine, "lr_scheduler_step"),
                    )

    def test_the_schedule_counts_steps(self) -> None:
        """the schedule counts training steps, not micro-batches"""
        settings: dict[str, Any] = {"lr": 1e-3, "schedule": "linear", "min_lr_ratio": 0.0}
        engine = self.trained_engine(**settings)
        self.require_settings(*settings)
        cut = MicroBatchSpec(n_mbs=3)
        rates = [train(engine, step, mb_spec=cut)["lr"] / 1e-3 for step in (0, 3, 3)]
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
        for optimizer, choice in self._optimizers().items():
            low, small = self._first_step(0, **choice)
            high, large = self._first_step(2, **choice)
            for name, moved in small.items():
                expected = moved * (high / low)
                if distance(large[name], expected, least=1e-3) > 1e-3:
                    raise Violation(
                        f"at {high / low:.3g} times the rate, a first step{optimizer} moves {name} "
                        f"by {large[name].norm():.3g} instead of {expected.norm():.3g}",
                        "set the rate of all groups of all optimizers",
                        source_of(self.trained_engine(), "lr_scheduler_step"),
                    )

    def _optimizers(self) -> dict[str, dict[str, Any]]:
        """Each optimizer that the backend has, in words, and the settings that choose it."""
        choices = [
            value
            for argument in arguments_of(self.backend())
            if argument.name == "optimizer"
            for value in (argument.default, *argument.others)
        ]
        return {f" with optimizer={value}": {"optimizer": value} for value in choices} or {"": {}}

    def _first_step(self, step: int, **choice: Any) -> tuple[float, Weights]:
        """The rate of a step that is the first of an engine, and what it adds to the weights."""
        engine = self.trained_engine(**SETTINGS, **choice)
        before = self.weights(engine)
        rate = train(engine, step, batch())["lr"]
        return rate, {name: weight - before[name] for name, weight in self.weights(engine).items()}

    def test_tiny_updates_add_up(self) -> None:
        """in bfloat16, updates too small for 16 bits add up"""
        settings: dict[str, Any] = {"lr": 1e-5, "weight_decay": 0.0, "schedule": "constant"}
        engine = self.trained_engine(dtype="bfloat16", **settings)
        self.require_settings("dtype")
        before, lm = self.weights(engine), tiny_model(self.families[0])
        plain = PlainTraining(lm, self.optimizer_settings(**settings))
        start = copy.deepcopy(plain.weights())  # in more than the 16 bits that an engine may have
        for step in range(8):
            train(engine, step, batch())
            plain.step([batch()], plain_answer_loss, 1.0)
        share = _way(self.weights(engine), before) / _way(plain.weights(), start)
        if not 0.7 < share < 1.3:
            raise Violation(
                f"8 steps at lr 1e-5 moved the weights {share:.2g} times as far as in float64",
                "keep weights and optimizer state in float32; cast them for matrix products only",
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
            is_trained = not torch.equal(weight, before[name])
            if is_trained != ("mlp" in name):
                fault = "was trained, though it is frozen" if is_trained else "was not trained"
                raise Violation(
                    f"{name} {fault}",
                    "give the optimizer the parameters that require gradients, at the time it is "
                    "made",
                    source_of(engine, "__init__"),
                )


def _way(after: Weights, before: Weights) -> float:
    """The sum of what all numbers of the weights `before` have changed by."""
    return sum(
        float((after[name].double() - weight).abs().sum()) for name, weight in before.items()
    )


def _cause_of_rate(rate: float, step: int, rates: tuple[float, ...]) -> str:
    neighbours = {"late": rates[max(step - 1, 0)], "early": rates[min(step + 1, len(rates) - 1)]}
    for mistake, neighbour in neighbours.items():
        if step > 0 and rate == pytest.approx(neighbour, rel=1e-4):
            return f"the schedule is one step {mistake}: version_steps counts from 0"
    return "use rlcli.ops.schedules.learning_rate"
