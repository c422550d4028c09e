"""Where losses of routers (`_routers`) enter a training step. Without them nothing of a mixture of
experts is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlcli.api.engine import LossFn
from rlcli.api.engine_loop import TrainLoop
from rlcli.api.key_meaning import SEQUENCES
from rlcli.api.loss_stats import Stats
from rlcli.api.micro_batches import MicroBatch

from ._settings import RouterLosses

if TYPE_CHECKING:
    from ._routers import Observed, RoutedStep, Routers


def routers_of(lm: Any, role: str, settings: RouterLosses) -> Routers | None:
    """None if the settings ask for no losses. Raises ModelError for a model without routers that
    can be balanced."""
    coefficients = (settings.router_aux_loss_coef, settings.router_z_loss_coef)
    if coefficients == (None, None):
        return None
    from ._routers import Routers

    aux_coef, z_coef = (coefficient or 0.0 for coefficient in coefficients)
    return Routers(lm, role, aux_coef, z_coef)


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
        step = self.routers.step(self.all_reduce(tokens.to(self.device)))
        if self.routers.aux_coef:
            with torch.no_grad():
                for micro_batch in micro_batches[1:]:
                    _, counts = self._pass_over(micro_batch).of_tokens(micro_batch)
                    step.counted.append(counts)
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
        step, (logits, counts) = self._routed, observed.of_tokens(micro_batch)
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
