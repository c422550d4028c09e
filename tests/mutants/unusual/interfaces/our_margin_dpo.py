"""DPO in which a clearer preference demands a larger lead (ODPO, arXiv:2402.10571)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.api.model import (
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.ops.packing import action_mask
from rlcli.ops.preference_losses import chosen_and_rejected, sequence_sums


@dataclass(kw_only=True)
class MarginDPO(ModelInterface):
    """Raises the likelihood of chosen answers over that of rejected ones, relative to a reference,
    until their rewards differ by the pair's margin."""

    READS: ClassVar[Declaration] = {
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "packed_ref_logprobs",
            "margins if margin_scale",
        )
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",)}
    NEEDS_GROUP: ClassVar[Declaration] = {"train_step": ("2",)}
    LIMITS: ClassVar[Limits] = {"beta": {"gt": 0}, "margin_scale": {"ge": 0}}
    METRICS: ClassVar[Metrics] = {
        "reward_lead": ("reward", "mean of the chosen answer's reward less the rejected one's"),
        "accuracy": ("share", "share of pairs whose chosen answer has the higher reward"),
    }

    beta: float = 0.1
    """Rewards are this times the log-ratio of policy and reference."""

    margin_scale: float = 1.0
    """Reward by which the chosen answer should lead, per unit of the pair's margin; 0: DPO."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on the pairs of a batch."""
        return model.module.train_batch(data, self._loss, _count_pairs, mb_spec=mb_spec)

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        lengths = batch.flat_seqlens("packed_input_ids")
        mask = action_mask(batch.data["prompt_mask"], lengths)
        output.actions = mask
        log_ratios = output.logprobs - batch.data["packed_ref_logprobs"]
        scores = sequence_sums(log_ratios, mask, lengths)
        chosen, rejected = chosen_and_rejected(scores)
        lead = self.beta * (chosen - rejected)
        losses = -F.logsigmoid(lead - self._margins(batch, lead))
        ahead = (lead > 0).sum()
        return losses.sum(), {"reward_lead": lead.detach().sum(), "accuracy": ahead}

    def _margins(self, batch: SequenceSample, lead: torch.Tensor) -> torch.Tensor:
        """[P] the lead that each pair demands."""
        if not self.margin_scale:
            return torch.zeros_like(lead)
        of_chosen, of_rejected = chosen_and_rejected(batch.data["margins"])
        return self.margin_scale * (of_chosen - of_rejected).to(lead)


def _count_pairs(batch: SequenceSample) -> float:
    return len(batch.flat_seqlens("packed_input_ids")) / 2


register_interface("our_margin_dpo", MarginDPO)
