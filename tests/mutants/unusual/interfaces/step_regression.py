"""A model with a value head that learns the reward of a sequence as a number, at its last token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface


@dataclass(kw_only=True)
class StepRegression(ModelInterface):
    """Squared error of the value at the last token from the reward."""

    READS: ClassVar[Declaration] = {"train_step": ("packed_input_ids", "rewards")}
    HEAD: ClassVar[Declaration] = {"train_step": ("value",)}

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on the mean over the sequences."""
        stats: dict[str, float] = model.module.train_batch(data, _loss, _weight, mb_spec=mb_spec)
        return stats


def _loss(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
    ends = torch.tensor(batch.flat_seqlens("packed_input_ids")).cumsum(0) - 1
    return (output.values[ends.to(output.values.device)] - batch.data["rewards"]).square().sum()


def _weight(batch: SequenceSample) -> torch.Tensor:
    return torch.tensor(len(batch.flat_seqlens("packed_input_ids")))


register_interface("step_regression", StepRegression)
