"""Splits a batch over optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.engine import LossFn
from rlcli.api.key_meaning import PLACE
from rlcli.api.limits import Limits
from rlcli.api.micro_batches import Cut
from rlcli.api.model import Model
from rlcli.api.synonyms import Synonyms
from rlcli.ops.minibatches import assign_minibatches

TokenNormalizeScope = Literal["global", "dp"]

AT_FIRST = ("kl", "policy_drift", "sampler_gap")
"""Stats of the first optimizer step only, whose weights are those that the training step began
with."""

ADDED_UP = ("update_skipped", "loss_weight")
"""Stats that are summed over the optimizer steps."""


@dataclass(kw_only=True)
class OptimizerSteps:
    """How a batch is split over optimizer steps;
    inherited by interfaces that train on responses."""

    LIMITS: ClassVar[Limits] = {"minibatches": {"ge": 1}, "ppo_epochs": {"ge": 1, "le": 1000}}
    SYNONYMS: ClassVar[Synonyms] = {
        "minibatches": (
            "ppo_n_minibatches num_mini_batches ppo_mini_batch_size mini_batch_size n_minibatches"
        ),
        "ppo_epochs": "num_ppo_epochs num_iterations ppo_epoch n_ppo_epochs max_epochs",
    }

    minibatches: int = 4
    """Number of optimizer steps that a batch is split into (per epoch). The metrics of a step are
    the means of those of its optimizer steps, each of which counts equally, whatever its tokens."""

    ppo_epochs: int = 1
    """Number of times each response is trained on."""

    token_normalize_scope: TokenNormalizeScope = "global"
    """Divisor of the loss: the tokens of all ranks (so the number of ranks does not matter), or
    each rank's own."""


def optimizer_steps(
    settings: OptimizerSteps,
    model: Model,
    batch: SequenceSample,
    loss_fn: LossFn,
    loss_weight_fn: Callable[[SequenceSample], torch.Tensor],
    mb_spec: MicroBatchSpec,
    step_if: Callable[[Mapping[str, float]], bool] | None = None,
    cut: Cut = "sample",
) -> dict[str, float]:
    """Take `ppo_epochs` times `minibatches` optimizer steps on a batch; return the mean of their
    stats (`average`)."""
    steps = []
    for minibatch in optimizer_batches(settings, model, batch):
        step = model.module.train_batch(
            minibatch,
            loss_fn,
            loss_weight_fn,
            token_normalize_scope=settings.token_normalize_scope,
            mb_spec=mb_spec,
            step_if=step_if,
            cut=cut,
        )
        steps.append(step)
    return average(steps)


def optimizer_batches(
    settings: OptimizerSteps, model: Model, data: SequenceSample
) -> list[SequenceSample]:
    """This rank's part of each optimizer step, epoch by epoch; a part may be empty."""
    index = data.metadata.get(PLACE) or list(range(data.bs))
    seed = f"{model.role_seed}/{model.version.global_step}"
    return [
        data.select_indices(minibatch)
        for epoch in range(settings.ppo_epochs)
        for minibatch in assign_minibatches(index, settings.minibatches, seed, epoch)
    ]


def average(steps: list[dict[str, float]]) -> dict[str, float]:
    """Stats of a training step from those of its optimizer steps: the mean of each over the steps
    that report it; `AT_FIRST` come from the first, `ADDED_UP` are sums.

    Steps that had no tokens to train on count towards these sums alone.
    """
    counted = [step for step in steps if step.get("loss_weight")] or steps
    columns: dict[str, list[float]] = {}
    for number, step in enumerate(counted):
        for name, value in step.items():
            if number == 0 or name not in AT_FIRST:
                columns.setdefault(name, []).append(value)
    means = {name: sum(column) / len(column) for name, column in columns.items()}
    return means | {name: sum(step.get(name, 0.0) for step in steps) for name in ADDED_UP}
