"""Losses of routers, which our engines have as settings: with them, too, a step equals that of a
plain loop, however its batch is cut and spread over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from rlcli.api.data import SequenceSample
from rlcli.errors import ModelError
from rlcli.testing.backend.base import SETTINGS, source_of
from rlcli.testing.backend.mixtures import (
    FAMILIES,
    Deviations,
    MixtureChecks,
    MixtureLife,
    PlainStep,
)
from rlcli.testing.backend.objectives import OBJECTIVES
from rlcli.testing.backend.plain import Loss, PlainTraining, sequences
from rlcli.testing.backend.samples import batch
from rlcli.testing.contract import Violation

LOSSES = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.02}


class RouterChecks(MixtureChecks):
    """For backends with the setting `router_aux_loss_coef`."""

    cause = (
        "the load of experts is that of all tokens of a step, on all ranks and in all "
        "micro-batches; each counts once"
    )

    def test_router_losses_train_like_a_plain_loop(self) -> None:
        """losses of routers: steps equal a plain loop's, for any micro-batches"""
        for family in FAMILIES:
            for head in OBJECTIVES:
                life = RoutedLife(self, family, head, LOSSES)
                self.require_plain(life.deviations(), f"one rank ({family}, {head})")

    def test_recomputed_routers_count_once(self) -> None:
        """losses of routers are the same with recomputed activations"""
        life = RoutedLife(self, FAMILIES[0], settings=LOSSES | {"gradient_checkpointing": True})
        self.require_plain(life.deviations(), "one rank that recomputes activations")

    @pytest.fixture(scope="class")
    @classmethod
    def routed_ranks(cls) -> dict[str, list[Deviations]]:
        """The deviations of each rank, by layout."""
        return cls().on_two_ranks(RoutedLife, LOSSES)

    def test_ranks_share_router_losses(self, routed_ranks: dict[str, list[Deviations]]) -> None:
        """ranks, uneven shares: losses of routers are those of all"""
        self.require_plain_ranks(routed_ranks)

    def test_router_losses_are_added_only_where_they_are_set(self) -> None:
        """without coefficients nothing is added or measured"""
        engine = self.trained_engine(FAMILIES[0], **SETTINGS)
        objective = OBJECTIVES["lm"]
        self.require_plain(MixtureLife(self, FAMILIES[0]).deviations(), "one rank")
        stats = engine.train_batch(batch(), objective.loss, objective.weight, version_steps=0)
        if measured := sorted(name for name in stats if name.startswith("router")):
            cause = "compute it only if its coefficient is set"
            where = source_of(engine, "loss_of", "forward_backward_batch")
            raise Violation(f"{', '.join(measured)} without a coefficient", cause, where)

    def test_a_model_without_routers_is_refused(self) -> None:
        """a coefficient for a model without routers is refused"""
        with pytest.raises(ModelError, match="no routers that can be balanced"):
            self.trained_engine("llama", router_aux_loss_coef=0.1)


class RoutedLife(MixtureLife):
    """With losses of routers."""

    def plain_step(self, plain: PlainTraining) -> PlainStep:
        def step(sample: SequenceSample, rate: float) -> Mapping[str, float]:
            reference = RouterReference(sample)
            loss = reference.added_to(OBJECTIVES[self.head].plain)
            return plain.step([sample], loss, rate) | reference.metrics

        return step

    def reported(self, stats: Mapping[str, float]) -> Mapping[str, float]:
        """`loss` includes those of the routers."""
        added = sum(
            coefficient * stats.get(name.removesuffix("_coef"), 0.0)
            for name, coefficient in LOSSES.items()
        )
        return {**stats, "loss": stats["loss"] + added}


class RouterReference:
    """The losses and measures of a plain model's routers for a batch, with transformers' own
    function, layer by layer."""

    def __init__(self, sample: SequenceSample):
        self.metrics: dict[str, float] = {}
        """Filled in when the losses are computed."""
        self._sample = sample

    def added_to(self, loss: Loss) -> Loss:
        """The loss function with the losses of the routers, times their coefficients."""

        def added(lm: nn.Module, sample: SequenceSample) -> tuple[torch.Tensor, float]:
            summed, weight = loss(lm, sample)
            return summed + weight * self._losses(lm), weight

        return added

    def _losses(self, lm: Any) -> torch.Tensor:
        layers = self._logits(lm)
        experts, per_token = layers[0].shape[-1], lm.config.num_experts_per_tok
        balance: Any = vars(inspect.getmodule(type(lm.base_model)))["load_balancing_loss_func"]
        aux = torch.stack([balance((layer,), experts, per_token) for layer in layers]).mean()
        z = torch.stack([layer.logsumexp(-1).square().mean() for layer in layers]).mean()
        self.metrics = {
            "router_aux_loss": aux.item(),
            "router_z_loss": z.item(),
            **_measures(torch.stack(layers).detach(), per_token),
        }
        return LOSSES["router_aux_loss_coef"] * aux + LOSSES["router_z_loss_coef"] * z

    def _logits(self, lm: Any) -> list[torch.Tensor]:
        """[T, E] of each layer with experts, from passes over one sequence at a time."""
        settings = {"use_cache": False, "output_router_logits": True}
        outputs = [
            lm.base_model(input_ids=tokens[None], **settings).router_logits
            for tokens in sequences(self._sample)
        ]
        return [torch.cat(parts) for parts in zip(*outputs, strict=True)]


def _measures(logits: torch.Tensor, per_token: int) -> dict[str, float]:
    """From the logits [L, T, E] of all layers."""
    chosen = logits.topk(per_token, -1).indices
    loads = nn.functional.one_hot(chosen, logits.shape[-1]).sum((1, 2)).double()
    relative = loads / loads.mean(-1, keepdim=True)
    return {
        "router_entropy": float(torch.distributions.Categorical(logits=logits).entropy().mean()),
        "router_load_max": float(relative.max()),
        "router_load_min": float(relative.min()),
        "router_dropped": 0.0,
    }
