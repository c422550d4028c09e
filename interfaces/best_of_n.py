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
from rlcli.api.key_meaning import CHOSEN, SEQUENCES
from rlcli.api.limits import Limits, Needs
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, ModelOutput, register_interface
from rlcli.ops.losses import nll_loss
from rlcli.ops.packing import action_mask, action_owner
from rlcli.ops.reduce import counted_means

from ._optimizer_steps import OptimizerSteps, optimizer_steps
from ._sequences import best_of_each, group_of_each, select_sequences

Keep = Literal["best", "solved"]


@dataclass(kw_only=True)
class BestOfNInterface(OptimizerSteps, ModelInterface):
    """Supervised fine-tuning on selected responses; every token has the same weight."""

    ELSEWHERE: ClassVar[str] = "raft rft rejection_sampling"
    READS: ClassVar[Declaration] = {
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "rewards if keep=best",
            "rewards unless min_reward=None",
            "solved if keep=solved",
        )
    }
    HEAD: ClassVar[Declaration] = {"train_step": ("lm",)}
    NEEDS: ClassVar[Needs] = {"best": "keep=best"}
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
        stats = {
            "kept_fraction": (chosen.sum(), len(chosen)),
            "prompts_without": (data.bs - _chosen_groups(data, chosen).sum(), data.bs),
        }
        if "rewards" in data.keys:
            rewards = data.data["rewards"].double().cpu()
            stats["kept_reward"] = (rewards[chosen].sum(), int(chosen.sum()))
        return counted_means(stats, model.all_reduce) | optimizer_steps(
            self, model, _marked(data, chosen), _loss, _weight, mb_spec, cut=self.CUT
        )

    def _chosen(self, data: SequenceSample) -> torch.Tensor:
        """[N] bool, on the CPU: which responses to train on."""
        if self.keep == "solved":
            chosen = data.data["solved"].cpu() >= 1
        else:
            chosen = best_of_each(data, self.best)
        if self.min_reward is None:
            return chosen
        return chosen & (data.data["rewards"].cpu() >= self.min_reward)


def _chosen_groups(data: SequenceSample, chosen: torch.Tensor) -> torch.Tensor:
    """[samples] bool: whether any of a sample's responses is chosen."""
    return torch.bincount(group_of_each(data)[chosen], minlength=data.bs) > 0


def _marked(data: SequenceSample, chosen: torch.Tensor) -> SequenceSample:
    """The chosen sequences, with the flag `chosen` for each; of a sample without any, the first
    stays, flagged as not trained on, because a sample needs at least one."""
    group = group_of_each(data)
    is_first = torch.diff(group, prepend=torch.tensor([-1])) > 0
    stays = chosen | (is_first & ~_chosen_groups(data, chosen)[group])
    batch = data.select([SEQUENCES, "prompt_mask"])
    device = batch.data[SEQUENCES].device
    flags = {CHOSEN: chosen.to(device)}
    batch.update_(
        SequenceSample.from_default(ids=data.ids, seqlens=data.seqlens[SEQUENCES], data=flags)
    )
    return select_sequences(batch, stays.to(device))


def _mask(batch: SequenceSample) -> torch.Tensor:
    """[A] the actions that chose a token of a response to train on."""
    lengths = batch.flat_seqlens("packed_input_ids")
    actions = action_mask(batch.data["prompt_mask"], lengths)
    return actions & batch.data[CHOSEN][action_owner(lengths, actions.device)]


def _weight(batch: SequenceSample) -> torch.Tensor:
    return _mask(batch).count_nonzero()


def _loss(output: ModelOutput, batch: SequenceSample) -> torch.Tensor:
    output.actions = _mask(batch)
    return nll_loss(output.logprobs, output.actions)


register_interface("best_of_n", BestOfNInterface)
