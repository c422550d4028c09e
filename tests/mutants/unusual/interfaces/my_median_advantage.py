"""How much more a response earned than the median of the responses to its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.declared_keys import Declaration
from rlcli.api.model import register_interface
from rlcli.ops.advantages import Trajectories
from rlcli.ops.packing import action_owner, summed
from rlcli.ops.reduce import AllReduce

from ._advantages import AdvantageInterface

SMALLEST = 1e-6
"""Responses whose rewards differ by less have earned the same."""


@dataclass(kw_only=True)
class MyMedianAdvantage(AdvantageInterface):
    """Subtracts the median of a prompt's responses (of an even number, the mean of the two in the
    middle), which a single outlier does not move. Responses that
    `train_on_best` leaves out are ignored."""

    NEEDS_GROUP: ClassVar[Declaration] = {"inference": (..., "2")}

    scale: bool = True
    """Divide by the mean distance of the prompt's responses from their median."""

    adv_norm: bool = False
    """Additionally normalise advantages to mean 0 and standard deviation 1 over all tokens."""

    def estimate(
        self, trajectories: Trajectories, all_reduce: AllReduce
    ) -> tuple[torch.Tensor, torch.Tensor]:
        t = trajectories
        owner, responses = action_owner(t.seqlens, t.mask.device), len(t.seqlens)
        earned = summed(torch.where(t.mask, t.rewards, 0.0), owner, responses)
        acted = torch.bincount(owner[t.mask], minlength=responses) > 0
        advantages = torch.zeros_like(earned)
        for prompt in t.group[acted].unique():
            members = (t.group == prompt) & acted
            advantages[members] = self._relative(earned[members])
        pair = torch.where(t.mask, torch.stack([advantages, earned])[:, owner], 0.0).float()
        return pair[0], pair[1]

    def _relative(self, outcomes: torch.Tensor) -> torch.Tensor:
        """The advantages of the responses to one prompt."""
        lead = outcomes - outcomes.quantile(0.5)
        spread = lead.abs().mean()
        if spread < SMALLEST:
            return torch.zeros_like(lead)
        return lead / spread if self.scale else lead


register_interface("my_median_advantage", MyMedianAdvantage)
