"""ORPO: learns chosen answers and their odds over rejected ones at once, without a reference."""

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
    EvalLoader,
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.ops.preference_losses import chosen_and_rejected, sequence_sums

from ._evaluation import mean_loss
from ._sequences import answer_mask, answer_tokens


@dataclass(kw_only=True)
class MyORPO(ModelInterface):
    """Trains on pairs (arXiv:2403.07691): per pair, the mean negative log-likelihood of the chosen
    answer's tokens, and the log-odds of the chosen over the rejected answer."""

    READS: ClassVar[Declaration] = {
        "train_step": ("packed_input_ids", "prompt_mask"),
        "evaluate": ("packed_input_ids", "prompt_mask"),
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "evaluate": ("lm",)}
    NEEDS_GROUP: ClassVar[Declaration] = {"train_step": ("2",)}
    LIMITS: ClassVar[Limits] = {"odds_weight": {"ge": 0}}
    METRICS: ClassVar[Metrics] = {
        "nll": ("nats per token", "negative log-likelihood of chosen answers, mean over the pairs"),
        "log_odds": ("nats", "mean log-odds of the chosen answer over the rejected one"),
        "accuracy": ("share", "share of pairs whose chosen answer is likelier; ties count half"),
    }

    odds_weight: float = 0.1
    """Weight of the odds of a pair relative to the likelihood of its chosen answer."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on the pairs of a batch; stats are means per pair."""
        return model.module.train_batch(data, self._loss, _pairs, mb_spec=mb_spec)

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """`loss` and training's stats over all pairs of all batches and ranks."""
        return mean_loss(model, eval_dataloader, self._loss, _pairs)[0]

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        mask, lengths = answer_mask(batch), batch.flat_seqlens("packed_input_ids")
        output.actions = mask
        sums = sequence_sums(output.logprobs, mask, lengths)
        chosen, rejected = chosen_and_rejected(sums / answer_tokens(batch).clamp(min=1))
        nll = -chosen
        lead = _log_odds(chosen) - _log_odds(rejected)
        losses = nll - self.odds_weight * F.logsigmoid(lead)
        counted = _counted(batch)
        rows = {"nll": nll, "log_odds": lead, "accuracy": (lead.sign() + 1) / 2}
        stats = {name: (row.detach() * counted).sum() for name, row in rows.items()}
        return (losses * counted).sum(), stats


def _log_odds(logprobs: torch.Tensor) -> torch.Tensor:
    """log(p / (1 - p))."""
    logprobs = logprobs.clamp(max=-1e-6)
    return logprobs - torch.log(-torch.expm1(logprobs))


def _counted(batch: SequenceSample) -> torch.Tensor:
    """[P] 1 for each pair of answers with tokens, 0 for others."""
    chosen, rejected = chosen_and_rejected(answer_tokens(batch))
    return ((chosen > 0) & (rejected > 0)).float()


def _pairs(batch: SequenceSample) -> torch.Tensor:
    return _counted(batch).sum()


register_interface("my_orpo", MyORPO)
