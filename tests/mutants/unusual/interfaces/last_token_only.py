"""Trains on the last token of each sequence alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface


@dataclass(kw_only=True)
class LastTokenOnly(ModelInterface):
    """Trains on the last token of each sequence alone."""

    READS: ClassVar[Declaration] = {"train_step": ("packed_input_ids",)}
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
        ends = (_actions(batch).cumsum(0) - 1)[_actions(batch) > 0]
        return -output.logprobs[ends.to(output.logprobs.device)].sum()


def _actions(batch: SequenceSample) -> torch.Tensor:
    return torch.tensor(batch.flat_seqlens("packed_input_ids"), dtype=torch.int64) - 1


def _weight(batch: SequenceSample) -> torch.Tensor:
    return (_actions(batch) > 0).sum()


register_interface("last_token_only", LastTokenOnly)
