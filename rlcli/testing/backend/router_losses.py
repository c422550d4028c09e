"""Losses of routers: the scale of what is reported, and that a step reduces it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.model import ModelOutput
from rlcli.testing.backend.base import source_of
from rlcli.testing.backend.mixtures import MixtureChecks
from rlcli.testing.backend.objectives import OBJECTIVES, answer_loss, train
from rlcli.testing.backend.plain import Stats
from rlcli.testing.backend.routing_replay import routers_of
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.tiny_models import tiny_model

AUXILIARY = "router_aux_loss"
LOSSES = (AUXILIARY, "router_z_loss")
"""Metrics, each with a setting of its name and `_coef`."""
COEFFICIENT = 0.5
RATE = 1e-3
"""Of gradient descent."""
EPS = 1e3
"""So far above all gradients that the first step of AdamW is one of gradient descent with the
learning rate lr / eps."""
DESCENT: dict[str, Any] = {
    "lr": RATE * EPS, "eps": EPS, "weight_decay": 0.0, "max_grad_norm": 1e9,
}  # fmt: skip
MICRO_BATCHES = 3
"""Of a step: what a router loses is a mean over the tokens of all of them."""
DEVIATION = 0.2
"""Share of a reduction that a step may deviate by from that of an infinitely small one."""


class RouterLossChecks(MixtureChecks):
    """For backends with the settings `router_aux_loss_coef` and `router_z_loss_coef`."""

    cause = (
        "a loss of routers is a mean over the layers that have experts and over all tokens of a "
        "step; what is reported is what is added to the loss, without its coefficient"
    )

    def test_the_auxiliary_loss_of_routers_without_preferences(self) -> None:
        """router_aux_loss is experts per token if all are equally likely"""
        lm: Any = tiny_model(self._mixture())
        routers = routers_of(lm)
        for router in routers:
            nn.init.zeros_(router.weight)
        engine = self.trained_engine(lm=lm, router_aux_loss_coef=0.0)
        actual = _step(engine, AUXILIARY)[AUXILIARY]
        expected = lm.config.num_experts_per_tok
        if actual != pytest.approx(expected, rel=self.tolerance):
            raise Violation(
                f"{AUXILIARY} is {actual:.6g}, with {len(routers)} layers of experts, {expected} "
                "per token, that are equally likely",
                f"it should be {expected}: {self.cause}",
                _training(engine),
            )

    def test_steps_reduce_the_losses_of_routers(self) -> None:
        """a step reduces losses of routers as its gradient norm says"""
        family = self._mixture()
        self.require_settings(*DESCENT)
        for name in LOSSES:
            coefficient = {f"{name}_coef": COEFFICIENT}
            self._require_reduction(self.trained_engine(family, **DESCENT, **coefficient), name)

    def _require_reduction(self, engine: Any, name: str) -> None:
        """Raises Violation unless a step on COEFFICIENT times the loss, with a gradient of this
        norm, reduces the loss by RATE * norm**2 / COEFFICIENT: what it does to first order."""
        before, after = _step(engine, name), _step(engine, name)
        norm, actual = before["grad_norm"], before[name] - after[name]
        expected = RATE * norm**2 / COEFFICIENT
        rounding = self.tolerance * abs(before[name])
        if not norm or actual != pytest.approx(expected, rel=DEVIATION, abs=rounding):
            raise Violation(
                f"a step of gradient descent on {COEFFICIENT} times {name}, whose gradient "
                f"norm is {norm:.4g}, reduced it by {actual:.4g} instead of {expected:.4g}",
                self.cause,
                _training(engine),
            )

    def _mixture(self) -> str:
        """A model with several layers of experts; skips the check if there are no such losses."""
        self.require_settings(*(f"{name}_coef" for name in LOSSES))
        skip_unless(self.mixtures, "not tried: runs no mixture of experts")
        return self.mixtures[0]


def _no_loss(output: ModelOutput, sample: SequenceSample) -> torch.Tensor:
    """0, so that only the routers have losses."""
    summed: torch.Tensor = answer_loss(output, sample)[0]
    return summed * 0.0


def _step(engine: Any, name: str) -> Stats:
    """The stats of a step, which report a loss of routers; skips the check if they do not."""
    objective = replace(OBJECTIVES["lm"], loss=_no_loss)
    stats = train(engine, None, None, objective, mb_spec=MicroBatchSpec(n_mbs=MICRO_BATCHES))
    skip_if(name not in stats, f"does not report {name}")
    return stats


def _training(engine: Any) -> str:
    return source_of(engine, "loss_of", "forward_backward_batch", "train_batch")
