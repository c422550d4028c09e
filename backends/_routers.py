"""Losses of the routers in a mixture of experts, and how evenly they use their experts.

Let x[l, t, e] be the logit of expert e for token t in layer l, p = softmax over e, and let each
token be sent to k of E experts. All N tokens of an optimizer step count, those of prompts too: over
all micro-batches, data-parallel and context-parallel ranks, without the padding of the latter. With
L layers that have experts,

    C[l, e] = number of tokens sent to e,   f[l, e] = C[l, e] / N
    P[l, e] = sum over t of p[l, t, e] / N
    auxiliary loss = mean over l of  E * sum over e of  f[l, e] * P[l, e]
    z-loss         = mean over l and t of  logsumexp over e of x[l, t, e], squared

The first is that of Switch Transformers (https://arxiv.org/abs/2101.03961, eq. 4 to 6; k times as
large for k experts per token, like that of transformers), the second that of ST-MoE
(https://arxiv.org/abs/2202.08906, eq. 5). Balancing a whole step instead of each micro-batch lets
experts specialise (https://arxiv.org/abs/2501.11873). transformers' `load_balancing_loss_func` adds
up the counts of all layers before it multiplies, so that layers can hide each other's imbalance;
for a single layer it is the same loss.

The z-loss is a sum over tokens, divided by L * N. The auxiliary loss is not, but C has no gradient:

    gradient of the auxiliary loss = E / (L * N**2) * sum over l, e, t of C[l, e] * grad p[l, t, e]

is a sum over tokens once C and N are those of the whole step. They are counted before the first
backward pass: in the forward pass that the first micro-batch needs anyway, and in additional ones
without gradients for the others. So gradients are the same for any micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlcli.api.loss_stats import Stats
from rlcli.api.micro_batches import MicroBatch
from rlcli.errors import ModelError

from ._router_modules import routers_in

if TYPE_CHECKING:
    from ._transformers import Packing


class Observed:
    """A pass of a model with routers, over this rank's slots of a pack."""

    packing: Packing

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        """[S, E] of each layer."""
        self.chosen: list[torch.Tensor] = []
        """[S, k] of each layer: the experts that tokens are sent to, chosen or prescribed."""

    def of_tokens(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits [L, T, E] of the tokens that count, in float32, and how many of them are sent
        to each expert, [L, E]. Padding does not count, nor does the token of an idle micro-batch.
        """
        logits = torch.stack([layer.float() for layer in self.logits])
        chosen = torch.stack(self.chosen)
        counting = ~self.packing.is_padding
        if micro_batch.is_idle:
            counting = torch.zeros_like(counting)
        logits, chosen = logits[:, counting], chosen[:, counting]
        counts = logits.new_zeros((len(logits), logits.shape[2]), dtype=torch.float64)
        ones = torch.ones_like(chosen, dtype=torch.float64)
        return logits, counts.scatter_add_(1, chosen.flatten(1), ones.flatten(1))


class Routers:
    """The routers of a transformers model: what they are trained for, and their logits."""

    def __init__(self, lm: Any, role: str, aux_coef: float, z_coef: float):
        """Raises ModelError for a model without routers that can be balanced."""
        self.aux_coef = aux_coef
        self.z_coef = z_coef
        self._role = role
        self._observed: Observed | None = None
        self._are_logits: bool | None = None
        self._hint = f"leave out router_… in models.{role}.backend.args"
        modules, self._index = routers_in(lm, role, "balanced", self._hint)
        self.per_token: int = lm.config.get_text_config().num_experts_per_tok
        lm.base_model.register_forward_pre_hook(self._observe_pass, with_kwargs=True)
        for module in modules.values():
            module.register_forward_hook(self._observe)

    def step(self, tokens: torch.Tensor) -> RoutedStep:
        """An optimizer step with `tokens` tokens, over all ranks."""
        return RoutedStep(self, tokens)

    @contextmanager
    def observed(self) -> Iterator[Observed]:
        """The pass within this context. Layers that are recomputed by a backward pass are outside
        it."""
        self._observed = Observed()
        try:
            yield self._observed
        finally:
            self._observed = None

    def _observe_pass(self, model: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        if self._observed is not None:
            self._observed.packing = named["packing"]

    def _observe(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._observed is None:
            return
        logits = outputs[self._index].flatten(0, -2)
        if self._are_logits is None:
            self._are_logits = not _are_probabilities(logits)
        if not self._are_logits:
            raise ModelError(
                f"the routers of role {self._role} do not return logits",
                hint="install a newer version of transformers",
            )
        self._observed.logits.append(logits)
        self._observed.chosen.append(self._choice_among(outputs))

    def _choice_among(self, outputs: Any) -> torch.Tensor:
        """[S, k] the numbers of the experts, which no family's router returns without: they need
        not have the largest logits, where a bias corrects what is chosen."""
        numbers = [each for each in outputs if not each.is_floating_point()]
        if len(numbers) != 1:
            raise ModelError(
                f"the routers of role {self._role} do not return the experts that they choose",
                hint=self._hint,
            )
        return numbers[0].reshape(-1, self.per_token)


def _are_probabilities(logits: torch.Tensor) -> bool:
    """Whether a router returns its softmax, in float32, in place of logits, as in transformers
    5.3."""
    return bool((logits >= 0).all()) and bool(((logits.sum(-1) - 1).abs() < 1e-5).all())


class RoutedStep:
    """What the routers do in one optimizer step; all tensors are sums over tokens."""

    def __init__(self, routers: Any, tokens: torch.Tensor):
        self._routers = routers
        self.tokens = tokens
        """Tokens of the step, on all ranks."""
        self.counted: list[torch.Tensor] = []
        """[L, E] the tokens that choose each expert, in each micro-batch that was counted ahead."""
        self.load: torch.Tensor | None = None
        """[L, E] the same for the whole step, on all ranks."""
        self.trained: list[torch.Tensor] = []
        """[L, 2 E + 2] for each micro-batch of this rank that is trained on: tokens that choose
        each expert, probabilities, squares of logsumexp, entropies."""

    def loss(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The contribution of a micro-batch, given its logits [L, T, E] and the number of its
        tokens that are routed to each expert [L, E], to the router losses of the step; a scalar."""
        probabilities = logits.softmax(-1)
        squares = logits.logsumexp(-1, keepdim=True).square().sum(1)
        with torch.no_grad():
            entropies = torch.special.entr(probabilities).sum((1, 2))[:, None]
            sums = (counts, probabilities.sum(1), squares, entropies)
            self.trained.append(torch.cat([quantity.double() for quantity in sums], -1))
        total = self._routers.z_coef * squares.mean(0).sum() / self.tokens
        if self.load is not None:
            factors = self._routers.aux_coef * balance_factors(self.load, self.tokens)
            total = total + (factors.to(probabilities.dtype) * probabilities.sum(1)).sum()
        return total.to(logits.dtype)

    def stats(self, sums: torch.Tensor) -> Stats:
        """The reported numbers of a step, from the sums over its micro-batches on all ranks: values
        of the whole step, the same on every rank that reports any."""
        experts = (sums.shape[-1] - 2) // 2
        counts, probabilities, squares, entropies = sums.split([experts, experts, 1, 1], -1)
        shares = counts / counts.mean(-1, keepdim=True)
        choices = self._routers.per_token * self.tokens * len(sums)
        values = {
            "router_aux_loss": (balance_factors(counts, self.tokens) * probabilities).sum(),
            "router_z_loss": squares.mean() / self.tokens,
            "router_entropy": entropies.mean() / self.tokens,
            "router_load_max": shares.max(),
            "router_load_min": shares.min(),
            "router_dropped": 1 - counts.sum() / choices,
        }
        return {name: (value, torch.ones(())) for name, value in values.items()}


def balance_factors(load: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[L, E] the derivatives of the auxiliary loss by the probabilities of any token."""
    layers, experts = load.shape
    return load * experts / (layers * tokens.square())
