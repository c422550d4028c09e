"""Direct preference optimisation: trains a policy on pairs of answers, without a reward model."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits, Needs
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
from rlcli.api.synonyms import Synonyms
from rlcli.ops.preference_losses import (
    PREFERENCE_LOSSES,
    PreferenceLossName,
    chosen_and_rejected,
    sequence_sums,
)

from ._evaluation import mean_loss, total
from ._named import named
from ._pairs import PairSettings, pair_stats
from ._sequences import answer_mask, answer_tokens

NLLAggregation = Literal["sequence", "token"]


@dataclass(kw_only=True)
class DPOSettings(PairSettings):
    """The policy's objective."""

    NEEDS: ClassVar[Needs] = {
        "label_smoothing": "loss=sigmoid|robust",
        "gamma": "loss=sigmoid",
        "nll_aggregation": "nll_coef",
    }
    LIMITS: ClassVar[Limits] = {
        "beta": {"gt": 0},
        "label_smoothing": {"ge": 0, "lt": 0.5},
        "gamma": {"ge": 0},
        "nll_coef": {"ge": 0},
    }
    SYNONYMS: ClassVar[Synonyms] = {
        "loss": "pref_loss preference_loss loss_type",
        "gamma": "simpo_gamma target_reward_margin",
        "nll_coef": "rpo_alpha cpo_alpha pref_ftx nll_loss_coef sft_loss_weight",
    }

    loss: PreferenceLossName = "sigmoid"
    """sigmoid: DPO's. ipo: the squared distance of the margin from 1 / (2 beta) (its authors use
    `length_normalized`). hinge: that of SLiC. robust: DPO's loss without the bias from wrong
    labels, whose fraction is `label_smoothing`."""

    beta: float = 0.1
    """How close the policy is kept to the reference: higher is closer.
    Rewards are beta times log-ratios."""

    label_smoothing: float = 0.0
    """Share of pairs that are labelled the wrong way round, below 0.5; for sigmoid (cDPO)
    and robust."""

    reference_free: bool = False
    """Compare the log-probs themselves; the graph then needs no reference (`models.ref: null`)."""

    length_normalized: bool = False
    """Compare means over the tokens of an answer instead of sums. SimPO is this with
    `reference_free` and `gamma`, and a beta of 2 or more."""

    gamma: float = 0.0
    """Target margin of the chosen answer's reward over the rejected one's, for sigmoid."""

    nll_coef: float = 0.0
    """Weight of the negative log-likelihood of the chosen answers (RPO, arXiv:2404.19733)."""

    nll_aggregation: NLLAggregation = "sequence"
    """sequence: the mean over the tokens of each chosen answer, as published. token: every token
    has the same weight."""


@dataclass(kw_only=True)
class DPOInterface(DPOSettings, ModelInterface):
    """Raises the likelihood of chosen answers over that of rejected ones,
    relative to a reference policy."""

    ELSEWHERE: ClassVar[str] = "simpo ipo orpo cpo"
    READS: ClassVar[Declaration] = {
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "packed_ref_logprobs unless reference_free",
        ),
        "evaluate": (
            "packed_input_ids",
            "prompt_mask",
            "packed_ref_logprobs unless reference_free",
        ),
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",), "evaluate": ("lm",)}
    NEEDS_GROUP: ClassVar[Declaration] = {"train_step": ("2",)}
    METRICS: ClassVar[Metrics] = {
        "chosen_logprob": ("nats", "mean log-likelihood of the chosen answers"),
        "rejected_logprob": ("nats", "mean log-likelihood of the rejected answers"),
        "nll": (
            "nats",
            (
                "negative log-likelihood of the chosen answers, before nll_coef; mean "
                "as nll_aggregation says"
            ),
        ),
    }

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """One optimizer step on the pairs of a batch."""
        loss = functools.partial(self._loss, self._nll_scale(model, [data]))
        stats: dict[str, float] = model.module.train_batch(
            data, loss, self._weight, mb_spec=mb_spec
        )
        return stats

    def evaluate(self, model: Model, eval_dataloader: EvalLoader) -> dict[str, float]:
        """`accuracy`: how often the chosen answer has the higher reward; also `margin`, `loss` and
        training's stats."""
        loss = functools.partial(self._loss, self._nll_scale(model, eval_dataloader))
        stats, pairs = mean_loss(model, eval_dataloader, loss, self._weight)
        return stats | {self.pair_aggregation + "s": pairs}

    def _loss(
        self, nll_scale: float, output: ModelOutput, batch: SequenceSample
    ) -> tuple[torch.Tensor, Stats]:
        lengths, mask = batch.flat_seqlens("packed_input_ids"), answer_mask(batch)
        output.actions = mask
        logprobs, tokens = output.logprobs, answer_tokens(batch)
        chosen, rejected = chosen_and_rejected(self._scores(logprobs, tokens, batch))
        weights = self._pair_weights(tokens, batch)
        loss = (named(PREFERENCE_LOSSES, self.loss, self)(chosen - rejected) * weights).sum()
        answer_logprobs = chosen_and_rejected(sequence_sums(logprobs, mask, lengths))
        stats = pair_stats(self.beta * chosen, self.beta * rejected, weights)
        for name, sums in zip(("chosen_logprob", "rejected_logprob"), answer_logprobs, strict=True):
            stats[name] = (sums.detach() * weights).sum()
        if self.nll_coef:
            nll = self._nll(answer_logprobs[0], chosen_and_rejected(tokens)[0], weights) * nll_scale
            loss = loss + self.nll_coef * nll
            stats["nll"] = nll.detach()
        return loss, stats

    def _scores(
        self, logprobs: torch.Tensor, tokens: torch.Tensor, batch: SequenceSample
    ) -> torch.Tensor:
        """[N] how much likelier each answer is than under the reference, from the log-probs [A];
        `tokens`: their lengths, [N]."""
        log_ratios = (
            logprobs if self.reference_free else logprobs - batch.data["packed_ref_logprobs"]
        )
        lengths = batch.flat_seqlens("packed_input_ids")
        scores = sequence_sums(log_ratios, answer_mask(batch), lengths)
        return scores / tokens.clamp(min=1) if self.length_normalized else scores

    def _nll(
        self, logprobs: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The sum over chosen answers, from their log-probs and lengths, [P]."""
        return -(
            logprobs * weights / tokens.clamp(min=1)
            if self.nll_aggregation == "sequence"
            else logprobs
        ).sum()

    def _nll_scale(self, model: Model, batches: Sequence[SequenceSample]) -> float:
        """Factor that turns a sum over all chosen tokens, divided by the loss weight, into their
        mean. Computed over batches and ranks, so that it does not matter how the pairs are spread
        over them."""
        if not self.nll_coef or self.nll_aggregation == "sequence":
            return 1.0
        tokens = [chosen_and_rejected(answer_tokens(batch))[0].sum() for batch in batches]
        weight, count = (
            total(model, sum(parts, torch.zeros(())))
            for parts in ([*map(self._weight, batches)], tokens)
        )
        return weight / count if count else 0.0

    def _weight(self, batch: SequenceSample) -> torch.Tensor:
        return self._pair_weights(answer_tokens(batch), batch).sum()

    def _pair_weights(self, tokens: torch.Tensor, batch: SequenceSample) -> torch.Tensor:
        """[P]. A pair in which neither answer has a token carries no signal, and does not count."""
        chosen, rejected = chosen_and_rejected(tokens)
        return self.pair_weights(batch, chosen + rejected > 0)


register_interface("dpo", DPOInterface)
