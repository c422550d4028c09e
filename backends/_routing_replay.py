"""Routing replay: tokens are trained with the experts that they were sampled with (R3,
https://arxiv.org/abs/2510.11370).

Sampler and trainer round differently, so that near a tie their routers choose different experts for
a token, and its log-probs differ by much more than rounding. The sampler therefore records the
experts that its routers choose, and in the trainer's passes routers take these in place of their
own choice. The weights of the experts still follow from the router's present scores, so the router
has gradients.

A router of transformers chooses by one call of `torch.topk`. Only that call is intercepted: what a
family does with the chosen scores (dividing by their sum, rounding) remains its own code. It is
also done when a layer is recomputed in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ROUTED_EXPERTS, SEQUENCES
from rlcli.errors import ModelError
from rlcli.ops.packing import all_but_last

from ._router_modules import routers_in

SWITCH_OFF = "set generation.routing_replay=false"
FREE = -1
"""In place of an expert: the router chooses."""


def routes_of(sample: SequenceSample) -> torch.Tensor | None:
    """[T, L, k] int64: the experts that each token of a micro-batch must be routed to; `FREE` for
    the last of each sequence, which no log-prob depends on. None: as routers choose."""
    if ROUTED_EXPERTS not in sample.keys:
        return None
    recorded = sample.data[ROUTED_EXPERTS]
    lengths = sample.flat_seqlens(SEQUENCES)
    routes = recorded.new_full((sum(lengths), *recorded.shape[1:]), FREE, dtype=torch.int64)
    routes[all_but_last(lengths, recorded.device)] = recorded.to(torch.int64)
    return routes


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of a model that have experts."""

    indices: tuple[int, ...]
    layers: int
    """Layers of the model, including those without experts."""
    experts: int
    per_token: int

    @classmethod
    def of(cls, lm: Any, role: str) -> RoutedLayers:
        """Raises ModelError for a model without routers."""
        config = lm.config.get_text_config()
        routers, _ = routers_in(lm, role, "replayed", SWITCH_OFF)
        indices = [int(part) for name in routers for part in name.split(".") if part.isdecimal()]
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        return cls(tuple(indices), config.num_hidden_layers, experts, config.num_experts_per_tok)

    @property
    def no_tokens(self) -> torch.Tensor:
        """[0, L, k] of the dtype in which the experts of tokens are stored and sent."""
        dtype = torch.uint8 if self.experts <= 256 else torch.int16
        return torch.zeros((0, len(self.indices), self.per_token), dtype=dtype)

    def check(self, routes: torch.Tensor, role: str) -> None:
        """Raises ModelError if routes [T, L, k] are those of another model."""
        layers, per_token = len(self.indices), self.per_token
        if routes.shape[1:] != (layers, per_token):
            raise ModelError(
                f"the batch has {routes.shape[2]} experts per token in {routes.shape[1]} layers, "
                f"but role {role} has {per_token} in {layers}",
                hint="the role that samples must have the same kind of model",
            )


class RouterChoices:
    """The experts that the routers of a model choose: recorded, or prescribed."""

    def __init__(self, lm: Any, role: str):
        self._role = role
        self._prescribed: torch.Tensor | None = None
        self._recorded: list[torch.Tensor] | None = None
        self._layers = RoutedLayers.of(lm, role)
        self.no_tokens = self._layers.no_tokens
        """[0, L, k] of the dtype in which choices are recorded."""
        routers, _ = routers_in(lm, role, "replayed", SWITCH_OFF)
        modules: list[Any] = list(routers.values())
        for layer, module in enumerate(modules):
            module.forward = self._observed(module.forward, layer)

    def prescribe(self, routes: torch.Tensor | None) -> None:
        """Set the experts [T, L, k] for the tokens of the next pass, and of its recomputation; None
        lets routers choose. Raises ModelError if they are those of another model."""
        if routes is not None:
            self._layers.check(routes, self._role)
        self._prescribed = routes

    @contextmanager
    def recorded(self) -> Iterator[list[torch.Tensor]]:
        """The choices [T, k] of each layer, in order, in a pass within this context."""
        choices: list[torch.Tensor] = []
        self._recorded = choices
        try:
            yield choices
        finally:
            self._recorded = None

    def stacked(self, choices: list[torch.Tensor]) -> torch.Tensor:
        """[T, L, k] in the dtype of records, from those of each layer."""
        return torch.stack(choices, dim=1).to(self.no_tokens.dtype)

    def _observed(self, compute: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            if self._prescribed is None and self._recorded is None:
                return compute(*arguments, **named)
            prescribed = self._prescribed[:, layer] if self._prescribed is not None else None
            with _Choice(prescribed) as choice:
                outputs = compute(*arguments, **named)
            if (steps := len(choice.indices)) != 1:
                raise ModelError(
                    f"the routers of role {self._role} choose experts in {steps} steps, so their "
                    "choice cannot be replayed",
                    hint=SWITCH_OFF,
                )
            if self._recorded is not None:
                self._recorded.extend(choice.indices)
            return outputs

        return forward


class _Choice(TorchFunctionMode):
    """Within it, `torch.topk` chooses the prescribed indices [T, k]."""

    def __init__(self, prescribed: torch.Tensor | None):
        super().__init__()
        self.indices: list[torch.Tensor] = []
        """The indices of each call."""
        self._prescribed = prescribed

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return outputs
        if self._prescribed is not None:
            scores = args[0] if args else (kwargs or {})["input"]
            indices = outputs.indices.where(self._prescribed == FREE, self._prescribed)
            outputs = torch.return_types.topk((scores.gather(-1, indices), indices))
        self.indices.append(outputs.indices)
        return outputs
