"""Samples whose sequences are pairs: chosen 0, rejected 0, chosen 1, rejected 1, …,
all for the same prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.metrics import Metrics
from rlcli.api.model import ModelInterface
from rlcli.errors import DataError
from rlcli.ops.preference_losses import PAIR_AGGREGATIONS, PairAggregationName


@dataclass(kw_only=True)
class PairSettings(ModelInterface):
    """How much each pair counts."""

    METRICS: ClassVar[Metrics] = {
        "chosen_reward": ("reward", "mean reward of the chosen answers"),
        "rejected_reward": ("reward", "mean reward of the rejected answers"),
        "margin": ("reward", "mean of the chosen answer's reward less that of the rejected one"),
        "accuracy": (
            "share",
            "share of pairs whose chosen answer has the higher reward; ties count half",
        ),
        "pairs": ("pairs", "pairs that were evaluated, with pair_aggregation: pair"),
        "prompts": ("prompts", "prompts that were evaluated, with pair_aggregation: prompt"),
    }

    pair_aggregation: PairAggregationName = "pair"
    """pair: every pair has the same weight, so prompts with many pairs have more influence. prompt:
    every prompt has the same weight, as the mean of its pairs. Reported numbers are averaged in the
    same way."""

    def pair_weights(
        self, batch: SequenceSample, counted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[P] float32: the weight of each pair, 0 for those that `counted` [P] leaves out."""
        pairs = pairs_of(batch)
        if counted is None:
            counted = torch.ones(
                sum(pairs), dtype=torch.bool, device=batch.data["packed_input_ids"].device
            )
        return PAIR_AGGREGATIONS[self.pair_aggregation](pairs, counted)


def pairs_of(batch: SequenceSample) -> list[int]:
    """The number of pairs in each sample. Raises DataError for a sequence without its
    counterpart."""
    counts = [len(lengths) for lengths in batch.seqlens["packed_input_ids"]]
    for id_, count in zip(batch.ids, counts, strict=True):
        if count % 2:
            message = (
                f"sample {id_} has {count} sequences; pairs are chosen 0, rejected 0, "
                "chosen 1, rejected 1, …"
            )
            raise DataError(message, hint="use a dataset of pairs, such as paired", code="F31")
    return [count // 2 for count in counts]


def pair_stats(
    chosen: torch.Tensor, rejected: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Weighted sums over pairs: of the rewards [P], of how often the chosen one is higher (ties
    count half), and of the margin."""
    rows = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": chosen - rejected,
        "accuracy": ((chosen - rejected).sign() + 1) / 2,
    }
    return {name: (row.detach() * weights).sum() for name, row in rows.items()}
