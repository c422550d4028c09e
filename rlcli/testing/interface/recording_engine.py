"""A tiny engine that records what an interface requested from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.engine import LossFn, ModelOutput
from rlcli.api.micro_batches import Cut
from rlcli.testing.tiny_engine import TinyEngine

T = TypeVar("T")

Weight = Callable[[SequenceSample], torch.Tensor | float]

HEADS = {"logprobs": "lm", "entropy": "lm", "logits": "lm", "values": "value"}
"""Output of a forward pass → the head that it comes from."""


@dataclass(frozen=True)
class TrainCall:
    """One call of `train_batch`: one optimizer step."""

    batch: SequenceSample
    loss_fn: LossFn
    loss_weight_fn: Weight
    cut: Cut
    stats: dict[str, float] = field(default_factory=dict)
    """What the call returned."""


@dataclass
class ForwardPass:
    """One pass over a micro-batch, with the outputs that were requested."""

    sequences: tuple[torch.Tensor, ...]
    """The tokens of each of its sequences."""
    asked: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Name of an output → the tensors that were handed out. They keep their gradients."""

    def gradient(self, name: str) -> torch.Tensor | None:
        """For everything handed out under this name, [rows]: the size of each row's gradient."""
        total = self.signed_gradient(name)
        if total is None:
            return None
        return total.abs().flatten(1).sum(1) if total.dim() > 1 else total.abs()

    def signed_gradient(self, name: str) -> torch.Tensor | None:
        """The gradient of what was handed out under this name, [rows, …]; None without any."""
        gradients = [tensor.grad for tensor in self.asked.get(name, []) if tensor.grad is not None]
        return torch.stack(gradients).sum(0) if gradients else None


class WatchedOutput:
    """Hands out the outputs of a `ModelOutput` and records them."""

    def __init__(self, output: ModelOutput, asked: dict[str, list[torch.Tensor]]):
        vars(self).update(_output=output, _asked=asked)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._output, name)
        if name in HEADS:
            if value.requires_grad:
                value.retain_grad()
            self._asked.setdefault(name, []).append(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._output, name, value)


class WatchedEngine(TinyEngine):
    """A `TinyEngine` that records its training calls and the forward passes in them."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.calls: list[TrainCall] = []
        self.passes: list[ForwardPass] = []
        self.keeps_groups = False
        """Whatever the call requests: no group is cut."""
        self.mode: bool | None = None
        """Whether it was last switched to training mode; None before any switch."""

    @property
    def heads(self) -> set[str]:
        """The heads that training used."""
        return {HEADS[name] for forward_pass in self.passes for name in forward_pass.asked}

    def train(self, mode: bool = True) -> None:
        self.mode = mode

    def forward_micro_batch(self, micro_batch: SequenceSample, then: Callable[[Any], T]) -> T:
        lengths = micro_batch.flat_seqlens("packed_input_ids")
        forward_pass = ForwardPass(micro_batch.data["packed_input_ids"].split(lengths))
        if torch.is_grad_enabled():
            self.passes.append(forward_pass)
        return super().forward_micro_batch(
            micro_batch, lambda output: then(WatchedOutput(output, forward_pass.asked))
        )

    def train_batch(
        self,
        input_: SequenceSample,
        loss_fn: LossFn,
        loss_weight_fn: Weight,
        *rest: Any,
        cut: Cut = "sample",
        **how: Any,
    ) -> dict[str, float]:
        call = TrainCall(input_, loss_fn, loss_weight_fn, cut)
        self.calls.append(call)
        cut = "sample" if self.keeps_groups else cut
        stats = super().train_batch(  # type: ignore[misc]
            input_, loss_fn, loss_weight_fn, *rest, cut=cut, **how
        )
        call.stats.update(stats)
        return stats
