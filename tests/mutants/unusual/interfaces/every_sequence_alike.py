"""Every answer counts the same, as the mean of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface
from rlcli.ops.packing import action_mask


@dataclass(kw_only=True)
class EverySequenceAlike(ModelInterface):
    """Every answer counts the same, as the mean of its tokens."""

    READS: ClassVar[Declaration] = {"train_step": ("packed_input_ids", "prompt_mask")}
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",)}

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step."""
        stats: dict[str, float] = model.module.train_batch(
            data, self._loss, _weight, mb_spec=mb_spec
        )
        return stats

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
        shares = _shares(batch)
        return -(output.logprobs * shares)[shares > 0].sum()


def _mask(batch: SequenceSample) -> torch.Tensor:
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))


def _shares(batch: SequenceSample) -> torch.Tensor:
    """[A] one divided by the tokens of the answer; 0 outside of answers."""
    lengths = [length - 1 for length in batch.flat_seqlens("packed_input_ids")]
    parts = [part / part.sum().clamp(min=1) for part in _mask(batch).float().split(lengths)]
    return torch.cat(parts) if parts else torch.zeros(0)


def _weight(batch: SequenceSample) -> torch.Tensor:
    return _shares(batch).sum()


register_interface("every_sequence_alike", EverySequenceAlike)
