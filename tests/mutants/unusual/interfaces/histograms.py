"""A row of several numbers for each sequence: how often it has tokens of each quarter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface, register_interface
from rlcli.api.model import Model

BINS = 4


@dataclass(kw_only=True)
class Histograms(ModelInterface):
    """Counts the remainders of token ids, in a key with two dimensions."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids",)}
    WRITES: ClassVar[Declaration] = {"inference": ("histograms",)}

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` → `histograms` [N, 4] float32."""
        parts = data.data["packed_input_ids"].cpu().split(data.flat_seqlens("packed_input_ids"))
        counts = [torch.bincount(ids % BINS, minlength=BINS) for ids in parts]
        ones = [[1] * len(lengths) for lengths in data.seqlens["packed_input_ids"]]
        rows = torch.stack(counts).float() if counts else torch.zeros(0, BINS)
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"histograms": ones}, data={"histograms": rows}
        )


register_interface("histograms", Histograms)
