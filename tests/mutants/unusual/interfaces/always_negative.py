"""A reward that is negative for every response: long ones cost more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface, register_interface
from rlcli.api.model import Model


@dataclass(kw_only=True)
class AlwaysNegative(ModelInterface):
    """A reward that is negative for every response: long ones cost more."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """One reward per sequence."""
        lengths = data.flat_seqlens("packed_input_ids")
        masks = data.data["prompt_mask"].split(lengths)
        sizes = torch.tensor([float((~mask).sum()) for mask in masks])
        rewards = -1.0 - 0.01 * sizes
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens=data.seqlens["packed_input_ids"],
            data={"rewards": rewards.to(torch.float32)},
        )


register_interface("always_negative", AlwaysNegative)
