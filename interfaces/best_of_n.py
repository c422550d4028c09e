"""Rejection-sampling fine-tuning: of the responses to a prompt, learn the best ones by their likelihood.

As in RFT (Yuan et al. 2023, arXiv:2308.01825) and RAFT (Dong et al. 2023, arXiv:2304.06767), on the policy's own
samples of each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.micro_batches import Cut
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface
from rlcli.interfaces._best_of import best_places, keep_places
from rlcli.interfaces._optimizer_steps import optimizer_steps
from rlcli.interfaces._rollout import means, reduce_over
from rlcli.interfaces._settings import OptimizerSteps
from rlcli.ops.losses import nll_loss
from rlcli.ops.rewards import action_mask

Keep = Literal["best", "solved"]


@dataclass(kw_only=True)
class BestOfNInterface(OptimizerSteps, ModelInterface):
    """Trains on chosen responses as supervised fine-tuning does: each of their tokens with the same weight."""

    READS: ClassVar[Declaration] = {
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "rewards if keep=best",
            "rewards if min_reward",
            "solved if keep=solved",
        )
    }
    LIMITS: ClassVar[Limits] = {"best": {"ge": 1}}
    CUT: ClassVar[Cut] = "sequence"

    keep: Keep = "best"
    """Which responses are learned. "best": the `best` ones of each prompt by reward; of equals the shorter, then the
    earlier. "solved": all right ones, of some prompts none."""

    best: int = 1
    """With keep: best, responses of each prompt that are learned."""

    min_reward: float | None = None
    """Responses with a lower reward are never learned."""

    def train_step(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> dict[str, float]:
        """`minibatches` optimizer steps on the mean negative log-likelihood per token of the chosen responses.

        `kept_fraction` is the share of the responses that are learned, `prompts_without` the share of the prompts of
        which none is; `reward` is the mean over all responses, `kept_reward` over those that are learned.
        """
        chosen = self._chosen(data)
        kept = torch.tensor([choice for group in chosen for choice in group], dtype=torch.bool)
        without = torch.tensor([not any(group) for group in chosen], dtype=torch.bool)
        stats = {"kept_fraction": (kept.sum(), len(kept)), "prompts_without": (without.sum(), data.bs)}
        if "rewards" in data.keys:
            rewards = data.data["rewards"].double().cpu()
            stats |= {"reward": (rewards.sum(), len(kept)), "kept_reward": (rewards[kept].sum(), int(kept.sum()))}
        return means(stats, reduce_over(model)) | optimizer_steps(
            self, model, _marked(data, chosen), _loss, _weight, mb_spec, cut=self.CUT
        )

    def _chosen(self, data: SequenceSample) -> list[list[bool]]:
        """For each sample which of its responses are learned."""
        groups = data.seqlens["packed_input_ids"]
        rewards = _grouped(data, "rewards") if "rewards" in data.keys else None
        if self.keep == "solved":
            chosen = [[score >= 1 for score in group] for group in _grouped(data, "solved")]
        else:
            assert rewards is not None
            best = [best_places(scores, lengths, self.best) for scores, lengths in zip(rewards, groups, strict=True)]
            chosen = [[n in places for n in range(len(group))] for places, group in zip(best, groups, strict=True)]
        if self.min_reward is None or rewards is None:
            return chosen
        return [
            [choice and score >= self.min_reward for choice, score in zip(choices, scores, strict=True)]
            for choices, scores in zip(chosen, rewards, strict=True)
        ]


def _grouped(data: SequenceSample, key: str) -> list[list[float]]:
    """For each sample the numbers of its responses."""
    numbers = iter(data.data[key].tolist())
    return [[next(numbers) for _ in group] for group in data.seqlens["packed_input_ids"]]


def _marked(data: SequenceSample, chosen: list[list[bool]]) -> SequenceSample:
    """The chosen sequences, with `trained`, a flag for each; where none is chosen one stays, and is not trained on: a
    sample holds at least one."""
    places = [[place for place, want in enumerate(group) if want] or [0] for group in chosen]
    trained = torch.tensor([want for group in chosen for want in ([True] * sum(group) or [False])], dtype=torch.bool)
    kept = keep_places(data.select(["packed_input_ids", "prompt_mask"]), places)
    ones = [[1] * len(group) for group in places]
    flags = trained.to(data.data["prompt_mask"].device)
    kept.update_(SequenceSample.from_default(ids=data.ids, seqlens={"trained": ones}, data={"trained": flags}))
    return kept


def _mask(batch: SequenceSample) -> torch.Tensor:
    """[A] the actions that chose a token of a response that is learned."""
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
