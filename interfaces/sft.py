"""Supervised fine-tuning: maximises the likelihood of answers, given their prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    EvalLoader,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    register_interface,
)
from rlcli.ops.losses import nll_loss

from ._evaluation import mean_loss
from ._sequences import answer_mask


@dataclass(kw_only=True)
class SFTInterface(ModelInterface):
    """Trains on the tokens outside the prompt (`prompt_mask`), each with the same weight."""

    READS: ClassVar[Declaration] = {
        "train_step": ("packed_input_ids", "prompt_mask"),
        "evaluate": ("packed_input_ids", "prompt_mask"),
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "evaluate": ("lm",)}
    CUT: ClassVar[Cut] = "sequence"
    METRICS: ClassVar[Metrics] = {
        "ppl": ("perplexity", "perplexity of the answers: the exponential of the loss per token"),
        "tokens": ("tokens", "tokens of the answers that were evaluated"),
    }

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on the mean negative log-likelihood per answer token."""
        data = data.select(["packed_input_ids", "prompt_mask"])
        stats = model.module.train_batch(data, _loss, _answer_tokens, mb_spec=mb_spec, cut=self.CUT)
        return stats | {"ppl": _perplexity(stats["loss"])}

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """`loss` per answer token over all batches and ranks, and its perplexity `ppl`."""
        batches = [batch.select(["packed_input_ids", "prompt_mask"]) for batch in eval_dataloader]
        stats, tokens = mean_loss(model, batches, _loss, _answer_tokens, cut=self.CUT)
        return stats | {"ppl": _perplexity(stats["loss"]), "tokens": tokens}


def _answer_tokens(batch: SequenceSample) -> torch.Tensor:
    return answer_mask(batch).count_nonzero()


def _loss(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
    output.actions = answer_mask(batch)
    return nll_loss(output.logprobs, output.actions)


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))


register_interface("sft", SFTInterface)
