"""The optimizer: weight decay, clipping, the rate of each step,
updates too small for 16 bits, frozen weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.model import ModelOutput
from rlcli.errors import UsageError
from rlcli.testing.backend.base import (
    TOTAL_STEPS,
    BackendChecks,
    answer_loss,
    answer_weight,
    batch,
    source_of,
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
            if not all(hasattr(self.backend(), name) for name in settings):
                pytest.skip("has no settings lr, schedule, warmup_steps, min_lr_ratio")
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
                    cause = _cause_of_rate(rate, step, shares)
                    raise Violation(
                        f"{finding}; it should be {share:.4g}",
                        cause,
                        source_of(engine, "lr_scheduler_step"),
                    )

    def test_the_schedule_counts_steps(self) -> None:
        """the schedule counts training steps, not micro-batches"""
        settings: dict[str, Any] = {"lr": 1e-3, "schedule": "linear", "min_lr_ratio": 0.0}
        engine = self.trained_engine(**settings)
        if not all(hasattr(self.backend(), name) for name in settings):
            pytest.skip("has no settings lr, schedule, min_lr_ratio")
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
            cause = "compute the rate from version_steps alone; keep no count"
            finding = (
                f"rates {rates} of the peak at steps 0, 3, 3 of {TOTAL_STEPS}, "
                "three micro-batches each"
            )
            raise Violation(finding, cause, source_of(engine, "lr_scheduler_step"))

    def test_matrices_decay_and_vectors_do_not(self) -> None:
        """weight decay reaches matrices, not biases and norms"""
        for family in self.families:
            engine = self.trained_engine(family, lr=0.1, weight_decay=0.5)
            decay = self.optimizer_settings(lr=0.1, weight_decay=0.5).weight_decay
            before = self.weights(engine)
            engine.train_batch(batch(), _flat_loss, answer_weight)
            for name, weight in self.weights(engine).items():
                scale = 1 - 0.1 * decay if weight.dim() > 1 else 1.0
                if not torch.allclose(weight, scale * before[name], rtol=1e-4, atol=1e-7):
                    actual_scale = float(
                        (weight * before[name]).sum() / before[name].square().sum().clamp(min=1e-12)
                    )
                    shape = list(weight.shape)
                    finding = (
                        f"{name} {shape} of {family} was scaled by {actual_scale:.4g} "
                        "where there is no gradient"
                    )
                    cause = (
                        "decay weight by lr · weight_decay in matrices; put biases and norms into "
                        "a group without decay"
                    )
                    raise Violation(
                        f"{finding}; it should be by {scale:.4g}",
                        cause,
                        source_of(engine, "__init__"),
                    )

    def test_the_norm_is_reported_before_clipping(self) -> None:
        """gradients are clipped; the norm is that before"""
        settings: dict[str, Any] = {
            "lr": 1e-2,
            "eps": 1.0,
            "weight_decay": 0.0,
            "schedule": "constant",
        }
        if not hasattr(self.backend(), "max_grad_norm"):
            self.trained_engine()
            pytest.skip("has no setting max_grad_norm")
        moved, norms = [], []
        for limit in (1e6, 0.01):
            engine = self.trained_engine(max_grad_norm=limit, **settings)
            before = self.weights(engine)
            norms.append(engine.train_batch(batch(), answer_loss, answer_weight)["grad_norm"])
            after = self.weights(engine)
            moved.append(
                sum(float((after[name] - weight).square().sum()) for name, weight in before.items())
                ** 0.5
            )
        where = source_of(engine, "optimizer_step")
        if norms[1] != pytest.approx(norms[0], rel=self.tolerance):
            finding = (
                f"grad_norm is {norms[1]:.4g} with max_grad_norm 0.01, "
                f"{norms[0]:.4g} without a limit"
            )
            raise Violation(finding, "return the norm before clipping", where)
        shrunk, wanted_shrink = moved[1] / moved[0], 0.01 / norms[0]
        if hasattr(self.backend(), "eps") and shrunk != pytest.approx(wanted_shrink, rel=0.2):
            finding = (
                f"clipping a gradient of {norms[0]:.3g} to 0.01 scaled the update by {shrunk:.3g}"
            )
            cause = (
                "scale all gradients by max_grad_norm / norm where the norm is "
                "larger, before the update"
            )
            raise Violation(f"{finding}; {wanted_shrink:.3g} expected", cause, where)

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
        moved = sum(float((after[name].double() - before[name]).abs().sum()) for name in start)
        expected = sum(
            float((weight - start[name]).abs().sum()) for name, weight in plain.weights().items()
        )
        if not 0.7 < moved / expected < 1.3:
            narrow = sorted({str(w.dtype) for w in after.values() if w.is_floating_point()})
            finding = (
                f"8 steps at lr 1e-5 moved the weights {moved / expected:.2g} times as far as "
                f"in float64 ({narrow})"
            )
            cause = (
                "keep weights and optimizer state in float32 and cast them for matrix products only"
            )
            raise Violation(finding, cause, source_of(engine, "__init__"))

    def test_frozen_parameters_stay(self) -> None:
        """parameters without requires_grad stay as they are"""
        lm = tiny_model(self.families[0])
        for name, parameter in lm.named_parameters():
            parameter.requires_grad_("mlp" in name)
        engine = self.trained_engine(lm=lm, lr=1e-2, weight_decay=0.5)
        before = self.weights(engine)
        engine.train_batch(batch(), answer_loss, answer_weight)
        for name, weight in self.weights(engine).items():
            if torch.equal(weight, before[name]) == ("mlp" in name):
                finding = (
                    f"{name} was not trained"
                    if "mlp" in name
                    else f"{name} was trained, though it is frozen"
                )
                cause = (
                    "give the optimizer the parameters that require gradients, "
                    "at the time it is made"
                )
                raise Violation(finding, cause, source_of(engine, "__init__"))


def _flat_loss(output: ModelOutput, sample: SequenceSample) -> torch.Tensor:
    return (output.logprobs * 0.0).sum()


def _cause_of_rate(rate: float, step: int, shares: tuple[float, ...]) -> str:
    near = (
        {
            shares[step - 1]: "one step late",
            shares[min(step + 1, len(shares) - 1)]: "one step early",
        }
        if step
        else {}
    )
    mistake = next(
        (
            description
            for share, description in near.items()
            if rate == pytest.approx(share, rel=1e-4)
        ),
        None,
    )
    return (
        f"the schedule is {mistake}: version_steps counts from 0"
        if mistake
        else "use rlcli.ops.schedules.learning_rate"
    )
