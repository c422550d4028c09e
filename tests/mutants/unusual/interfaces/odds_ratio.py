"""ORPO: likelihood of chosen answers plus their odds over the rejected ones; no reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface
from rlcli.ops.packing import action_mask


@dataclass(kw_only=True)
class OddsRatio(ModelInterface):
    """ORPO: likelihood of chosen answers plus their odds over the rejected ones; no reference."""

    READS: ClassVar[Declaration] = {"train_step": ("packed_input_ids", "prompt_mask")}
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",)}
    NEEDS_GROUP: ClassVar[Declaration] = {"train_step": ("2",)}

    weight: float = 0.1
    """Weight of the odds ratio."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step."""
        stats: dict[str, float] = model.module.train_batch(
            data, self._loss, _weight, mb_spec=mb_spec
        )
        return stats

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
        lengths = [length - 1 for length in batch.flat_seqlens("packed_input_ids")]
        pairs = zip(output.logprobs.split(lengths), _mask(batch).split(lengths), strict=True)
        sums = [scores[mask].sum() / mask.sum().clamp(min=1) for scores, mask in pairs]
        means = torch.stack(sums or [output.zero]).clamp(max=-1e-4)
        odds = means - torch.log1p(-means.exp())
        counted = _counted(batch)
        ratio = -torch.nn.functional.logsigmoid(odds[0::2] - odds[1::2])
        return ((self.weight * ratio - means[0::2]) * counted).sum()


def _mask(batch: SequenceSample) -> torch.Tensor:
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))


def _counted(batch: SequenceSample) -> torch.Tensor:
    """[P] 1 for each pair of which both answers have tokens, else 0."""
    lengths = [length - 1 for length in batch.flat_seqlens("packed_input_ids")]
    answered = torch.tensor([bool(mask.any()) for mask in _mask(batch).split(lengths)])
    return (answered[0::2] & answered[1::2]).float()


def _weight(batch: SequenceSample) -> torch.Tensor:
    return _counted(batch).sum()


register_interface("odds_ratio", OddsRatio)
