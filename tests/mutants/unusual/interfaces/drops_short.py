"""Drops prompts whose responses are all short; writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface, register_interface
from rlcli.api.limits import Limits
from rlcli.api.model import Model


@dataclass(kw_only=True)
class DropsShort(ModelInterface):
    """A sample without a sequence of enough tokens is not trained on."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids",)}
    WRITES: ClassVar[Declaration] = {"inference": ()}
    DROPS: ClassVar[Declaration] = {"inference": ("too_short",)}
    LIMITS: ClassVar[Limits] = {"least": {"ge": 1}}

    least: int = 4
    """Tokens that one sequence of a sample must have."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """Whether each sample is dropped, as metadata."""
        longest = [max(lengths) for lengths in data.seqlens["packed_input_ids"]]
        dropped = ["too_short" if length < self.least else None for length in longest]
        return SequenceSample(
            ids=list(data.ids), seqlens={}, data={}, metadata={"dropped": dropped}
        )


register_interface("drops_short", DropsShort)
