"""Engines: models under a backend, and the batch logic that all of them share.

The loss of a batch is a pure function that returns a **sum** over the tokens of one micro-batch; the engine divides it
by the weight summed over all micro-batches and all ranks. So loss, gradient and update do not depend on how the batch
was cut.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from rlcli.api.config import GenerationHyperparameters, MicroBatchSpec
from rlcli.api.data import SequenceSample

T = TypeVar("T")

Stats = Mapping[str, "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]
"""Numbers that a loss reports: a sum (divided by the loss weight) or a pair (sum, count) with its own count."""

LossFn = Callable[["ModelOutput", SequenceSample], "torch.Tensor | tuple[torch.Tensor, Stats]"]
"""(output, micro-batch) → loss summed over the micro-batch's tokens, alone or with stats."""


class ModelOutput(Protocol):
    """What a forward pass offers. Everything is computed when it is asked for, never before.

    For a packed micro-batch of N sequences and T tokens (`packed_input_ids`):
    `logprobs` and `entropy` are [T − N] float32: position t of a sequence speaks of its token t + 1.
    `values` is [T] float32 (models with a value head). `logits` is [T, vocab], materialised: ask only in small
    models. All carry gradients when the pass does. Logits are divided by `temperature` first.
    """

    temperature: float

    @property
    def logprobs(self) -> torch.Tensor: ...
    @property
    def entropy(self) -> torch.Tensor: ...
    @property
    def values(self) -> torch.Tensor: ...
    @property
    def logits(self) -> torch.Tensor: ...


@dataclass
class GeneratedResponses:
    """Responses in prompt-major order: prompt 0's group, then prompt 1's, …; N = prompts · responses_per_prompt."""

    tokens: list[torch.Tensor]
    """N tensors [R_i] int64: the response tokens, the end-of-sequence token included when it was sampled."""
    logprobs: list[torch.Tensor]
    """N tensors [R_i] float32: log-prob of each token under the temperature-divided distribution."""
    ended: torch.Tensor
    """[N] bool: the response ended by itself (False: it was cut off at max_new_tokens)."""


@dataclass(frozen=True)
class EngineState:
    """What a checkpoint holds of an engine: its live tensors by name. Loading fills them in place."""

    weights: Mapping[str, torch.Tensor]
    """Each once, tied ones too, under the names that transformers gives them; a DTensor where ranks hold parts."""
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """`<weight>/<moment>`; empty without an optimizer, or before its first step."""


class PipelinableEngine(abc.ABC):
    """A model under a backend. Backends supply the primitives; the batch logic is written once, here."""

    # -- primitives ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def forward_micro_batch(self, micro_batch: SequenceSample, then: Callable[[ModelOutput], T]) -> T:
        """Run the model on `packed_input_ids` and return `then(output)`; gradients flow if grad mode is on."""

    @abc.abstractmethod
    def idle_micro_batch(self) -> torch.Tensor:
        """A scalar zero that depends on all parameters, computed by the same collectives as a real forward pass.

        Ranks that have fewer micro-batches than others run it to stay in step.
        """

    @abc.abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients; across ranks they are summed, not averaged."""

    @abc.abstractmethod
    def optimizer_step(self) -> float:
        """Clip and apply the gradients; returns their norm before clipping.

        If the norm is not finite nothing is applied, on any rank.
        """

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None: ...

    @abc.abstractmethod
    def lr_scheduler_step(self, version_steps: int) -> float:
        """Set and return the learning rate of training step `version_steps` (from 0)."""

    @abc.abstractmethod
    def save_to_hf(self, tokenizer: Any, save_dir: str) -> None:
        """Write a folder that `transformers.from_pretrained` reads. Every rank of the role calls it."""

    def generate(
        self,
        input_: SequenceSample,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
        seeds: Sequence[int],
    ) -> GeneratedResponses:
        """Sample responses to `packed_prompts`; `seeds` has one seed per response, in prompt-major order.

        A response depends on its prompt, the weights and its seed alone: never on the rest of the batch.
        """
        raise NotImplementedError(f"{type(self).__name__} does not generate")

    def all_reduce(self, value: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """`value` reduced ("sum", "max" or "min") over the data-parallel ranks; the same on all of them."""
        return value

    def take_parameters(self, source: PipelinableEngine, eta: float) -> None:
        """Move this engine's parameters towards those of `source`: mine ← eta · theirs + (1 − eta) · mine.

        Both engines live on the same ranks, and every rank takes part.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot take over parameters")

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        """Everything that the next training step depends on beside its batch and its number.

        `room_for_optimizer`: make the optimizer's tensors where there are none yet, to be filled by loading.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be checkpointed")

    def state_was_filled(self) -> None:  # noqa: B027 - most engines derive nothing from their weights
        """New values stand in the tensors of `state()`: forget what was derived from the old ones."""

    def save_description(self, tokenizer: Any, folder: str) -> None:
        """Write what a model's folder holds beside its weights: configuration, generation settings, tokenizer."""
        raise NotImplementedError(f"{type(self).__name__} cannot be checkpointed")

    def offload(self) -> None:
        """Keep the weights in host memory until they are needed again."""
        raise NotImplementedError(f"{type(self).__name__} cannot be offloaded")

    @property
    def dp_size(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def train(self, mode: bool = True) -> None:  # noqa: B027 - dropout is off by default, so most engines do nothing
        """Training mode."""

    def eval(self) -> None:
        """Evaluation mode."""
        self.train(False)

    # -- batches ---------------------------------------------------------------------------------------------

    def train_batch(
        self,
        input_: SequenceSample,
        loss_fn: LossFn,
        loss_weight_fn: Callable[[SequenceSample], torch.Tensor | float],
        token_normalize_scope: str = "global",
        mb_spec: MicroBatchSpec | None = None,
        version_steps: int = 0,
        step_if: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on `input_`, whatever number of micro-batches and ranks it is spread over.

        `loss_fn(output, micro_batch)` returns a sum; `loss_weight_fn(micro_batch)` its weight. With
        `token_normalize_scope="global"` the sum is divided by the weight over all micro-batches and ranks, with
        "dp" each rank divides by its own and the ranks are averaged. `step_if` sees the reduced stats before the
        update and may refuse it: then weights, optimizer state and schedule stay as they are.

        Returns `loss`, `grad_norm`, `lr`, `loss_weight`, `update_skipped` and the loss function's stats. A total
        weight of zero leaves nothing to learn from: the update is skipped and counted in `update_skipped`.
        """
        micro_batches = self._split_in_step(input_, mb_spec)
        weight = _total_weight(micro_batches, loss_weight_fn)
        divisor, total = self._normalizer(weight, token_normalize_scope)
        self.optimizer_zero_grad()
        if total == 0:
            return {"loss": 0.0, "grad_norm": 0.0, "loss_weight": 0.0, "update_skipped": 1.0}
        sums = self._forward_backward(micro_batches, loss_fn, divisor)
        stats = self._reduce_stats(sums, weight) | {"loss_weight": total}
        if step_if is not None and not step_if(stats):
            self.optimizer_zero_grad()
            return stats | {"update_skipped": 1.0}
        lr = self.lr_scheduler_step(version_steps)
        grad_norm = self.optimizer_step()
        return stats | {"grad_norm": grad_norm, "lr": lr, "update_skipped": float(not math.isfinite(grad_norm))}

    @torch.no_grad()
    def eval_batch(
        self,
        input_: SequenceSample,
        loss_fn: LossFn,
        loss_weight_fn: Callable[[SequenceSample], torch.Tensor | float],
        mb_spec: MicroBatchSpec | None = None,
    ) -> dict[str, float]:
        """The loss and stats that `train_batch` would report, without gradients."""
        micro_batches = self._split_in_step(input_, mb_spec)
        weight = _total_weight(micro_batches, loss_weight_fn)
        sums = [self._loss_sums(mb, loss_fn)[1] for mb in micro_batches]
        return self._reduce_stats(sums, weight)

    @torch.no_grad()
    def forward(
        self,
        input_: SequenceSample,
        mb_spec: MicroBatchSpec | None = None,
        post_hook: Callable[[ModelOutput, SequenceSample], torch.Tensor] | None = None,
        output_seqlens: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """`post_hook(output, micro_batch)` of every micro-batch (default: its logits), in the order of `input_`.

        `output_seqlens` gives the rows that each sequence of each sample has in the result; by default those of
        `packed_input_ids`.
        """
        seqlens = output_seqlens if output_seqlens is not None else input_.seqlens["packed_input_ids"]
        hook = post_hook or (lambda output, _: output.logits)
        micro_batches, order = self._split_with_order(input_, mb_spec)
        pieces: dict[int, torch.Tensor] = {}
        for micro_batch, indices in zip(micro_batches, order, strict=True):
            if micro_batch is None:
                self.idle_micro_batch()
                continue
            rows = self.forward_micro_batch(micro_batch, lambda output, mb=micro_batch: hook(output, mb))  # type: ignore[misc]
            lengths = [sum(seqlens[i]) for i in indices]
            pieces.update(zip(indices, rows.split(lengths), strict=True))
        if not pieces:
            return torch.zeros(0, device=self.device)
        return torch.cat([pieces[i] for i in range(input_.bs)])

    # -- inside train_batch ----------------------------------------------------------------------------------

    def _split_in_step(self, input_: SequenceSample, mb_spec: MicroBatchSpec | None) -> list[SequenceSample | None]:
        return self._split_with_order(input_, mb_spec)[0]

    def _split_with_order(
        self, input_: SequenceSample, mb_spec: MicroBatchSpec | None
    ) -> tuple[list[SequenceSample | None], list[list[int]]]:
        """Micro-batches under the token cap, as many on every rank; None where this rank has none to offer."""
        spec = mb_spec or MicroBatchSpec()
        batches: list[SequenceSample] = []
        order: list[list[int]] = []
        if input_.bs:
            wanted = MicroBatchSpec(n_mbs=min(spec.n_mbs, input_.bs), max_tokens_per_mb=spec.max_tokens_per_mb)
            batches, order = input_.split_to_micro_batches(wanted, key="packed_input_ids")
        count = int(self.all_reduce(torch.tensor(len(batches), device=self.device), "max"))
        idle = count - len(batches)
        return [*batches, *[None] * idle], [*order, *[[] for _ in range(idle)]]

    def _normalizer(self, weight: torch.Tensor, scope: str) -> tuple[torch.Tensor, float]:
        total = self.all_reduce(weight.to(self.device))
        if scope == "global":
            return total, float(total)
        if scope == "dp":
            return weight.to(self.device).clamp(min=torch.finfo(torch.float32).tiny) * self.dp_size, float(total)
        raise ValueError(f"token_normalize_scope is {scope!r}; it must be 'global' or 'dp'")

    def _forward_backward(
        self, micro_batches: Sequence[SequenceSample | None], loss_fn: LossFn, divisor: torch.Tensor
    ) -> list[dict[str, Any]]:
        """Forward and backward of every micro-batch; returns the sums each one reported."""
        collected = []
        for micro_batch in micro_batches:
            loss, sums = self._loss_sums(micro_batch, loss_fn)
            self.backward(loss / divisor.to(loss.dtype))
            collected.append(sums)
        return collected

    def _loss_sums(self, micro_batch: SequenceSample | None, loss_fn: LossFn) -> tuple[torch.Tensor, dict[str, Any]]:
        if micro_batch is None:
            return self.idle_micro_batch(), {}
        result = self.forward_micro_batch(micro_batch, lambda output: loss_fn(output, micro_batch))
        loss, stats = result if isinstance(result, tuple) else (result, {})
        return loss, {"loss": loss.detach(), **stats}

    def _reduce_stats(self, collected: Sequence[Mapping[str, Any]], weight: torch.Tensor) -> dict[str, float]:
        """Sum over micro-batches and ranks, then divide each stat by its own count or by the loss weight.

        All ranks return the same, ranks without a micro-batch included: `step_if` must decide alike everywhere.
        """
        own_count = self._agree_on_names(collected)
        slots = {name: slot for slot, name in enumerate(own_count)}
        table = torch.zeros((len(slots) + 1, 2), dtype=torch.float64)
        table[-1, 0] = weight
        for sums in collected:
            for name, value in sums.items():
                total, count = value if isinstance(value, tuple) else (value, None)
                table[slots[name], 0] += _as_scalar(total)
                if count is not None:
                    table[slots[name], 1] += _as_scalar(count)
        table = self.all_reduce(table.to(self.device)).cpu()
        counts = {name: table[slot, 1] if own_count[name] else table[-1, 0] for name, slot in slots.items()}
        return {name: float(table[slot, 0] / counts[name]) if counts[name] else 0.0 for name, slot in slots.items()}

    def _agree_on_names(self, collected: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
        """Name of each stat → whether it brings its own count, the same on all ranks.

        The loss function fixes the names, but a rank that had no micro-batch has not run it: it learns them here.
        """
        known = {name: isinstance(value, tuple) for sums in collected for name, value in sums.items()}
        if len(known) > _MAX_STATS or any(len(name.encode()) > _NAME_BYTES for name in known):
            raise ValueError(
                f"a loss may report {_MAX_STATS} stats with names of {_NAME_BYTES} bytes, not {sorted(known)}"
            )
        table = torch.zeros((_MAX_STATS, 1 + _NAME_BYTES), dtype=torch.int64)
        for row, name in zip(table, sorted(known), strict=False):
            encoded = name.encode()
            row[0] = 1 + known[name]
            row[1 : 1 + len(encoded)] = torch.tensor(list(encoded))
        rows = self.all_reduce(table.to(self.device), "max").cpu().tolist()
        return {bytes(byte for byte in row[1:] if byte).decode(): row[0] == 2 for row in rows if row[0]}


_MAX_STATS = 63
_NAME_BYTES = 64


def _as_scalar(value: torch.Tensor | float) -> torch.Tensor:
    return torch.as_tensor(value).detach().to("cpu", torch.float64)


def _total_weight(
    micro_batches: Sequence[SequenceSample | None], loss_weight_fn: Callable[[SequenceSample], torch.Tensor | float]
) -> torch.Tensor:
    weights = [_as_scalar(loss_weight_fn(mb)) for mb in micro_batches if mb is not None]
    return torch.stack(weights).sum() if weights else torch.zeros((), dtype=torch.float64)
