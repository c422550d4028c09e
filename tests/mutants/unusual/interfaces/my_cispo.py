"""CISPO: clipped importance weights on log-probs, so that no token loses its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)


@dataclass(kw_only=True)
class MyCISPO(ModelInterface):
    """Trains a policy on `advantages` (arXiv:2506.13585); all trained tokens have one weight."""

    READS: ClassVar[Declaration] = {
        "train_step": ("packed_input_ids", "loss_mask", "old_logprobs", "advantages"),
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",)}
    CUT: ClassVar[Cut] = "sequence"
    LIMITS: ClassVar[Limits] = {
        "eps_low": {"gt": 0, "le": 1},
        "eps_high": {"gt": 0},
        "temperature": {"gt": 0},
    }
    METRICS: ClassVar[Metrics] = {
        "importance_ratio": ("ratio", "mean ratio of the policy to the old one"),
        "clip_fraction": ("share", "share of trained tokens whose weight is clipped"),
    }

    eps_low: float = 0.8
    """The weight of a token is at least 1 minus this."""

    eps_high: float = 0.28
    """The weight of a token is at most 1 plus this."""

    temperature: float = 1.0
    """Logits are divided by this; use the sampling temperature (`${generation.temperature}`)."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step; stats are means per trained token."""
        return model.module.train_batch(
            data, self._loss, _trained_tokens, mb_spec=mb_spec, cut=self.CUT
        )

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        mask = batch.data["loss_mask"]
        output.temperature = self.temperature
        output.actions = mask
        logprobs = output.logprobs[mask]
        log_ratio = logprobs - batch.data["old_logprobs"][mask]
        ratio = log_ratio.clamp(-20, 20).exp().detach()
        weight = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        loss = -(weight * batch.data["advantages"][mask] * logprobs).sum()
        clipped = (weight != ratio).sum().float()
        return loss, {"importance_ratio": ratio.sum(), "clip_fraction": clipped}


def _trained_tokens(batch: SequenceSample) -> torch.Tensor:
    return batch.data["loss_mask"].count_nonzero()


register_interface("my_cispo", MyCISPO)
