"""The frozen policy that PPO's KL penalty is measured from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.micro_batches import Cut
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface
from rlcli.interfaces._logprobs import recompute_logprobs


@dataclass(kw_only=True)
class ReferenceInterface(ModelInterface):
    """Gives the log-probs of responses under a reference policy."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask if given")}
    WRITES: ClassVar[Declaration] = {"inference": ("packed_ref_logprobs",)}

    CUT: ClassVar[Cut] = "sequence"

    temperature: float = 1.0
    """Logits are divided by this first; the actor's sampling temperature (`${generation.temperature}`)."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0")

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`packed_input_ids` → `packed_ref_logprobs`."""
        return recompute_logprobs(model, data, mb_spec, "packed_ref_logprobs", self.temperature)


register_interface("reference", ReferenceInterface)
