"""Supervised fine-tuning that concentrates on the tokens of which the model is least sure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    EvalLoader,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.ops.packing import action_mask


@dataclass(kw_only=True)
class MyFocalSFT(ModelInterface):
    """Focal loss (arXiv:1708.02002) on the tokens after the prompt: each token's negative
    log-likelihood times (1 - p) ** gamma, summed, and divided by the number of answer tokens."""

    READS: ClassVar[Declaration] = {
        "train_step": ("packed_input_ids", "prompt_mask"),
        "evaluate": ("packed_input_ids", "prompt_mask"),
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "evaluate": ("lm",)}
    CUT: ClassVar[Cut] = "sequence"
    LIMITS: ClassVar[Limits] = {"gamma": {"ge": 0}}
    METRICS: ClassVar[Metrics] = {
        "nll": ("nats per token", "negative log-likelihood of the answers, without the weights"),
        "ppl": ("perplexity", "perplexity of the answers: the exponential of nll"),
    }

    gamma: float = 2.0
    """How much less a token counts the surer the model is of it; 0: all count the same."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step; stats are means per answer token."""
        return model.module.train_batch(
            data, self._loss, _answer_tokens, mb_spec=mb_spec, cut=self.CUT
        )

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """`loss` and `nll` per answer token over all batches and ranks, and `ppl`."""
        sums, tokens = {"loss": 0.0, "nll": 0.0}, 0.0
        for batch in eval_dataloader:
            count = float(model.all_reduce(_answer_tokens(batch).double()))
            stats = model.module.eval_batch(batch, self._loss, _answer_tokens, cut=self.CUT)
            sums = {name: value + stats.get(name, 0.0) * count for name, value in sums.items()}
            tokens += count
        means = {name: value / max(tokens, 1.0) for name, value in sums.items()}
        return means | {"ppl": math.exp(min(means["nll"], 700.0))}

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        mask = _answers(batch)
        output.actions = mask
        logprobs = output.logprobs[mask]
        weight = (-torch.expm1(logprobs)).clamp(min=1e-6) ** self.gamma
        return -(weight * logprobs).sum(), {"nll": -logprobs.detach().sum()}


def _answers(batch: SequenceSample) -> torch.Tensor:
    """[T - N] bool: the predictions of answer tokens."""
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))


def _answer_tokens(batch: SequenceSample) -> torch.Tensor:
    return _answers(batch).count_nonzero()


register_interface("my_focal_sft", MyFocalSFT)
