"""Kahneman-Tversky optimisation: trains a policy on answers that are each judged alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.key_meaning import DESIRABLE, PROMPT_MASK, SEQUENCES
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
from rlcli.api.synonyms import Synonyms
from rlcli.ops.preference_losses import prospect_loss, sequence_sums

from ._evaluation import mean_loss, total
from ._sequences import answer_mask, answer_tokens

LossName = Literal["kto", "apo_zero_unpaired"]

MISMATCHED = {
    "mismatched_input_ids": SEQUENCES,
    "mismatched_prompt_mask": PROMPT_MASK,
    "mismatched_ref_logprobs": "packed_ref_logprobs",
}
"""Key of prompts with answers to other prompts → what a model reads it as."""


@dataclass(frozen=True)
class _Totals:
    """Numbers of all answers of a call, in all its batches and on all ranks."""

    kl: float
    """The reference point: the policy's KL from the reference, in nats, or 0."""
    answers: float
    """How many answers count."""
    desirable: float
    """How many of them are desirable."""

    @property
    def others(self) -> float:
        """How many of them are not."""
        return self.answers - self.desirable

    def means(
        self, numbers: torch.Tensor, desirable: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `numbers` [N], for the desirable answers and for the others, what adds up to their
        mean when sums over all micro-batches are divided by the number of answers."""
        return (
            (numbers * desirable).sum() * (self.answers / max(self.desirable, 1)),
            (numbers * ~desirable).sum() * (self.answers / max(self.others, 1)),
        )


@dataclass(kw_only=True)
class KTOInterface(ModelInterface):
    """Raises the likelihood of desirable answers and lowers that of others, relative to a reference
    policy. Its reference point, the policy's KL from the reference, is estimated from prompts with
    answers to other prompts (`mismatched_*`): the mean over a step's, whatever its micro-batches
    and ranks, without a gradient."""

    ELSEWHERE: ClassVar[str] = "kto_pair unpaired bco"
    READS: ClassVar[Declaration] = {
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "packed_ref_logprobs",
            "desirable",
            "mismatched_input_ids if loss=kto",
            "mismatched_prompt_mask if loss=kto",
            "mismatched_ref_logprobs if loss=kto",
        ),
        "evaluate": (
            "packed_input_ids",
            "prompt_mask",
            "packed_ref_logprobs",
            "desirable",
            "mismatched_input_ids if loss=kto",
            "mismatched_prompt_mask if loss=kto",
            "mismatched_ref_logprobs if loss=kto",
        ),
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "evaluate": ("lm",)}
    CUT: ClassVar[Cut] = "sequence"
    LIMITS: ClassVar[Limits] = {
        "beta": {"gt": 0},
        "desirable_weight": {"ge": 0},
        "undesirable_weight": {"ge": 0},
    }
    SYNONYMS: ClassVar[Synonyms] = {
        "loss": "loss_type",
        "desirable_weight": "kto_chosen_weight kto_desirable_weight desirable_loss_weight",
        "undesirable_weight": "kto_rejected_weight kto_undesirable_weight undesirable_loss_weight",
    }
    METRICS: ClassVar[Metrics] = {
        "kl": (
            "nats",
            "estimate of the policy's KL from the reference, at least 0: the reference point",
        ),
        "desirable_reward": ("reward", "mean reward of the desirable answers"),
        "undesirable_reward": ("reward", "mean reward of the undesirable answers"),
        "margin": ("reward", "mean reward of the desirable answers less that of the others"),
        "desirable_logprob": ("nats", "mean log-likelihood of the desirable answers"),
        "undesirable_logprob": ("nats", "mean log-likelihood of the undesirable answers"),
        "answers": ("answers", "answers that were evaluated"),
    }

    loss: LossName = "kto"
    """kto: rewards are compared with the policy's KL from the reference. apo_zero_unpaired: with 0,
    for answers that are better than the model's own; it reads no mismatched answers."""

    beta: float = 0.1
    """How close the policy is kept to the reference: higher is closer.
    Rewards are beta times log-ratios."""

    desirable_weight: float = 1.0
    """Weight of the desirable answers. The authors advise a ratio of the two weights, each times
    the number of its answers, between 1 and 4/3 (eq. 8)."""

    undesirable_weight: float = 1.0
    """Weight of the undesirable answers."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on the answers of a batch."""
        totals = self._totals(model, [data], mb_spec)
        loss = functools.partial(self._loss, totals)
        stats: dict[str, float] = model.module.train_batch(
            _answers(data), loss, _weight, mb_spec=mb_spec, cut=self.CUT
        )
        return stats | self._reported(totals)

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """`loss` over all batches and ranks, whose `kl` is estimated from all of them, and
        training's stats."""
        totals = self._totals(model, eval_dataloader, None)
        loss = functools.partial(self._loss, totals)
        batches = [_answers(batch) for batch in eval_dataloader]
        stats, answers = mean_loss(model, batches, loss, _weight, cut=self.CUT)
        return stats | self._reported(totals) | {"answers": answers}

    def _loss(
        self, totals: _Totals, output: ModelOutput, batch: SequenceSample
    ) -> tuple[torch.Tensor, Stats]:
        log_ratios, desirable = _log_ratios(output, batch), batch.data[DESIRABLE]
        losses = prospect_loss(log_ratios, desirable, totals.kl, beta=self.beta)
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        loss = (losses * weights * _counted(batch)).sum()
        return loss, self._stats(totals, log_ratios.detach(), batch)

    def _stats(self, totals: _Totals, log_ratios: torch.Tensor, batch: SequenceSample) -> Stats:
        desirable, lengths = batch.data[DESIRABLE], batch.flat_seqlens(SEQUENCES)
        reference = sequence_sums(batch.data["packed_ref_logprobs"], answer_mask(batch), lengths)
        good, bad = totals.means(self.beta * log_ratios, desirable)
        good_logprob, bad_logprob = totals.means(log_ratios + reference, desirable)
        of_desirable = {"desirable_reward": good, "desirable_logprob": good_logprob}
        of_others = {"undesirable_reward": bad, "undesirable_logprob": bad_logprob}
        if totals.desirable and totals.others:
            return of_desirable | of_others | {"margin": good - bad}
        return of_desirable if totals.desirable else of_others  # a mean over nothing is left out

    def _reported(self, totals: _Totals) -> dict[str, float]:
        return {"kl": totals.kl} if self.loss == "kto" else {}

    def _totals(
        self, model: Model, batches: Sequence[SequenceSample], mb_spec: MicroBatchSpec | None
    ) -> _Totals:
        counted = [_counted(batch) for batch in batches]
        desirable = [
            (batch.data[DESIRABLE] & counts).sum()
            for batch, counts in zip(batches, counted, strict=True)
        ]
        kl = self._kl(model, batches, mb_spec) if self.loss == "kto" else 0.0
        return _Totals(
            kl, _sum(model, [counts.sum() for counts in counted]), _sum(model, desirable)
        )

    def _kl(
        self, model: Model, batches: Sequence[SequenceSample], mb_spec: MicroBatchSpec | None
    ) -> float:
        """The mean log-ratio of the mismatched answers that have a token, or 0 if it is below."""
        mismatched = [_mismatched(batch) for batch in batches]
        log_ratios = []
        for batch in mismatched:
            ones = [[1] * len(lengths) for lengths in batch.seqlens[SEQUENCES]]
            log_ratios.append(
                model.module.forward(
                    batch, mb_spec, post_hook=_log_ratios, output_seqlens=ones, cut=self.CUT
                )
            )
        count = _sum(model, [_weight(batch) for batch in mismatched])
        log_ratio = _sum(model, [ratios.double().sum() for ratios in log_ratios])
        return max(log_ratio, 0.0) / max(count, 1.0)


def _answers(batch: SequenceSample) -> SequenceSample:
    """Prompts with their own answers."""
    return batch.select([SEQUENCES, PROMPT_MASK, "packed_ref_logprobs", DESIRABLE])


def _mismatched(batch: SequenceSample) -> SequenceSample:
    """Prompts with answers to other prompts, as a model reads them."""
    sequences = batch.select(MISMATCHED)
    sequences.remap_keys_(MISMATCHED)
    return sequences


def _log_ratios(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
    """[N] how much likelier each answer is than under the reference."""
    output.actions = answer_mask(batch)
    log_ratios = output.logprobs - batch.data["packed_ref_logprobs"]
    return sequence_sums(log_ratios, output.actions, batch.flat_seqlens(SEQUENCES))


def _counted(batch: SequenceSample) -> torch.Tensor:
    """[N] bool: an answer without a token carries no signal, and does not count."""
    return answer_tokens(batch) > 0


def _weight(batch: SequenceSample) -> torch.Tensor:
    return _counted(batch).sum()


def _sum(model: Model, numbers: Sequence[torch.Tensor]) -> float:
    """The sum of scalars over batches and ranks."""
    return total(model, sum(numbers, torch.zeros(())))


register_interface("kto", KTOInterface)
