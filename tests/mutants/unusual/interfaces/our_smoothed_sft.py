"""Supervised fine-tuning with label smoothing: a small part of the target is spread evenly over the
vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

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
from rlcli.ops.packing import action_mask, drop_last


@dataclass(kw_only=True)
class SmoothedSFT(ModelInterface):
    """Trains on the tokens of answers, each with the same weight. For models with a small
    vocabulary, because it holds the logits of a micro-batch."""

    READS: ClassVar[Declaration] = {
        "train_step": ("packed_input_ids", "prompt_mask"),
        "evaluate": ("packed_input_ids", "prompt_mask"),
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "evaluate": ("lm",)}
    CUT: ClassVar[Cut] = "sequence"
    LIMITS: ClassVar[Limits] = {"label_smoothing": {"ge": 0, "lt": 1}}
    METRICS: ClassVar[Metrics] = {
        "nll": ("nats per token", "negative log-likelihood of the answers, without smoothing"),
        "ppl": ("perplexity", "perplexity of the answers that were evaluated"),
    }

    label_smoothing: float = 0.1
    """Share of the target that is spread over the vocabulary."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on a batch of prompts with answers."""
        return model.module.train_batch(
            data, self._loss, _answer_tokens, mb_spec=mb_spec, cut=self.CUT
        )

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """`loss`, `nll` and `ppl` per answer token of all batches."""
        totals, count = {"loss": 0.0, "nll": 0.0}, 0.0
        for batch in eval_dataloader:
            weight = float(model.all_reduce(_answer_tokens(batch).double()))
            stats = model.module.eval_batch(batch, self._loss, _answer_tokens, cut=self.CUT)
            for name in totals:
                totals[name] += weight * stats.get(name, 0.0)
            count += weight
        means = {name: total / max(count, 1.0) for name, total in totals.items()}
        return means | {"ppl": math.exp(min(means["nll"], 700.0))}

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        lengths, mask = batch.flat_seqlens("packed_input_ids"), _answer_mask(batch)
        output.actions = mask
        nll = -output.logprobs[mask].sum()
        logits = drop_last(output.logits, lengths)
        spread = -F.log_softmax(logits[mask], dim=-1).mean(-1).sum()
        loss = (1 - self.label_smoothing) * nll + self.label_smoothing * spread
        return loss, {"nll": nll.detach()}


def _answer_mask(batch: SequenceSample) -> torch.Tensor:
    return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))


def _answer_tokens(batch: SequenceSample) -> torch.Tensor:
    return _answer_mask(batch).count_nonzero()


register_interface("our_smoothed_sft", SmoothedSFT)
