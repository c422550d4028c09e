"""Batch inference and evaluation: a role answers prompts; nothing is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import ArgumentCheck
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface

from ._responses import as_generation, imitate_responses, sample_responses


@dataclass(kw_only=True)
class GenerationInterface(ModelInterface):
    """Samples responses. A run whose graph trains nothing writes them to samples.jsonl,
    one per line."""

    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = None
    READS: ClassVar[Declaration] = {"generate": ("packed_prompts",)}
    WRITES: ClassVar[Declaration] = {
        "generate": (
            "packed_input_ids",
            "prompt_mask",
            "packed_logprobs",
            "seq_no_eos_mask",
            "routed_experts if generation.routing_replay",
        )
    }

    generation: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """How responses are sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.generation = as_generation(self.generation)

    def generate(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_prompts` → `packed_input_ids`, `prompt_mask`, `packed_logprobs`,
        `seq_no_eos_mask`."""
        return sample_responses(model, data, self.generation)

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Responses made of words from their prompts."""
        if interface_type != "generate":
            return super().mock(interface_type, model, data)
        return imitate_responses(model, data, self.generation)


register_interface("generation", GenerationInterface)
