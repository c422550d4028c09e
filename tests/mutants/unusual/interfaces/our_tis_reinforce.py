"""REINFORCE with truncated importance weights, and a penalty for the KL from a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.micro_batches import Cut
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface
from rlcli.ops.kl import kl_loss
from rlcli.ops.packing import action_owner


@dataclass(kw_only=True)
class TruncatedReinforce(ModelInterface):
    """The gradient of each token's log-prob, weighted by its advantage and by how much likelier the
    token is now than when it was sampled, up to a cap. Every response has the same weight."""

    READS: ClassVar[Declaration] = {
        "train_step": (
            "packed_input_ids",
            "loss_mask",
            "advantages",
            "old_logprobs",
            "packed_ref_logprobs if kl_coef",
        )
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",)}
    CUT: ClassVar[Cut] = "sequence"
    LIMITS: ClassVar[Limits] = {
        "weight_cap": {"gt": 0},
        "kl_coef": {"ge": 0},
        "temperature": {"gt": 0},
    }

    weight_cap: float = 2.0
    """Largest importance weight of a token."""

    kl_coef: float = 0.02
    """Weight of the KL from the reference, per token; 0: no reference is needed."""

    temperature: float = 1.0
    """Divides the logits; that with which the responses were sampled."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on a batch of responses."""
        return model.module.train_batch(
            data, self._loss, _count_responses, mb_spec=mb_spec, cut=self.CUT
        )

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
        tensors, mask = batch.data, batch.data["loss_mask"]
        output.temperature = self.temperature
        output.actions = mask
        logprobs, old = output.logprobs[mask], tensors["old_logprobs"][mask]
        ratio = (logprobs - old).clamp(max=20.0).exp()
        weights = ratio.clamp(max=self.weight_cap).detach()
        losses = -weights * tensors["advantages"][mask] * logprobs
        if self.kl_coef:
            reference = tensors["packed_ref_logprobs"][mask]
            losses = losses + self.kl_coef * kl_loss(logprobs, old, reference, "k3")
        owner, lengths = _trained(batch)
        return (losses / lengths[owner[mask]]).sum()


def _trained(batch: SequenceSample) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each action, and how many actions of each sequence are trained on."""
    mask, seqlens = batch.data["loss_mask"], batch.flat_seqlens("packed_input_ids")
    owner = action_owner(seqlens, mask.device)
    return owner, torch.bincount(owner[mask], minlength=len(seqlens))


def _count_responses(batch: SequenceSample) -> torch.Tensor:
    return _trained(batch)[1].count_nonzero()


register_interface("our_tis_reinforce", TruncatedReinforce)
