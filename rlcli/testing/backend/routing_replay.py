"""Routing replay: what a sampler reports of its routers, and what prescribed experts change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ROUTED_EXPERTS, SEQUENCES
from rlcli.api.model import GeneratedResponses, GenerationEngine, TrainEngine
from rlcli.testing.backend.base import source_of
from rlcli.testing.backend.differences import distance, require_close, require_same
from rlcli.testing.backend.forward import plain_scores, scores
from rlcli.testing.backend.generation import asked, generate
from rlcli.testing.backend.mixtures import Deviations, MixtureChecks, MixtureLife, PlainStep
from rlcli.testing.backend.objectives import OBJECTIVES
from rlcli.testing.backend.plain import PlainTraining, Stats, plain_model, sequences
from rlcli.testing.backend.samples import batch
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.tiny_models import tiny_model

MEASURED = {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0}
"""Settings with which an engine reports the load of experts."""
REPORT = (
    "report the experts of every token that was read, prompts included, layer by layer, and none "
    "for the last token"
)


class RoutingReplayChecks(MixtureChecks):
    """For backends that declare ROUTING_REPLAY."""

    cause = (
        "route each token of a batch with routed_experts to the experts in its row, also in a pass "
        "that recomputes activations, and weight them by the router's own scores, so that it has "
        "gradients"
    )

    def test_tokens_take_prescribed_experts(self) -> None:
        """routed_experts: steps equal a plain loop's with these experts"""
        self._require_replay("TRAINS")
        for family in self.mixtures:
            self.require_plain(ReplayedLife(self, family).deviations(), f"one rank ({family})")
        recomputing = ReplayedLife(
            self, self.mixtures[0], settings={"gradient_checkpointing": True}
        )
        self.require_plain(recomputing.deviations(), "one rank that recomputes activations")

    def test_log_probs_follow_prescribed_experts(self) -> None:
        """routed_experts: log-probs with these, and then without"""
        self._require_replay("SCORES")
        for family in self.mixtures:
            engine, sample = self.engine(family), with_experts(batch(), family)
            where = source_of(engine, "forward_micro_batch")
            unrouted = sample.select([SEQUENCES])
            unprescribed = scores(engine, unrouted)
            prescribed = scores(engine, sample)
            expected = plain_scores(PrescribedModel(plain_model(family)).prepared(sample), sample)
            quantity = f"log-probs of {family} with prescribed experts"
            require_close(quantity, prescribed, expected, self.tolerance, self.cause, where)
            if distance(unprescribed, expected) < 0.01:
                raise AssertionError("the prescribed experts are too much like those chosen")
            later, occasion = scores(engine, unrouted), "in a later batch without routed_experts"
            cause = "prescribe experts for the tokens of that batch alone"
            require_same("log-probs", later, unprescribed, occasion, cause, where)

    @pytest.fixture(scope="class")
    @classmethod
    def replaying_ranks(cls) -> dict[str, list[Deviations]]:
        """The deviations of each rank, by layout."""
        checks = cls()
        checks._require_replay("TRAINS")
        return checks.on_two_ranks(ReplayedLife, MEASURED)

    def test_ranks_take_prescribed_experts(
        self, replaying_ranks: dict[str, list[Deviations]]
    ) -> None:
        """ranks: routed_experts are those of a rank's own tokens"""
        self.require_plain_ranks(replaying_ranks)

    def test_a_sampler_reports_the_experts_of_all_tokens(self) -> None:
        """routing_replay: reports the experts of prompt and response"""
        self._require_replay("GENERATES")
        for family in self.mixtures:
            engine = self.engine(family)
            # slots are refilled, and gaps between them closed
            drawn = generate(
                engine, routing_replay=True, responses_per_prompt=2, max_concurrent_responses=3
            )
            if (finding := misreport(drawn, family)) is not None:
                raise Violation(finding, REPORT, source_of(engine, "generate"))

    def _require_replay(self, ability: str) -> None:
        """Skip the check of a backend that does not declare the ability and ROUTING_REPLAY."""
        skip_if(
            not self.cls.ROUTING_REPLAY or not getattr(self.cls, ability),
            f"does not promise it (ROUTING_REPLAY, {ability})",
        )
        skip_unless(self.mixtures, "not tried: runs no mixture of experts")


class ReplayedLife(MixtureLife):
    """With prescribed experts."""

    def sample(self, step: int) -> SequenceSample:
        return with_experts(batch(step), self.family, step)

    def plain_step(self, plain: PlainTraining) -> PlainStep:
        model = PrescribedModel(plain.lm)

        def step(sample: SequenceSample, rate: float) -> Mapping[str, float]:
            model.prepared(sample)
            numbers = plain.step([sample], OBJECTIVES[self.head].plain, rate)
            return numbers | (model.loads() if self._measures else {})

        return step

    def before_training(self, engine: TrainEngine) -> Deviations:
        """Infinite if the engine generates and reports other experts, otherwise 0."""
        if not isinstance(engine, GenerationEngine):
            return {}
        drawn = generate(engine, routing_replay=True, responses_per_prompt=2)
        return {"the report": math.inf if misreport(drawn, self.family) else 0.0}

    @property
    def _measures(self) -> bool:
        """Whether the engine reports the load of experts."""
        return self.settings.keys() >= MEASURED.keys() and hasattr(
            self.checks.backend(), "router_aux_loss_coef"
        )


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
        self._waiting = iter(sequences(sample, ROUTED_EXPERTS))
        for router in self._routers:
            router.counts = torch.zeros(router.num_experts, dtype=torch.int64)
        return self._lm

    def _take_next(self, *_: Any) -> None:
        experts = next(self._waiting).long()
        for layer, router in enumerate(self._routers):
            router.experts = experts[:, layer]

    def loads(self) -> Stats:
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
    routers = routers_of(tiny_model(family))
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
    plain = plain_model(family)
    for number, (tokens, actual) in enumerate(zip(drawn.tokens, drawn.routed_experts, strict=True)):
        expected = chosen_by(plain, torch.cat([asked()[number // 2], tokens])[:-1])
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
