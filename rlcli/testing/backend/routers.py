"""Losses of routers: with them, too, a step equals that of a plain loop,
however its batch is cut and spread over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.model import TrainEngine
from rlcli.errors import ModelError
from rlcli.testing.backend.base import (
    OBJECTIVES,
    SETTINGS,
    BackendChecks,
    Layout,
    batch,
    source_of,
    weights_apart,
)
from rlcli.testing.backend.lifecycle import layout_name
from rlcli.testing.backend.plain import Loss, PlainTraining, sequences
from rlcli.testing.contract import Violation
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks, skip_without_forks
from rlcli.testing.tiny_models import tiny_model

LOSSES = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.02}
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
LAYOUTS: tuple[Layout, ...] = (
    ({"dp": 2}, {}),
    ({"dp": 2, "ep": 2}, {}),
    ({"cp": 2}, {}),
    ({"cp": 2, "ep": 2}, {}),
    ({"pp": 2}, {}),
    ({"tp": 2}, {}),
)
WITH_VIRTUAL_STAGES: tuple[Layout, ...] = (({"pp": 2}, {"virtual_stages": 2}),)
DEEP = "deep_mixtral"
"""Has a layer for every virtual stage."""
SHARES = (4, 7, 5)
"""Sequences of the first of two data-parallel ranks at each step; at the second, the other has
none."""


class RouterChecks(BackendChecks):
    """For backends with the setting `router_aux_loss_coef`."""

    def test_router_losses_train_like_a_plain_loop(self) -> None:
        """losses of routers: steps equal a plain loop's, for any micro-batches"""
        self._require_setting()
        for family in FAMILIES:
            for head in OBJECTIVES:
                self._require_exact(RoutedLife(self, family, head).deviations(None), "one rank")

    def test_recomputed_routers_count_once(self) -> None:
        """losses of routers are the same with recomputed activations"""
        self._require_setting()
        life = RoutedLife(self, FAMILIES[0], "lm", {"gradient_checkpointing": True})
        self._require_exact(life.deviations(None), "one rank that recomputes activations")

    @pytest.fixture(scope="class")
    @classmethod
    def routed_ranks(cls) -> dict[str, list[dict[str, float]]]:
        """The deviations of each rank, by layout."""
        checks = cls()
        checks._require_setting()
        skip_without_forks()
        layouts = {FAMILIES[0]: LAYOUTS}
        if checks.all_layouts and hasattr(checks.backend(), "virtual_stages"):
            layouts[DEEP] = WITH_VIRTUAL_STAGES
        lives = [
            RoutedLife(checks, family, "lm", settings, degrees)
            for family, candidates in layouts.items()
            for degrees, settings in checks.tried(candidates, family)
        ]
        return {
            layout_name(life.degrees, life.settings): run_on_ranks(2, life.on_rank)
            for life in lives
        }

    def test_ranks_share_router_losses(
        self, routed_ranks: dict[str, list[dict[str, float]]]
    ) -> None:
        """ranks, uneven shares: losses of routers are those of all"""
        for layout, ranks in routed_ranks.items():
            for rank, deviations in enumerate(ranks):
                self._require_exact(deviations, f"rank {rank} of {layout}")

    def test_router_losses_are_added_only_where_they_are_set(self) -> None:
        """without coefficients nothing is added or measured"""
        self._require_setting()
        engine = self.trained_engine(FAMILIES[0], **SETTINGS)
        plain = PlainTraining(tiny_model(FAMILIES[0]), self.optimizer_settings(**SETTINGS))
        objective = OBJECTIVES["lm"]
        expected = plain.step([batch()], objective.plain, self.rates()[0])
        stats = engine.train_batch(batch(), objective.loss, objective.weight, version_steps=0)
        self._require_exact({"grad_norm": _error(stats, expected, "grad_norm")}, "one rank")
        if measured := sorted(name for name in stats if name.startswith("router")):
            cause = "compute it only if its coefficient is set"
            raise Violation(f"{', '.join(measured)} without a coefficient", cause, _of(engine))

    def test_a_model_without_routers_is_refused(self) -> None:
        """a coefficient for a model without routers is refused"""
        self._require_setting()
        with pytest.raises(ModelError, match="no routers that can be balanced"):
            self.trained_engine("llama", router_aux_loss_coef=0.1)

    def _require_setting(self) -> None:
        if not self.trains():
            pytest.skip("does not train")
        if not hasattr(self.backend(), "router_aux_loss_coef"):
            pytest.skip("has no setting router_aux_loss_coef")

    def _require_exact(self, deviations: dict[str, float], who: str) -> None:
        for quantity, apart in deviations.items():
            if not apart <= self.tolerance:
                cause = (
                    "the load of experts is that of all tokens of a step, on all ranks and in "
                    "all micro-batches; each counts once"
                )
                finding = f"{quantity} of {who} is off by {apart:.2g} with losses of routers"
                raise Violation(finding, cause, _of(self.trained_engine()))


@dataclass(frozen=True)
class RoutedLife:
    """A few training steps with losses of routers, alone or as one of two ranks."""

    checks: BackendChecks
    family: str
    head: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)

    def on_rank(self, rank: int) -> dict[str, float]:
        """Likewise, in a process of its own."""
        with self.checks.at_device():
            return self.deviations(rank)

    def deviations(self, rank: int | None) -> dict[str, float]:
        """The largest relative error of each number, compared with a plain loop."""
        engine = self._engine(rank)
        plain = PlainTraining(
            tiny_model(self.family, head=self.head), self.checks.optimizer_settings(**SETTINGS)
        )
        worst: dict[str, float] = {}
        for step, rate in zip(range(len(SHARES)), self.checks.rates(), strict=False):
            actual = self._train(engine, step, rank)
            expected = self._expected(plain, step, rate)
            for name in expected:
                worst[name] = max(worst.get(name, 0.0), _error(actual, expected, name))
        weights = self.checks.weights(engine)
        return worst | {"weights": weights_apart(weights, plain.weights())}

    def _engine(self, rank: int | None) -> TrainEngine:
        mesh = None if rank is None else mesh_of_ranks(**self.degrees)
        settings = SETTINGS | LOSSES | dict(self.settings)
        settings |= {"head": self.head, "mesh": mesh, "expert_ranks": self.degrees.get("ep", 1)}
        return self.checks.trained_engine(self.family, **settings)

    def _train(self, engine: TrainEngine, step: int, rank: int | None) -> Mapping[str, float]:
        """The stats of a step; `loss` includes those of the routers."""
        is_alone = rank is None or "dp" not in self.degrees
        share = batch(step) if is_alone else _share(step, rank or 0)
        objective, cuts = OBJECTIVES[self.head], MicroBatchSpec(n_mbs=3 - step)
        stats = engine.train_batch(share, objective.loss, objective.weight, "global", cuts, step)
        added = sum(
            coefficient * stats.get(name.removesuffix("_coef"), 0.0)
            for name, coefficient in LOSSES.items()
        )
        return stats | {"loss": stats["loss"] + added}

    def _expected(self, plain: PlainTraining, step: int, rate: float) -> Mapping[str, float]:
        """The same of a plain loop over all sequences."""
        reference = RouterReference(batch(step))
        loss = reference.added_to(OBJECTIVES[self.head].plain)
        return plain.step([batch(step)], loss, rate) | reference.metrics


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


def _share(step: int, rank: int) -> SequenceSample:
    """A rank's sequences of a step."""
    sample, cut = batch(step), SHARES[step]
    return sample.select_indices(range(cut) if rank == 0 else range(cut, sample.bs))


def _error(actual: Mapping[str, float], expected: Mapping[str, float], name: str) -> float:
    """The difference of a number; relative where the number is not small."""
    return abs(actual.get(name, float("nan")) - expected[name]) / max(abs(expected[name]), 0.1)


def _of(engine: Any) -> str:
    return source_of(engine, "loss_of", "forward_backward_batch")
