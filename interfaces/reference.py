"""The frozen reference policy of a KL penalty or a preference loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import ArgumentCheck
from rlcli.api.micro_batches import Cut, one_per_sequence
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface
from rlcli.errors import DataError

from ._argument_checks import check_reference
from ._logprob_store import LogprobStore
from ._logprobs import as_logprobs, recompute_logprobs


@dataclass(kw_only=True)
class ReferenceInterface(ModelInterface):
    """Computes the log-probs of responses under a reference policy."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask if given")}
    WRITES: ClassVar[Declaration] = {"inference": ("packed_ref_logprobs",)}

    HEAD: ClassVar[Declaration] = {"inference": ("lm unless store",)}
    CUT: ClassVar[Cut] = "sequence"
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_argument_checks.check_reference"
    NO_EFFECT_ON_NUMBERS: ClassVar[tuple[str, ...]] = ("store",)

    temperature: float = 1.0
    """Logits are divided by this first; use the actor's sampling temperature
    (`${generation.temperature}`)."""

    store: str | None = None
    """Folder that caches log-probs, for this reference and temperature only: sequences found in it
    are not computed again, in later epochs and runs. If it holds all sequences the role needs no
    weights (`models.ref: {init: null, backend: null}`). Only useful for dataset rows, such as
    DPO's, because sampled sequences do not recur."""

    opened: LogprobStore | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        check_reference(self)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` → `packed_ref_logprobs`."""
        if self.store is None:
            return recompute_logprobs(model, data, mb_spec, "packed_ref_logprobs", self.temperature)
        self.opened = self.opened or LogprobStore(self.store)
        tokens = data.data["packed_input_ids"]
        sequences = tokens.split(data.flat_seqlens("packed_input_ids"))
        rows = self._complete(self.opened, sequences, model, data, mb_spec)
        logprobs = [row.to(tokens.device) for row in rows]
        return as_logprobs(
            data,
            "packed_ref_logprobs",
            torch.cat([torch.zeros(0, device=tokens.device), *logprobs]),
        )

    def _complete(
        self,
        store: LogprobStore,
        sequences: Sequence[torch.Tensor],
        model: Model,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
    ) -> list[torch.Tensor]:
        """[length - 1] log-probs of each sequence: those that are stored, and others, which are
        computed and stored."""
        rows = store.read(sequences)
        missing = [index for index, row in enumerate(rows) if row is None]
        if model.module is None and missing:
            message = f"{self.store} has no log-probs of {len(missing)} of {len(rows)} sequences"
            raise DataError(
                message,
                hint="give the reference weights again: log-probs are then computed and stored",
            )
        if model.module is not None:  # even if nothing is missing here: other ranks may wait
            without_logprobs = one_per_sequence(data.select(["packed_input_ids"])).select_indices(
                missing
            )
            computed = recompute_logprobs(
                model, without_logprobs, mb_spec, "packed_ref_logprobs", self.temperature
            )
            scores = computed.data["packed_ref_logprobs"].split(
                computed.flat_seqlens("packed_ref_logprobs")
            )
            store.write([sequences[index] for index in missing], scores, model.all_reduce)
            for index, row in zip(missing, scores, strict=True):
                rows[index] = row
        return [row for row in rows if row is not None]


register_interface("reference", ReferenceInterface)
