"""Trains on every token, also on those of prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface


@dataclass(kw_only=True)
class EveryToken(ModelInterface):
    """Trains on every token, also on those of prompts."""

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
        return -output.logprobs.sum()


def _weight(batch: SequenceSample) -> torch.Tensor:
    lengths = batch.flat_seqlens("packed_input_ids")
    return torch.tensor(sum(lengths) - len(lengths))


register_interface("every_token", EveryToken)
