"""A reward model: learns from pairs which of two answers is preferred, and scores sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    EvalLoader,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.api.synonyms import Synonyms
from rlcli.ops.preference_losses import bradley_terry, chosen_and_rejected

from ._evaluation import mean_loss
from ._pairs import PairSettings, pair_stats


@dataclass(kw_only=True)
class RewardModelInterface(PairSettings, ModelInterface):
    """Bradley-Terry model of preferences. The score of a sequence is the value at its last token,
    so the role has the head `value`. Its `inference` gives PPO the rewards of sequences with the
    same tokenizer."""

    ELSEWHERE: ClassVar[str] = "rm rw paired_rw"
    READS: ClassVar[Declaration] = {
        "train_step": ("packed_input_ids", "margins if use_margins"),
        "evaluate": ("packed_input_ids", "margins if use_margins"),
        "inference": ("packed_input_ids",),
    }
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    HEAD: ClassVar[Declaration] = {
        "train_step": ("value",),
        "evaluate": ("value",),
        "inference": ("value",),
    }
    CUT: ClassVar[Mapping[str, Cut]] = {"inference": "sequence"}
    NEEDS_GROUP: ClassVar[Declaration] = {"train_step": ("2",)}

    LIMITS: ClassVar[Limits] = {"centering": {"ge": 0}}
    SYNONYMS: ClassVar[Synonyms] = {
        "centering": "center_rewards_coefficient",
        "use_margins": "margin_loss add_margin",
    }

    centering: float = 0.0
    """Weight of (chosen + rejected)², which keeps the mean score near 0 (try 0.01). With 0,
    scores may drift."""

    use_margins: bool = False
    """Require the chosen score to exceed the rejected one by the pair's `margins`, which the
    dataset must provide."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on the pairs of a batch."""
        stats: dict[str, float] = model.module.train_batch(
            data, self._loss, self._weight, mb_spec=mb_spec
        )
        return stats

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """`accuracy`: how often the chosen answer has the higher score; also `margin`, `loss` and
        the mean scores."""
        stats, pairs = mean_loss(model, eval_dataloader, self._loss, self._weight)
        return stats | {self.pair_aggregation + "s": pairs}

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` → `rewards`, one per sequence."""
        ones = [[1] * len(lengths) for lengths in data.seqlens["packed_input_ids"]]
        tokens = data.select(["packed_input_ids"])
        scores = model.module.forward(
            tokens, mb_spec, post_hook=_scores, output_seqlens=ones, cut="sequence"
        )
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"rewards": ones}, data={"rewards": scores.float()}
        )

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        chosen, rejected = chosen_and_rejected(_scores(output, batch))
        margins = None
        if self.use_margins:
            ahead, behind = chosen_and_rejected(batch.data["margins"])
            margins = ahead - behind
        weights = self.pair_weights(batch)
        losses = bradley_terry(chosen, rejected, margins, self.centering)
        return (losses * weights).sum(), pair_stats(chosen, rejected, weights)

    def _weight(self, batch: SequenceSample) -> torch.Tensor:
        return self.pair_weights(batch).sum()


def _scores(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
    """[N]: the value at each sequence's last token."""
    lengths = torch.tensor(batch.flat_seqlens("packed_input_ids"), dtype=torch.int64)
    values = output.values
    return values[(lengths.cumsum(0) - 1).to(values.device)]


register_interface("reward_model", RewardModelInterface)
