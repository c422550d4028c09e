"""Rejection-sampling fine-tuning: trains on the likelihood of the best responses to each prompt.

As in RFT (Yuan et al. 2023, arXiv:2308.01825) and RAFT (Dong et al. 2023, arXiv:2304.06767), on the
policy's own samples of each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface
from rlcli.ops.losses import nll_loss
from rlcli.ops.rewards import action_mask

from ._optimizer_steps import OptimizerSteps, optimizer_steps
from ._sequences import best_places, keep_places
from ._statistics import means, reduce_over

Keep = Literal["best", "solved"]


@dataclass(kw_only=True)
class BestOfNInterface(OptimizerSteps, ModelInterface):
    """Supervised fine-tuning on selected responses; every token has the same weight."""

    READS: ClassVar[Declaration] = {
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "rewards if keep=best",
            "rewards if min_reward",
            "solved if keep=solved",
        )
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",)}
    LIMITS: ClassVar[Limits] = {"best": {"ge": 1}}
    CUT: ClassVar[Cut] = "sequence"
    METRICS: ClassVar[Metrics] = {
        "kept_fraction": ("share", "share of responses that are trained on"),
        "kept_reward": ("reward", "mean reward of these responses"),
        "prompts_without": ("share", "share of prompts without such a response"),
    }

    keep: Keep = "best"
    """Which responses to train on. "best": the `best` ones of each prompt by reward; ties go to the
    shorter, then the earlier. "solved": all correct ones, which for some prompts means none."""

    best: int = 1
    """With keep: best, the number of responses per prompt to train on."""

    min_reward: float | None = None
    """Never train on responses with a lower reward."""

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """`minibatches` optimizer steps on the mean negative log-likelihood per token of the chosen
        responses."""
        chosen = self._chosen(data)
        is_chosen = torch.tensor([choice for group in chosen for choice in group], dtype=torch.bool)
        without = torch.tensor([not any(group) for group in chosen], dtype=torch.bool)
        stats = {
            "kept_fraction": (is_chosen.sum(), len(is_chosen)),
            "prompts_without": (without.sum(), data.bs),
        }
        if "rewards" in data.keys:
            rewards = data.data["rewards"].double().cpu()
            stats["kept_reward"] = (rewards[is_chosen].sum(), int(is_chosen.sum()))
        return means(stats, reduce_over(model)) | optimizer_steps(
            self, model, _marked(data, chosen), _loss, _weight, mb_spec, cut=self.CUT
        )

    def _chosen(self, data: SequenceSample) -> list[list[bool]]:
        """Which responses of each sample to train on."""
        groups = data.seqlens["packed_input_ids"]
        rewards = _grouped(data, "rewards") if "rewards" in data.keys else None
        if self.keep == "solved":
            chosen = [[score >= 1 for score in group] for group in _grouped(data, "solved")]
        else:
            assert rewards is not None
            best = [
                best_places(scores, lengths, self.best)
                for scores, lengths in zip(rewards, groups, strict=True)
            ]
            chosen = [
                [n in places for n in range(len(group))]
                for places, group in zip(best, groups, strict=True)
            ]
        if self.min_reward is None or rewards is None:
            return chosen
        return [
            [
                choice and score >= self.min_reward
                for choice, score in zip(choices, scores, strict=True)
            ]
            for choices, scores in zip(chosen, rewards, strict=True)
        ]


def _grouped(data: SequenceSample, key: str) -> list[list[float]]:
    """The responses' numbers, grouped by sample."""
    numbers = iter(data.data[key].tolist())
    return [[next(numbers) for _ in group] for group in data.seqlens["packed_input_ids"]]


def _marked(data: SequenceSample, chosen: list[list[bool]]) -> SequenceSample:
    """The chosen sequences, with `trained`, a flag for each; if none is chosen one stays, flagged
    as not trained on, because a sample needs at least one."""
    places = [[place for place, want in enumerate(group) if want] or [0] for group in chosen]
    trained = torch.tensor(
        [want for group in chosen for want in ([True] * sum(group) or [False])], dtype=torch.bool
    )
    selected = keep_places(data.select(["packed_input_ids", "prompt_mask"]), places)
    ones = [[1] * len(group) for group in places]
    flags = trained.to(data.data["prompt_mask"].device)
    selected.update_(
        SequenceSample.from_default(
            ids=data.ids, seqlens={"trained": ones}, data={"trained": flags}
        )
    )
    return selected


def _mask(batch: SequenceSample) -> torch.Tensor:
    """[A] the actions that chose a token of a response to train on."""
    lengths = batch.flat_seqlens("packed_input_ids")
    trained = torch.repeat_interleave(
        batch.data["trained"], torch.tensor(lengths, device=batch.data["trained"].device) - 1
    )
    return action_mask(batch.data["prompt_mask"], lengths) & trained


def _weight(batch: SequenceSample) -> torch.Tensor:
    return _mask(batch).count_nonzero()


def _loss(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
    return nll_loss(output.logprobs, _mask(batch))


register_interface("best_of_n", BestOfNInterface)
