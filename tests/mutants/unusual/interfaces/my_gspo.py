"""GSPO: one importance ratio for each response, the geometric mean of those of its tokens."""

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
from rlcli.ops.packing import action_owner


@dataclass(kw_only=True)
class MyGSPO(ModelInterface):
    """Trains a policy on `advantages` (arXiv:2507.18071). Every response counts equally; one
    without trained tokens does not count."""

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
        "clip_fraction": ("share", "share of responses whose gradient the clip cuts off"),
    }

    eps_low: float = 0.03
    """The ratio of a response is clipped at 1 minus this."""

    eps_high: float = 0.04
    """The ratio of a response is clipped at 1 plus this."""

    temperature: float = 1.0
    """Logits are divided by this; use the sampling temperature (`${generation.temperature}`)."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step; stats are means per response."""
        return model.module.train_batch(data, self._loss, _responses, mb_spec=mb_spec, cut=self.CUT)

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        mask, lengths = batch.data["loss_mask"], batch.flat_seqlens("packed_input_ids")
        output.temperature = self.temperature
        output.actions = mask
        log_ratio = output.logprobs[mask] - batch.data["old_logprobs"][mask]
        owner = action_owner(lengths, mask.device)[mask]
        tokens = torch.bincount(owner, minlength=len(lengths)).clamp(min=1)
        sums = torch.zeros(len(lengths), dtype=log_ratio.dtype).index_add(0, owner, log_ratio)
        ratio = (sums / tokens).clamp(-20, 20).exp()[owner]
        advantages, share = batch.data["advantages"][mask], 1 / tokens[owner]
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        loss = (torch.maximum(unclipped, clipped) * share).sum()
        return loss, {"clip_fraction": ((clipped > unclipped) * share).sum()}


def _responses(batch: SequenceSample) -> torch.Tensor:
    """The number of responses with a token that is trained on."""
    mask, lengths = batch.data["loss_mask"], batch.flat_seqlens("packed_input_ids")
    owner = action_owner(lengths, mask.device)[mask]
    return torch.bincount(owner, minlength=len(lengths)).count_nonzero()


register_interface("my_gspo", MyGSPO)
