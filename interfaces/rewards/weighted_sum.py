"""Combines several rewards: each earlier call writes its own under another name,
and this one adds them up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface, register_interface
from rlcli.api.synonyms import Synonyms
from rlcli.errors import UsageError

if TYPE_CHECKING:
    import torch

    from rlcli.api.model import Model


@dataclass(kw_only=True)
class WeightedSumInterface(ModelInterface):
    """Adds up rewards that other calls write under names of their own, such as `output_key_remap:
    {rewards: brevity}`; each is also reported under its name.
    """

    READS: ClassVar[Declaration] = {"inference": ("each of weights",)}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    NEEDS_GROUP: ClassVar[Declaration] = {"inference": ("2 if group_norm",)}
    SYNONYMS: ClassVar[Synonyms] = {
        "weights": "reward_weights",
        "group_norm": "multi_objective_aggregation",
    }

    weights: dict[str, float]
    """Key of the batch → weight of its values, one number per response."""

    group_norm: bool = False
    """First normalise each reward to mean 0 and standard deviation 1 over the responses to one
    prompt, so that none is drowned by another with a larger spread (GDPO, arXiv:2601.05242: with
    `baseline: batch` and `scale: batch` of `group_relative`)."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError(
                "weights is empty; it must name at least one key, such as "
                "{correct: 1.0, brevity: 0.1}"
            )
        if wrong := [
            f"{key}: {weight}" for key, weight in self.weights.items() if not math.isfinite(weight)
        ]:
            raise ValueError(f"weights has {wrong[0]}; a weight must be finite")

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """The keys of `weights` [N] → `rewards` [N]."""
        import torch

        lengths = self._lengths(data)
        parts = {key: self._part(data, key) for key in self.weights}
        total = sum(parts[key] * weight for key, weight in self.weights.items())
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens={"rewards": lengths},
            data={"rewards": torch.as_tensor(total).float()},
        )

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """The sum itself: it needs no model."""
        if interface_type != "inference":
            return super().mock(interface_type, model, data)
        return self.inference(model, data, MicroBatchSpec())

    def _part(self, data: SequenceSample, key: str) -> torch.Tensor:
        """[N] float64: one reward as it is added."""
        numbers: torch.Tensor = data.data[key].double()
        if not self.group_norm:
            return numbers
        import torch

        from rlcli.ops.advantages import standardized

        sizes = torch.tensor([len(lengths) for lengths in data.seqlens[key]])
        group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        return standardized(numbers, group.to(numbers.device))

    def _lengths(self, data: SequenceSample) -> list[list[int]]:
        """One number per response. Raises UsageError where a key holds anything else."""
        first, *_ = self.weights
        lengths = data.seqlens[first]
        for key in self.weights:
            if data.seqlens[key] != lengths:
                raise UsageError(
                    f"weighted_sum: {first} and {key} do not belong to the same responses",
                    code="R71",
                )
        if any(length != 1 for group in lengths for length in group) or data.data[first].dim() != 1:
            hint = "the calls before it must write one number for each response"
            raise UsageError(
                f"weighted_sum: {first} holds more than one number for a response",
                hint=hint,
                code="R71",
            )
        return lengths


register_interface("weighted_sum", WeightedSumInterface)
