"""Entropies of the model's choices, under a key of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface


@dataclass(kw_only=True)
class TokenEntropies(ModelInterface):
    """Writes the entropy of the distribution that each token but the first was drawn from."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids",)}
    WRITES: ClassVar[Declaration] = {"inference": ("entropies",)}
    HEAD: ClassVar[Declaration] = {"inference": ("lm",)}

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` → `entropies` [T - N]."""
        rows = [[n - 1 for n in lengths] for lengths in data.seqlens["packed_input_ids"]]
        entropies = model.module.forward(
            data.select(["packed_input_ids"]),
            mb_spec,
            post_hook=lambda output, _: output.entropy,
            output_seqlens=rows,
        )
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"entropies": rows}, data={"entropies": entropies.float()}
        )


register_interface("token_entropies", TokenEntropies)
