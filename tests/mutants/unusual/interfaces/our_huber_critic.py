"""A critic with Huber's loss: outliers among the returns pull it no harder than a constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.ops.packing import drop_last


@dataclass(kw_only=True)
class HuberCritic(ModelInterface):
    """Predicts the return of each state; predictions are clipped around those before the step."""

    READS: ClassVar[Declaration] = {
        "inference": ("packed_input_ids",),
        "train_step": ("packed_input_ids", "values", "returns", "loss_mask"),
    }
    WRITES: ClassVar[Declaration] = {"inference": ("values",)}
    HEAD: ClassVar[Declaration] = {"inference": ("value",), "train_step": ("value",)}
    CUT: ClassVar[Cut] = "sequence"
    LIMITS: ClassVar[Limits] = {"delta": {"gt": 0}, "value_clip": {"gt": 0}}
    METRICS: ClassVar[Metrics] = {
        "value_error": ("reward", "mean distance of values from returns, over the trained tokens"),
    }

    delta: float = 1.0
    """Distance from the return above which the loss grows linearly."""

    value_clip: float = 0.2
    """How far a value may move from its earlier one before its gradient is cut off."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` → `values` [T]."""
        tokens = data.select(["packed_input_ids"])
        values = model.module.forward(
            tokens, mb_spec, post_hook=lambda output, _: output.values, cut=self.CUT
        )
        seqlens = {"values": data.seqlens["packed_input_ids"]}
        return SequenceSample.from_default(
            ids=data.ids, seqlens=seqlens, data={"values": values.float()}
        )

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step towards the returns of a batch."""
        return model.module.train_batch(
            data, self._loss, _trained_tokens, mb_spec=mb_spec, cut=self.CUT
        )

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        lengths, mask = batch.flat_seqlens("packed_input_ids"), batch.data["loss_mask"]
        values = drop_last(output.values, lengths)[mask]
        earlier = drop_last(batch.data["values"], lengths)[mask]
        returns = batch.data["returns"][mask].to(values)
        change = (values - earlier).clamp(-self.value_clip, self.value_clip)
        losses = torch.maximum(self._error(values, returns), self._error(earlier + change, returns))
        error = (values - returns).detach().abs().sum()
        return losses.sum(), {"value_error": (error, mask.count_nonzero())}

    def _error(self, values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(values, returns, reduction="none", delta=self.delta)


def _trained_tokens(batch: SequenceSample) -> torch.Tensor:
    return batch.data["loss_mask"].count_nonzero()


register_interface("our_huber_critic", HuberCritic)
