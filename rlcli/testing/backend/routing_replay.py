"""Routing replay: what a sampler reports of its routers, and what prescribed experts change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ROUTED_EXPERTS, SEQUENCES
from rlcli.api.model import GeneratedResponses, GenerationEngine, TrainEngine
from rlcli.errors import ModelError
from rlcli.testing.backend.base import (
    OBJECTIVES,
    SETTINGS,
    BackendChecks,
    Layout,
    batch,
    distance,
    prompts,
    source_of,
    weights_apart,
)
from rlcli.testing.backend.forward import scores
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.lifecycle import layout_name, share_of
from rlcli.testing.backend.plain import PlainTraining, exact, scores_of, sequences
from rlcli.testing.contract import Violation
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks, skip_without_forks
from rlcli.testing.tiny_models import tiny_model

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
OTHER = "mixtral"
"""The mixture with experts in every layer."""
SHARES = (4, 7, 5)
"""Sequences of the first of two data-parallel ranks at each step; at the second, the other has
none."""
LAYOUTS: tuple[Layout, ...] = (
    ({"dp": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp": 2, "ep": 2}, {}),
    ({"cp": 2}, {"context_parallel": "ulysses"}),
    ({"cp": 2}, {"context_parallel": "ring"}),
    ({"cp": 2, "ep": 2}, {"context_parallel": "ulysses"}),
    ({"tp": 2}, {"gradient_checkpointing": True, "recompute": "selective"}),
)
WITH_VIRTUAL_STAGES: tuple[Layout, ...] = (({"pp": 2}, {"virtual_stages": 2}),)
DEEP = "deep_mixtral"
"""Has a layer for every virtual stage."""
MEASURED = {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0}
"""Settings with which an engine reports the load of experts."""
FOLLOW = (
    "route each token of a batch with routed_experts to the experts in its row, also in a pass "
    "that recomputes activations, and weight them by the router's own scores, so that it has "
    "gradients"
)
REPORT = (
    "report the experts of every token that was read, prompts included, layer by layer, and none "
    "for the last token"
)


class RoutingReplayChecks(BackendChecks):
    """For backends that declare ROUTING_REPLAY."""

    @property
    def mixtures(self) -> Sequence[str]:
        """Models of `rlcli.testing.tiny_models` with experts that the backend runs."""
        families = type(self.backend()).FAMILIES or FAMILIES
        return [family for family in FAMILIES if family in families]

    def test_tokens_take_prescribed_experts(self) -> None:
        """routed_experts: steps equal a plain loop's with these experts"""
        self._require_replay(trains=True)
        for family in self.mixtures:
            self._require_followed(ReplayedLife(self, family).deviations(), f"one rank ({family})")
        recomputing = ReplayedLife(self, self.mixtures[0], {"gradient_checkpointing": True})
        self._require_followed(recomputing.deviations(), "one rank that recomputes activations")

    def test_log_probs_follow_prescribed_experts(self) -> None:
        """routed_experts: log-probs with these, and then without"""
        self._require_replay(scores=True)
        for family in self.mixtures:
            engine, sample = self.engine(family), with_experts(batch(), family)
            where = source_of(engine, "forward_micro_batch")
            unrouted = sample.select([SEQUENCES])
            unprescribed, prescribed, again = (
                scores(engine, rows, "log-probs", 1.0) for rows in (unrouted, sample, unrouted)
            )
            plain = PrescribedModel(exact(tiny_model(family)))
            expected = scores_of(plain.prepared(sample), sample)[0].detach()
            if (apart := distance(prescribed, expected)) > self.tolerance:
                raise Violation(f"log-probs of {family} are off by {apart:.2g}", FOLLOW, where)
            if distance(unprescribed, expected) < 0.01:
                raise AssertionError("the prescribed experts are too much like those chosen")
            if not torch.equal(unprescribed, again):
                cause = "prescribe experts for the tokens of that batch alone"
                raise Violation("a later batch without routed_experts differs", cause, where)

    @pytest.fixture(scope="class")
    @classmethod
    def replaying_ranks(cls) -> dict[str, list[dict[str, float]]]:
        """The deviations of each rank, by layout."""
        checks = cls()
        checks._require_replay(trains=True)
        skip_without_forks()
        layouts = {checks.mixtures[0]: LAYOUTS}
        if checks.all_layouts and hasattr(checks.backend(), "virtual_stages"):
            layouts[DEEP] = WITH_VIRTUAL_STAGES
        lives = [
            ReplayedLife(checks, family, {**MEASURED, **settings}, degrees)
            for family, candidates in layouts.items()
            for degrees, settings in checks.tried(candidates, family)
        ]
        return {
            layout_name(life.degrees, life.settings): run_on_ranks(2, life.on_rank)
            for life in lives
        }

    def test_ranks_take_prescribed_experts(
        self, replaying_ranks: dict[str, list[dict[str, float]]]
    ) -> None:
        """ranks: routed_experts are those of a rank's own tokens"""
        for layout, ranks in replaying_ranks.items():
            for rank, deviations in enumerate(ranks):
                self._require_followed(deviations, f"rank {rank} of {layout}")

    def test_experts_that_a_model_lacks_are_refused(self) -> None:
        """routed_experts of another model, or for a dense one, are refused"""
        self._require_replay(trains=True)
        sample, objective = with_experts(batch(), OTHER), OBJECTIVES["lm"]
        findings = dict.fromkeys(self.mixtures, "experts per token in") | {"llama": "no routers"}
        del findings[OTHER]
        for family, finding in findings.items():
            engine = self.trained_engine(family)
            with pytest.raises(ModelError, match=finding):
                engine.train_batch(sample, objective.loss, objective.weight)

    def test_a_sampler_reports_the_experts_of_all_tokens(self) -> None:
        """routing_replay: reports the experts of prompt and response"""
        self._require_replay(generates=True)
        for family in self.mixtures:
            engine = self._replaying_sampler(family)
            # slots are refilled, and gaps between them closed
            drawn = generate(
                engine, routing_replay=True, responses_per_prompt=2, max_concurrent_responses=3
            )
            if (finding := misreport(drawn, family)) is not None:
                raise Violation(finding, REPORT, source_of(engine, "generate"))

    def test_without_routing_replay_nothing_is_reported(self) -> None:
        """without routing_replay no experts are reported"""
        self._require_replay(generates=True)
        engine = self._replaying_sampler(self.mixtures[0])
        if generate(engine).routed_experts is not None:
            cause = "report them only if the settings ask for them"
            raise Violation(
                "routed_experts without being asked", cause, source_of(engine, "generate")
            )

    def test_a_dense_model_has_no_experts_to_replay(self) -> None:
        """routing_replay of a dense model is refused"""
        self._require_replay(generates=True)
        with pytest.raises(ModelError, match="has no routers"):
            generate(self._replaying_sampler("llama"), routing_replay=True)

    # -- parts -------------------------------------------------------------------------------------

    def _require_replay(
        self, trains: bool = False, scores: bool = False, generates: bool = False
    ) -> None:
        cls = type(self.backend())
        if not cls.ROUTING_REPLAY:
            pytest.skip("does not promise it (ROUTING_REPLAY)")
        if not self.mixtures:
            pytest.skip("not tried: runs no mixture of experts")
        if (trains and not cls.TRAINS) or (scores and not cls.SCORES):
            pytest.skip("does not train" if trains else "does not score")
        if generates and not cls.GENERATES:
            pytest.skip("does not generate")

    def _replaying_sampler(self, family: str) -> Any:
        engine = self.engine(family)
        if not isinstance(engine, GenerationEngine):
            pytest.skip("does not generate")
        return engine

    def _require_followed(self, deviations: Mapping[str, float], who: str) -> None:
        for quantity, apart in deviations.items():
            if not apart <= self.tolerance:
                finding = f"{quantity} of {who} is off by {apart:.2g} with prescribed experts"
                where = source_of(self.trained_engine(), "forward_micro_batch", "loss_of")
                raise Violation(finding, FOLLOW, where)


@dataclass(frozen=True)
class ReplayedLife:
    """A few training steps with prescribed experts, alone or as one of two ranks."""

    checks: BackendChecks
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)

    @property
    def _measures(self) -> bool:
        """Whether the engine reports the load of experts."""
        return all(self.settings.get(name) == 0 for name in MEASURED) and hasattr(
            self.checks.backend(), "router_aux_loss_coef"
        )

    def on_rank(self, rank: int) -> dict[str, float]:
        """Likewise, in a process of its own."""
        with self.checks.at_device():
            return self.deviations(rank)

    def deviations(self, rank: int | None = None) -> dict[str, float]:
        """The largest relative error of each number, compared with a plain loop."""
        engine = self._engine(rank)
        plain = PlainTraining(tiny_model(self.family), self.checks.optimizer_settings(**SETTINGS))
        model = PrescribedModel(plain.lm)
        worst = {"the report": self._misreported(engine)}
        for step, rate in zip(range(len(SHARES)), self.checks.rates(), strict=False):
            sample = with_experts(batch(step), self.family, step)
            model.prepared(sample)
            expected = plain.step([sample], OBJECTIVES["lm"].plain, rate)
            if self._measures:
                expected |= model.loads()
            errors = relative_errors(self._train(engine, sample, step, rank), expected)
            worst |= {name: max(worst.get(name, 0.0), error) for name, error in errors.items()}
        weights = self.checks.weights(engine)
        return worst | {"weights": weights_apart(weights, plain.weights())}

    def _misreported(self, engine: TrainEngine) -> float:
        """Infinite if the engine generates and reports other experts, otherwise 0."""
        if not isinstance(engine, GenerationEngine):
            return 0.0
        drawn = generate(engine, routing_replay=True, responses_per_prompt=2)
        return math.inf if misreport(drawn, self.family) else 0.0

    def _train(
        self, engine: TrainEngine, sample: SequenceSample, step: int, rank: int | None
    ) -> Mapping[str, float]:
        """The stats of a step on this rank's share."""
        share, objective, cuts = sample, OBJECTIVES["lm"], MicroBatchSpec(n_mbs=3 - step)
        if rank is not None and self.degrees.get("dp", 1) > 1:
            share = share_of(sample, SHARES[step], rank, 2)
        return engine.train_batch(share, objective.loss, objective.weight, "global", cuts, step)

    def _engine(self, rank: int | None) -> TrainEngine:
        degrees = {name: size for name, size in self.degrees.items() if name != "ep"}
        mesh = None if rank is None else mesh_of_ranks(**degrees)
        settings = SETTINGS | dict(self.settings)
        settings |= {"mesh": mesh, "expert_ranks": self.degrees.get("ep", 1)}
        return self.checks.trained_engine(self.family, **settings)


def relative_errors(actual: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, float]:
    """Relative where a number is not small."""
    return {
        name: abs(actual.get(name, math.inf) - value) / max(abs(value), 0.1)
        for name, value in expected.items()
    }


# -- a plain model ---------------------------------------------------------------------------------


class PrescribedModel:
    """A transformers model whose routers take prescribed experts, one sequence at a time; the rule
    by which they are weighted is written down again here."""

    def __init__(self, lm: Any):
        self._lm = lm
        self._routers: list[Any] = routers_of(lm)
        self._waiting: Iterator[torch.Tensor] = iter(())
        normalizes = getattr(lm.config, "norm_topk_prob", True)
        for router in self._routers:
            router.forward = _prescribed(router, normalizes)
        lm.base_model.register_forward_pre_hook(self._take_next)

    def prepared(self, sample: SequenceSample) -> nn.Module:
        """The model, ready for one pass over each sequence of the sample, in order."""
        experts = sequences(sample, ROUTED_EXPERTS)
        self._waiting = iter(experts)
        for router in self._routers:
            router.counts = torch.zeros(router.num_experts, dtype=torch.int64)
        lm: nn.Module = self._lm
        return lm

    def _take_next(self, *_: Any) -> None:
        experts = next(self._waiting).long()
        for layer, router in enumerate(self._routers):
            router.experts = experts[:, layer]

    def loads(self) -> dict[str, float]:
        """The most and the least that an expert has been used since the model was prepared."""
        counts = torch.stack([router.counts for router in self._routers]).double()
        relative = counts / counts.mean(-1, keepdim=True)
        return {"router_load_max": float(relative.max()), "router_load_min": float(relative.min())}


def _prescribed(router: Any, normalizes: bool) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = F.linear(hidden.flatten(0, -2), router.weight)
        last = logits[-1:].topk(router.top_k, -1).indices  # for which none are prescribed
        experts = torch.cat([router.experts, last])
        router.counts += experts.flatten().bincount(minlength=len(router.counts))
        weights = logits.softmax(-1).gather(-1, experts)
        if normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, experts

    return forward


def routers_of(lm: Any) -> list[Any]:
    return [module for module in lm.modules() if type(module).__name__.endswith("TopKRouter")]


def with_experts(sample: SequenceSample, family: str, seed: int = 0) -> SequenceSample:
    """The batch with experts for each token, drawn at random."""
    lm: Any = tiny_model(family)
    routers = routers_of(lm)
    lengths = [[max(n - 1, 0) for n in group] for group in sample.seqlens[SEQUENCES]]
    rows = sum(map(sum, lengths))
    drawn = torch.rand(
        (rows, len(routers), routers[0].num_experts), generator=torch.Generator().manual_seed(seed)
    )
    experts = drawn.topk(routers[0].top_k, -1).indices.to(torch.uint8)
    addition = SequenceSample.from_default(
        ids=sample.ids, seqlens={ROUTED_EXPERTS: lengths}, data={ROUTED_EXPERTS: experts}
    )
    extended = sample.select(sample.keys)
    extended.update_(addition)
    return extended


def misreport(drawn: GeneratedResponses, family: str) -> str | None:
    """What is wrong with the experts that are reported for two responses to each prompt."""
    if drawn.routed_experts is None:
        return "responses without routed_experts"
    questions, plain = sequences(prompts(), "packed_prompts"), exact(tiny_model(family))
    for number, (tokens, actual) in enumerate(zip(drawn.tokens, drawn.routed_experts, strict=True)):
        text = torch.cat([questions[number // 2], tokens])
        expected = chosen_by(plain, text[:-1])
        if actual.shape != expected.shape or actual.dtype != torch.uint8:
            form = f"shape {tuple(actual.shape)} and {actual.dtype}"
            return f"experts of {form}, not {tuple(expected.shape)} and torch.uint8"
        if not torch.equal(_sorted(actual), expected):
            return f"other experts than the routers of {family} choose"
    return None


@torch.no_grad()
def chosen_by(lm: Any, text: torch.Tensor) -> torch.Tensor:
    """[T, L, k] int64: the experts that the routers of a plain model choose, in ascending order."""
    settings = {"use_cache": False, "output_router_logits": True}
    logits = torch.stack(lm.base_model(input_ids=text[None], **settings).router_logits, 1)
    return _sorted(logits.topk(lm.config.num_experts_per_tok, -1).indices)


def _sorted(experts: torch.Tensor) -> torch.Tensor:
    return experts.to(torch.int64).sort(-1).values
