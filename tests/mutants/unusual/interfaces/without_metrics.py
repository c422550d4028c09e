"""Likelihood of the answers, without a number of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface
from rlcli.ops.packing import action_mask


@dataclass(kw_only=True)
class WithoutMetrics(ModelInterface):
    """Likelihood of the answers, without a number of its own."""

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
        output.actions = _mask(batch)
        return -output.logprobs[output.actions].sum()


def _mask(batch: SequenceSample) -> torch.Tensor:
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))


def _weight(batch: SequenceSample) -> torch.Tensor:
    return _mask(batch).count_nonzero()


register_interface("without_metrics", WithoutMetrics)
