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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rlcli.api.engine import LossFn
from rlcli.api.engine_loop import TrainLoop
from rlcli.api.key_meaning import SEQUENCES
from rlcli.api.loss_stats import Stats
from rlcli.api.micro_batches import MicroBatch
from rlcli.errors import ModelError

from ._router_modules import routers_in
from ._routing_replay import FREE, routes_of
from ._settings import TransformersTraining

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

    @classmethod
    def of(cls, lm: Any, role: str, settings: TransformersTraining) -> Routers | None:
        """None if the settings ask for nothing. Raises ModelError for a model without routers that
        can be balanced."""
        coefficients = (settings.router_aux_loss_coef, settings.router_z_loss_coef)
        if coefficients == (None, None):
            return None
        aux_coef, z_coef = (coefficient or 0.0 for coefficient in coefficients)
        return cls(lm, role, aux_coef, z_coef)

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
        """Of the step, on all ranks."""
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
        """What is reported of a step, from the sums over its micro-batches on all ranks: values of
        the whole step, the same on every rank that reports any."""
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


class RoutedTraining(TrainLoop):
    """Training of a transformers model, with the losses of its routers if it has `routers`."""

    routers: Routers | None = None
    _routed: RoutedStep

    def forward_backward_batch(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, divisor: torch.Tensor
    ) -> list[Stats]:
        if self.routers is None:
            return super().forward_backward_batch(micro_batches, loss_fn, divisor)
        tokens = torch.tensor(sum(map(_length, micro_batches)), dtype=torch.float64)
        step = RoutedStep(self.routers, self.all_reduce(tokens.to(self.device)))
        if self.routers.aux_coef:
            with torch.no_grad():
                for micro_batch in micro_batches[1:]:
                    logits, routes = self._pass_over(micro_batch).of_tokens(micro_batch)
                    step.counted.append(self.routers.counts(logits, routes))
        self._routed = step
        stats = super().forward_backward_batch(micro_batches, loss_fn, divisor)
        sums = self._over_all_tokens(torch.stack(step.trained).sum(0))
        has_work = any(not micro_batch.is_idle for micro_batch in micro_batches)
        return [*stats, step.stats(sums)] if has_work else stats

    def loss_of(
        self, micro_batch: MicroBatch, loss_fn: LossFn, divisor: torch.Tensor
    ) -> tuple[torch.Tensor, Stats]:
        if self.routers is None:
            return super().loss_of(micro_batch, loss_fn, divisor)
        with self.routers.observed() as observed:
            loss, stats = super().loss_of(micro_batch, loss_fn, divisor)
        step, (logits, routes) = self._routed, observed.of_tokens(micro_batch)
        counts = self.routers.counts(logits.detach(), routes)
        if self.routers.aux_coef and step.load is None:
            step.load = self._over_all_tokens(torch.stack([counts, *step.counted]).sum(0))
        return loss + step.loss(logits, counts), stats

    def _pass_over(self, micro_batch: MicroBatch) -> Observed:
        """A forward pass of its own, without the head."""
        assert self.routers is not None
        with self.routers.observed() as observed:
            self.forward_micro_batch(micro_batch.sample, lambda output: None)
        return observed

    def _over_all_tokens(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over the tokens of a rank, added up over all ranks that have others."""
        total = self.all_reduce(sums)
        if self._context_group is not None:
            total = total.clone()
            dist.all_reduce(total, group=self._context_group)
        return total

    @property
    def _context_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the tokens of a micro-batch; None if there is only this one."""
        return None


def _length(micro_batch: MicroBatch) -> int:
    """Tokens that count."""
    lengths = () if micro_batch.is_idle else micro_batch.sample.flat_seqlens(SEQUENCES)
    return sum(lengths)
