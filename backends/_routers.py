"""Losses of the routers in a mixture of experts, and how evenly they use their experts.

Let x[l, t, e] be the logit of expert e for token t in layer l, p = softmax over e, and let each
token choose k of E experts. All N tokens of an optimizer step count, those of prompts too: over all
micro-batches, data-parallel and context-parallel ranks, without the padding of the latter. With L
layers that have experts,

    C[l, e] = number of tokens that choose e,   f[l, e] = C[l, e] / N
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
from ._routing_replay import FREE, routes_of

if TYPE_CHECKING:
    from ._transformers import Packing


class Observed:
    """A pass of a model with routers, over this rank's slots of a pack."""

    packing: Packing

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        """[S, E] of each layer."""

    def of_tokens(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits [L, T, E] of the tokens that count, in float32, and the experts [L, T, k] that
        the micro-batch prescribes for them, if it does. Padding does not count, nor does the token
        of an idle micro-batch."""
        logits = torch.stack([layer.float() for layer in self.logits])
        if micro_batch.is_idle:
            return logits[:, :0], None
        counting = ~self.packing.is_padding
        routes = routes_of(micro_batch.sample)
        if routes is not None:
            routes = self.packing.mine(routes.to(logits.device))[counting].transpose(0, 1)
        return logits[:, counting], routes


class Routers:
    """The routers of a transformers model: what they are trained for, and their logits."""

    def __init__(self, lm: Any, role: str, aux_coef: float, z_coef: float):
        """Raises ModelError for a model without routers that can be balanced."""
        self.aux_coef = aux_coef
        self.z_coef = z_coef
        self._role = role
        self._observed: Observed | None = None
        self._are_logits: bool | None = None
        hint = f"leave out router_… in models.{role}.backend.args"
        modules, self._index = routers_in(lm, role, "balanced", hint)
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

    def counts(self, logits: torch.Tensor, routes: torch.Tensor | None) -> torch.Tensor:
        """[L, E] the number of tokens that are routed to each expert: those that logits [L, T, E]
        choose, except where others [L, T, k] are prescribed."""
        chosen = logits.softmax(-1).topk(self.per_token, -1).indices
        if routes is not None:
            chosen = chosen.where(routes == FREE, routes)
        counts = logits.new_zeros((logits.shape[0], logits.shape[2]), dtype=torch.float64)
        ones = torch.ones_like(chosen, dtype=torch.float64)
        return counts.scatter_add_(1, chosen.flatten(1), ones.flatten(1))

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
