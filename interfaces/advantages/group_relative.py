"""Advantages without a critic: what a response earned, compared with others.
GRPO and its family."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.key_meaning import PLACE
from rlcli.api.limits import ArgumentCheck, Limits, Needs
from rlcli.api.metrics import Metrics
from rlcli.api.model import MicroBatchSpec, Model, register_interface
from rlcli.api.synonyms import Synonyms
from rlcli.ops.advantages import BaselineName, CreditName, ScaleName, Trajectories, relative
from rlcli.ops.kl import KLEstimator
from rlcli.ops.reduce import AllReduce

from .._advantage_steps import Responses
from .._advantages import AdvantageInterface, KLPlace, SumsBySample
from .._argument_checks import check_group_relative, compares_groups
from .._sequences import group_sizes

log = logging.getLogger(__name__)

WARN_EVERY = 10
"""Steps without a learning signal between two warnings."""


@dataclass(kw_only=True)
class GroupRelativeInterface(AdvantageInterface):
    """Compares each response with the other responses to its prompt, or in its batch.

    The defaults are GRPO as published (arXiv:2402.03300). The profiles dr_grpo, rloo, dapo and
    maxrl set others.
    """

    ELSEWHERE: ClassVar[str] = "grpo rloo reinforce reinforce_plus_plus maxrl gdpo"
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = "_argument_checks.check_group_relative"
    NEEDS_GROUP: ClassVar[Declaration] = {
        "inference": (
            ...,
            "2 if baseline=group",
            "2 if baseline=leave_one_out",
            "2 if scale=group",
            "2 if scale=mean",
        )
    }
    LIMITS: ClassVar[Limits] = {"turn_discount": {"ge": 0, "le": 1}}
    NEEDS: ClassVar[Needs] = {"turn_discount": "credit=to_go"}
    SYNONYMS: ClassVar[Synonyms] = {
        "baseline": "mean_level mean_leave1out",
        "scale": "scale_rewards norm_adv_by_std_in_grpo std_level",
    }
    METRICS: ClassVar[Metrics] = {
        "equal_rewards_fraction": (
            "share",
            "share of prompts whose responses all have the same reward",
        ),
    }

    baseline: BaselineName = "group"
    """What is subtracted: the mean of the responses to the same prompt (group), of the other
    responses to it (leave_one_out), of all responses in the batch (batch), or nothing (none)."""

    scale: ScaleName = "group"
    """What it is divided by: the standard deviation of the rewards of the responses to the same
    prompt (group), of all responses in the batch (batch), the mean of the rewards of the responses
    to the same prompt (mean: MaxRL, for rewards that are not negative), or nothing (none)."""

    credit: CreditName = "response"
    """response: each token is credited with all rewards of its response. to_go: only with those
    that come after it, which makes a difference where the KL penalty is in the reward, or rewards
    are dense. The credits of a turn are then compared with those of the same turn of the other
    responses; one that no other response to the prompt has, with nothing."""

    turn_discount: float | None = None
    """With `credit: to_go`: the discount factor of rewards from a turn of an episode to the one
    before it; null: 1."""

    kl_ctl: float = 0.04
    """Weight of the KL penalty per token (its starting value with `adaptive_kl_ctl`); 0: no
    penalty, and no reference is needed."""

    kl_in: KLPlace = "loss"
    """loss: the penalty is added to the policy's loss of each token, with a gradient of its own.
    reward: it is subtracted from the reward of each token, and so enters the advantages."""

    kl_estimator: KLEstimator = "k3"
    """Estimator of the penalty in the reward, the KL from the reference per sampled token: k1, k2
    or k3 (rlcli.ops.kl); of one in the loss it is `kl_estimator` of `ppo_actor`."""

    adv_norm: bool = False
    """Additionally normalise advantages to mean 0 and standard deviation 1 over the batch's tokens
    (REINFORCE++)."""

    steps_without_signal: int = field(init=False, default=0, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_group_relative(self)

    @property
    def compares_groups(self) -> bool:
        """Whether a single response to a prompt would carry no signal."""
        return compares_groups(self)

    def estimate(
        self, trajectories: Trajectories, all_reduce: AllReduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return relative(
            trajectories,
            all_reduce,
            baseline=self.baseline,
            scale=self.scale,
            credit=self.credit,
            turn_discount=1.0 if self.turn_discount is None else self.turn_discount,
        )

    def numbers(
        self,
        responses: Responses,
        rewards: torch.Tensor,
        advantages: torch.Tensor,
        trained: torch.Tensor,
    ) -> SumsBySample:
        groups = zip(
            *(column.split(group_sizes(responses.data)) for column in (rewards, responses.chosen)),
            strict=True,
        )
        compared = [group[chosen] for group, chosen in groups]
        equal = [(float(bool((group == group[:1]).all())), 1) for group in compared]
        return super().numbers(responses, rewards, advantages, trained) | {
            "equal_rewards_fraction": equal
        }

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        output = super().inference(model, data, mb_spec)
        counts = (
            torch.tensor(output.metadata["equal_rewards_fraction"], dtype=torch.float64)
            .view(-1, 2)
            .sum(0)
        )
        equal, prompts = model.all_reduce(counts).tolist()
        self._warn_without_signal(self.compares_groups and equal == prompts, data)
        return output

    def _warn_without_signal(self, has_no_signal: bool, data: SequenceSample) -> None:
        """Warn in the first of consecutive steps in which no group has a better response,
        and in every tenth."""
        self.steps_without_signal = self.steps_without_signal + 1 if has_no_signal else 0
        if self.steps_without_signal % WARN_EVERY == 1 and 0 in data.metadata.get(PLACE, [0]):
            log.warning(
                (
                    "all responses to each prompt have the same reward, so this step learns "
                    "nothing from them (%d in a row); look at them with rlcli samples, and start "
                    "from a model that solves some, or ask easier questions"
                ),
                self.steps_without_signal,
            )


register_interface("group_relative", GroupRelativeInterface)
