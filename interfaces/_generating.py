"""Shared by every interface that samples responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface

from ._responses import imitate_responses, sample_responses
from ._settings import Generation


@dataclass(kw_only=True)
class Generating(Generation, ModelInterface):
    """Samples responses as configured in `generation`."""

    READS: ClassVar[Declaration] = {"generate": ("packed_prompts",)}
    WRITES: ClassVar[Declaration] = {
        "generate": ("packed_input_ids", "prompt_mask", "packed_logprobs", "seq_no_eos_mask")
    }

    def generate(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`packed_prompts` → `packed_input_ids`, `prompt_mask`, `packed_logprobs`, `seq_no_eos_mask`."""
        return sample_responses(model, data, self.sampling)

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Responses made of words from their prompts."""
        if interface_type != "generate":
            return super().mock(interface_type, model, data)
        return imitate_responses(model, data, self.sampling)
