"""Likelihood of the answers with smoothed labels, from whole distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface
from rlcli.ops.packing import action_mask


@dataclass(kw_only=True)
class SmoothedLabels(ModelInterface):
    """Likelihood of the answers with smoothed labels, from whole distributions."""

    READS: ClassVar[Declaration] = {"train_step": ("packed_input_ids", "prompt_mask")}
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",)}

    smoothing: float = 0.1
    """Share of each target that is spread over the vocabulary."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step."""
        stats: dict[str, float] = model.module.train_batch(
            data, self._loss, _weight, mb_spec=mb_spec
        )
        return stats

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
        mask, lengths = _mask(batch), batch.flat_seqlens("packed_input_ids")
        scores = output.logits.log_softmax(-1)
        rows = torch.cat([part[:-1] for part in scores.split(lengths)])
        spread = -rows.mean(-1)[mask].sum()
        return -(1 - self.smoothing) * output.logprobs[mask].sum() + self.smoothing * spread


def _mask(batch: SequenceSample) -> torch.Tensor:
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))


def _weight(batch: SequenceSample) -> torch.Tensor:
    return _mask(batch).count_nonzero()


register_interface("smoothed_labels", SmoothedLabels)
