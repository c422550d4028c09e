"""Dynamic sampling: drops prompts whose responses are all equally good before training,
and draws others instead.

From DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2): a group without variance has no
advantages, so it only makes the batch smaller and the gradient noisier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface, register_interface
from rlcli.api.key_meaning import DROPPED
from rlcli.api.limits import Limits

if TYPE_CHECKING:
    import torch

    from rlcli.api.model import Model

By = Literal["rewards", "solved"]


@dataclass(kw_only=True)
class GroupFilterInterface(ModelInterface):
    """Drops prompts whose responses all have the same reward.
    A prompt with a single response is kept.

    `train.max_redraws` limits the redraws per step; the metrics include `samples/dropped` and
    `samples/redrawn`.
    """

    READS: ClassVar[Declaration] = {"inference": ("rewards if by=rewards", "solved if by=solved")}
    WRITES: ClassVar[Declaration] = {"inference": ()}
    DROPS: ClassVar[Declaration] = {"inference": ("equal_rewards",)}
    LIMITS: ClassVar[Limits] = {"min_spread": {"ge": 0}}

    by: By = "rewards"
    """What to compare. "solved": drop prompts whose responses are all correct, or all wrong,
    whatever else goes into the reward."""

    min_spread: float = 0.0
    """Rewards of a prompt count as equal if the highest exceeds the lowest by no more than this
    and what the rounding of float32 may add."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`rewards` or `solved` [N] → for each sample, as metadata, whether it is dropped.
        No keys."""
        scores = (
            data.data[self.by].double().cpu().split([len(group) for group in data.seqlens[self.by]])
        )
        alike = [
            len(group) > 1 and float(group.max() - group.min()) <= self.min_spread + _ulps(group)
            for group in scores
        ]
        dropped = ["equal_rewards" if same else None for same in alike]
        return SequenceSample(ids=list(data.ids), seqlens={}, data={}, metadata={DROPPED: dropped})

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """The filter itself: it needs no model."""
        if interface_type != "inference":
            return super().mock(interface_type, model, data)
        return self.inference(model, data, MicroBatchSpec())


def _ulps(scores: torch.Tensor) -> float:
    """What rewards that are equal may differ by: a sum of several terms in float32."""
    import torch

    return 4 * torch.finfo(torch.float32).eps * float(scores.abs().max())


register_interface("group_filter", GroupFilterInterface)
