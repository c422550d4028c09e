"""PPO's critic: predicts the return of each state, and trains on the observed returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import ArgumentCheck, Limits, Needs
from rlcli.api.metrics import Metrics
from rlcli.api.micro_batches import Cut
from rlcli.api.model import (
    MicroBatchSpec,
    Model,
    ModelInterface,
    ModelOutput,
    Stats,
    register_interface,
)
from rlcli.api.synonyms import Synonyms
from rlcli.ops.losses import ppo_critic_loss
from rlcli.ops.normalization import RunningMeanStd
from rlcli.ops.packing import drop_last
from rlcli.ops.reduce import AllReduce, counted_means, masked_moments

from ._optimizer_steps import OptimizerSteps, optimizer_steps
from ._sequences import chosen_sequences

ValueLoss = Literal["mse", "huber"]
ValueNormType = Literal["exp", "ma"]

RESOLUTION = torch.finfo(torch.float32).eps
"""Returns are computed from values and rewards: relative differences below this are rounding."""


@dataclass(kw_only=True)
class PPOCriticInterface(OptimizerSteps, ModelInterface):
    """Predicts returns; trains on normalised returns and de-normalises its output. Another call
    computes the returns: `gae`."""

    ELSEWHERE: ClassVar[str] = "critic value value_model"
    READS: ClassVar[Declaration] = {
        "inference": ("packed_input_ids",),
        "train_step": ("packed_input_ids", "values", "returns", "loss_mask", "chosen if given"),
    }
    WRITES: ClassVar[Declaration] = {"inference": ("values",)}
    HEAD: ClassVar[Declaration] = {"train_step": ("value",), "inference": ("value",)}

    METRICS: ClassVar[Metrics] = {
        "value": ("reward", "predicted return before the step, mean over the trained tokens"),
        "return": (
            "reward",
            "return that values are trained towards, mean over the trained tokens",
        ),
        "explained_variance": (
            "share",
            "share of the variance of returns that predictions explain: at most 1",
        ),
        "return_clip_fraction": (
            "share",
            "share of trained tokens whose normalised return is clipped",
        ),
        "value_clip_fraction": (
            "share",
            "share of trained tokens whose loss value_eps_clip cuts off",
        ),
    }

    PREPARED_BY: ClassVar[Mapping[str, str]] = {"train_step": "gae"}
    ARGUMENT_CHECK: ClassVar[ArgumentCheck] = None
    CUT: ClassVar[Cut] = "sequence"
    LIMITS: ClassVar[Limits] = {
        "value_eps_clip": {"gt": 0},
        "value_norm_beta": {"ge": 0, "lt": 1},
        "value_norm_eps": {"gt": 0},
    }
    NEEDS: ClassVar[Needs] = {
        "value_norm_type": "value_norm",
        "value_norm_beta": "value_norm_type=exp",
        "value_norm_eps": "value_norm",
    }
    SYNONYMS: ClassVar[Synonyms] = {
        "value_eps_clip": "cliprange_value value_clip value_clip_range vf_clip",
    }

    value_eps_clip: float = 0.2
    """Clip the critic's prediction to within ± this of its earlier one (in normalised units with
    `value_norm`)."""

    value_loss: ValueLoss = "mse"
    """Error of the critic: half the squared error, or Huber with delta 10."""

    value_norm: bool = True
    """Train the critic on returns normalised by their running mean and standard deviation (at least
    0.1), and clipped to ± 5."""

    value_norm_type: ValueNormType = "exp"
    """Running average: exponential with `value_norm_beta`, or over all returns so far."""

    value_norm_beta: float = 0.99995
    """Decay per training step of the exponential average (corrected for its start at zero)."""

    value_norm_eps: float = 1e-5
    """Added to the variance of returns."""

    normalizer: RunningMeanStd = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.normalizer = RunningMeanStd(
            self.value_norm_type, self.value_norm_beta, self.value_norm_eps
        )

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids` → `values`, the expected return after each token,
        in the units of the reward."""
        tokens = data.select(["packed_input_ids"])
        values = model.module.forward(
            tokens, mb_spec, post_hook=lambda output, _: output.values, cut=self.CUT
        ).float()
        return _per_token(data, self.normalizer.denormalize(values))

    def train_step(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> dict[str, float]:
        """`ppo_epochs` times `minibatches` optimizer steps towards the returns of one batch."""
        reduce = model.all_reduce
        batch = chosen_sequences(data)
        stats = self._explained(batch, reduce)
        batch, clipped = self._normalized(batch, reduce)
        return (
            stats
            | clipped
            | optimizer_steps(
                self, model, batch, self._loss, _trained_tokens, mb_spec, cut=self.CUT
            )
        )

    def state_dict(self) -> dict[str, Any]:
        return {"normalizer": self.normalizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.normalizer.load_state_dict(state["normalizer"])

    def _normalized(
        self, batch: SequenceSample, reduce: AllReduce
    ) -> tuple[SequenceSample, dict[str, float]]:
        """`values` as the model produced them, `returns` in the units it trains on, and the share
        of the returns that is clipped."""
        if not self.value_norm:
            return batch, {}
        tensors = dict(batch.data)
        # before the update: its inverse
        tensors["values"] = self.normalizer.normalize(tensors["values"], clip=False)
        self.normalizer.update(tensors["returns"], tensors["loss_mask"], reduce)
        normalized = self.normalizer.normalize(tensors["returns"], clip=False)[tensors["loss_mask"]]
        beyond = (normalized.abs() > self.normalizer.CLIP).sum()
        tensors["returns"] = self.normalizer.normalize(tensors["returns"])
        prepared = SequenceSample.from_default(
            ids=batch.ids, seqlens=batch.seqlens, data=tensors, metadata=batch.metadata
        )
        sums = {"return_clip_fraction": (beyond, len(normalized))}
        return prepared, counted_means(sums, reduce)

    def _loss(self, output: ModelOutput, batch: SequenceSample) -> tuple[torch.Tensor, Stats]:
        tensors, lengths = batch.data, batch.flat_seqlens("packed_input_ids")
        return ppo_critic_loss(
            drop_last(output.values, lengths),
            drop_last(tensors["values"], lengths),
            tensors["returns"],
            tensors["loss_mask"],
            self.value_eps_clip,
            self.value_loss,
        )

    def _explained(self, batch: SequenceSample, reduce: AllReduce) -> dict[str, float]:
        """How good the predictions were: explained variance is 1 for a perfect critic,
        0 for a constant one.

        Also 0 if all returns are the same up to rounding: there is nothing to explain.
        """
        tensors, lengths = batch.data, batch.flat_seqlens("packed_input_ids")
        mask = tensors["loss_mask"]
        values = drop_last(tensors["values"], lengths)
        _, value, spread_of_values = masked_moments(values, mask, reduce)
        _, return_, spread = masked_moments(tensors["returns"], mask, reduce)
        _, _, residual = masked_moments(tensors["returns"] - values, mask, reduce)
        rounding = RESOLUTION**2 * max(value**2 + spread_of_values, return_**2 + spread)
        explained = 1 - residual / spread if spread > rounding else 0.0
        return {
            "value": value,
            "return": return_,
            "explained_variance": explained,
        }


def _trained_tokens(batch: SequenceSample) -> torch.Tensor:
    return batch.data["loss_mask"].count_nonzero()


def _per_token(data: SequenceSample, values: torch.Tensor) -> SequenceSample:
    seqlens = {"values": data.seqlens["packed_input_ids"]}
    return SequenceSample.from_default(ids=data.ids, seqlens=seqlens, data={"values": values})


register_interface("ppo_critic", PPOCriticInterface)
