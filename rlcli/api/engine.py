"""Engines: models under a backend, and the batch logic that all of them share.

There are four contracts. `HoldsWeights`: can take weights from others and be checkpointed;
`ForwardEngine`: also scores sequences; `TrainEngine`: also trains; `GenerationEngine`: writes
responses. An engine implements those it supports. The loss of a batch is a pure function that
returns a **sum** over the tokens of one micro-batch; the engine divides it by the weight summed
over all micro-batches and ranks. So loss, gradient and update do not depend on how the batch is
cut.

An engine gets all micro-batches of a step at once (`forward_backward_batch`), as pipeline schedules
and deferred reductions require. An engine without such a schedule builds on
`rlcli.api.engine_loop`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from rlcli.api.block_parts import BlockPart
from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.forked_rows import for_responses, in_rows
from rlcli.api.generation import GenerationEngine
from rlcli.api.key_meaning import SEQUENCES
from rlcli.api.loss_stats import Stats, on_host, read_loss, reduce_stats
from rlcli.api.micro_batches import Cut, MicroBatch, idle_micro_batch, rows_in_order, split_batch
from rlcli.api.operations import OperationCount
from rlcli.api.weight_blocks import WeightBlock

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LossFn = Callable[["ModelOutput", SequenceSample], "torch.Tensor | tuple[torch.Tensor, Stats]"]
"""(output, micro-batch) → loss summed over the micro-batch's tokens, alone or with stats. It runs
on the last pipeline stage only, and sees whole sequences on every tensor-parallel rank."""

LossWeightFn = Callable[[SequenceSample], "torch.Tensor | float"]
"""micro-batch → the weight of its loss, such as its number of trained tokens."""


class Hook(Protocol[T_co]):
    """A function of the output of a forward pass over a micro-batch."""

    def __call__(self, output: ModelOutput, micro_batch: SequenceSample, /) -> T_co: ...


class ModelOutput(Protocol):
    """The output of a forward pass, computed only on demand.

    For a packed micro-batch of N sequences and T tokens (`packed_input_ids`): `logprobs` and
    `entropy` are [T − N] float32: position t of a sequence belongs to its token t + 1. `values` is
    [T] float32 (models with a value head). `logits` is [T, vocab], materialised: for small models
    only; an engine that shards the vocabulary refuses. All carry gradients when the pass does.
    Logits are divided by `temperature` first. Log-probs and entropies of actions outside `actions`
    [T − N] bool (None: all are in it) are 0; a loss that reads only those of responses sets it
    first, and the head is not computed for prompts. `zero` is a scalar zero that is computed
    through the head, as a loss is, and so depends on the same parameters.
    """

    temperature: float
    actions: torch.Tensor | None

    @property
    def logprobs(self) -> torch.Tensor: ...
    @property
    def entropy(self) -> torch.Tensor: ...
    @property
    def values(self) -> torch.Tensor: ...
    @property
    def logits(self) -> torch.Tensor: ...
    @property
    def zero(self) -> torch.Tensor: ...


class GivesParameters(Protocol):
    """A source of parameters, whole or in blocks, one at a time: a rank's part of an engine, or
    what others send."""

    def parameter_blocks(self) -> Iterator[tuple[WeightBlock, torch.Tensor]]: ...


@dataclass(frozen=True)
class EngineState:
    """The state of an engine in a checkpoint: its live tensors by name, or copies of them. Loading
    fills them in place and then passes them back (`state_was_filled`)."""

    weights: Mapping[str, torch.Tensor | BlockPart]
    """Each once, even if tied, under the names that transformers gives them; a DTensor if ranks
    hold parts, or a `BlockPart` if these parts are not blocks of rows."""
    optimizer: Mapping[str, torch.Tensor | BlockPart] = field(default_factory=dict)
    """`<weight>/<moment>`; empty without an optimizer, or before its first step."""
    is_copy: bool = False
    """Whether the tensors are copies on the host that nothing else uses, for an engine whose own
    tensors have another form or are offloaded."""


class HoldsWeights(abc.ABC):
    """An engine whose weights can be read, updated and checkpointed,
    on its device or wherever it keeps them."""

    operations: OperationCount | None = None
    """Counts what its passes compute; None: it is not known."""

    @abc.abstractmethod
    def save_to_hf(self, tokenizer: Any, save_dir: str) -> None:
        """Write a folder that `transformers.from_pretrained` reads.
        Every rank of the role calls it."""

    @property
    def dp_size(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        """The device of the batches that it is given."""
        return torch.device("cpu")

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter once (even if tied) and whole, under the name that transformers gives it.

        Every rank of the role iterates over all of them; one is held at a time.
        """
        raise NotImplementedError(f"{type(self).__name__} does not give its parameters")

    def weight_blocks(self) -> Mapping[WeightBlock, Callable[[], torch.Tensor]] | None:
        """This rank's blocks of the parameters, always the same in the same order, and a function
        that reads each. None if there are no such blocks: parameters are then gathered one at a
        time (`whole_parameters`).

        All ranks that hold a block read it at the same time. The result may be live memory:
        do not write to it.
        """
        return None

    def parameter_blocks(self) -> Iterator[tuple[WeightBlock, torch.Tensor]]:
        """The parameters as this rank holds them."""
        blocks = self.weight_blocks()
        if blocks is not None:
            yield from ((block, read()) for block, read in blocks.items())
        else:
            yield from (
                (WeightBlock.whole(name, values.shape), values)
                for name, values in self.whole_parameters()
            )

    def take_parameters(self, source: GivesParameters, eta: float) -> None:
        """Move this engine's parameters towards those of `source`:
        mine ← eta · theirs + (1 − eta) · mine.

        Every rank of the role takes part. The source is an engine in the same layout, or parameters
        that others send: the blocks that this rank holds (`weight_blocks`), or more, in any order.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot take over parameters")

    def receive_parameters(self, source: GivesParameters, eta: float) -> Callable[[], None]:
        """Receive what `take_parameters` takes, while this engine generates with the weights that
        it has. The result, called while generation pauses, has it take them. An engine that cannot
        hold both receives them only then."""
        return partial(self.take_parameters, source, eta)

    def state(self, room_for_optimizer: bool = False) -> EngineState:
        """Everything that the next training step depends on except its batch and its number.

        `room_for_optimizer`: create the optimizer's tensors if there are none yet,
        so that loading can fill them.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be checkpointed")

    def state_was_filled(self, state: EngineState) -> None:  # noqa: B027 - most derive nothing
        """The tensors of `state`, which this engine returned, now hold new values: adopt them, and
        discard whatever was derived from the old ones. Every rank of the role calls it."""

    def save_description(self, tokenizer: Any, folder: str) -> None:
        """Write the files of a model folder other than the weights: configuration, generation
        settings, tokenizer."""
        raise NotImplementedError(f"{type(self).__name__} cannot be checkpointed")

    def offload(self) -> None:
        """Keep the weights, and the optimizer's state,
        in host memory until they are needed again."""
        raise NotImplementedError(f"{type(self).__name__} cannot be offloaded")


class ForwardEngine(HoldsWeights):
    """A model that scores sequences."""

    # -- to be implemented by an engine ------------------------------------------------------------

    @abc.abstractmethod
    def forward_batch(self, micro_batches: Sequence[MicroBatch], hook: Hook[T]) -> list[T]:
        """`hook(output, sample)` of every micro-batch that is not idle, in order.

        Every rank of the role gets the same number of micro-batches. On pipeline stages before the
        last, the list is empty.
        """

    def all_reduce(self, value: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """`value` reduced ("sum", "max" or "min") over the data-parallel ranks;
        the same on all of them."""
        return value

    def from_last_stage(self, value: torch.Tensor) -> torch.Tensor:
        """The last pipeline stage's `value`, on every stage;
        the `value` of other stages may have any shape."""
        return value

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the model's head."""
        return True

    def tokens_of(self, sample: SequenceSample) -> int:
        """How many tokens of memory a forward pass over the sequences of `sample` takes. An engine
        that computes common prefixes once counts them once; a group then stays together where it
        can be cut."""
        return sum(sample.flat_seqlens(SEQUENCES))

    def train(self, mode: bool = True) -> None:
        """Set training mode."""

    def eval(self) -> None:
        """Set evaluation mode."""
        self.train(False)

    # -- batches -----------------------------------------------------------------------------------

    @torch.no_grad()
    def eval_batch(
        self,
        input_: SequenceSample,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        mb_spec: MicroBatchSpec | None = None,
        cut: Cut = "sample",
    ) -> dict[str, float]:
        """The loss and stats that `train_batch` would report, without gradients."""
        micro_batches = self._micro_batches(input_, mb_spec, cut)
        weight = _total_weight(micro_batches, loss_weight_fn)
        stats_of = for_responses(loss_fn)
        sums = self.forward_batch(
            _in_rows(micro_batches), lambda output, sample: read_loss(stats_of(output, sample))[1]
        )
        return reduce_stats(sums, weight, self._reduce)

    @torch.no_grad()
    def forward(
        self,
        input_: SequenceSample,
        mb_spec: MicroBatchSpec | None = None,
        post_hook: Hook[torch.Tensor] | None = None,
        output_seqlens: Sequence[Sequence[int]] | None = None,
        cut: Cut = "sample",
    ) -> torch.Tensor:
        """`post_hook(output, micro_batch)` of every micro-batch (default: its logits),
        in the order of `input_`.

        `output_seqlens` gives the number of rows of each sequence of each sample in the result; the
        default is that of `packed_input_ids`. All ranks of a replica return the same.
        """
        seqlens = output_seqlens if output_seqlens is not None else input_.seqlens[SEQUENCES]
        lengths = (
            [sum(group) for group in seqlens]
            if cut == "sample"
            else [n for group in seqlens for n in group]
        )
        micro_batches = self._micro_batches(input_, mb_spec, cut)
        rows = self.forward_batch(_in_rows(micro_batches), for_responses(post_hook or _logits))
        if not lengths:
            return torch.zeros(0, device=self.device)
        mine = rows_in_order(rows, micro_batches, lengths) if self.is_last_stage else torch.zeros(0)
        return self.from_last_stage(mine)

    def _micro_batches(
        self, input_: SequenceSample, mb_spec: MicroBatchSpec | None, cut: Cut
    ) -> list[MicroBatch]:
        """Micro-batches under the token cap, the same number on every rank:
        a rank's last ones may be idle."""
        micro_batches = split_batch(
            input_, mb_spec, cut, lambda sample: self.tokens_of(in_rows(sample))
        )
        count = int(self.all_reduce(torch.tensor(len(micro_batches), device=self.device), "max"))
        return micro_batches + [idle_micro_batch(self.device)] * (count - len(micro_batches))

    def _reduce(self, value: torch.Tensor, op: str) -> torch.Tensor:
        return self.from_last_stage(self.all_reduce(value.to(self.device), op))


class TrainEngine(ForwardEngine):
    """An engine that also trains; `train_batch` is implemented here once,
    on top of each engine's own methods."""

    training_step: int = 0
    """Number of the role's training step, from 0; it gives the learning rate. The runtime sets it
    before each step."""

    @abc.abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Discard all gradients, including those of an abandoned step, and reset the counters of
        the engine's library."""

    @abc.abstractmethod
    def forward_backward_batch(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, divisor: torch.Tensor
    ) -> list[Stats]:
        """Accumulate the gradient of the sum of all losses divided by `divisor`, a scalar; returns
        the stats of each loss (`rlcli.api.loss_stats.read_loss`).

        Gradients are summed over ranks and micro-batches: an engine undoes any averaging by its
        library. Every rank of the role gets the same number of micro-batches; the loss of an idle
        one is `output.zero`. On pipeline stages before the last, the list is empty.
        """

    @abc.abstractmethod
    def lr_scheduler_step(self, version_steps: int) -> float:
        """Set and return the learning rate of training step `version_steps` (from 0)."""

    @abc.abstractmethod
    def optimizer_step(self) -> float:
        """Clip and apply the gradients; returns their norm before clipping, the same on all ranks.

        If the norm is not finite, weights, moments and the library's counters stay as they were,
        on every rank.
        """

    def train_batch(
        self,
        input_: SequenceSample,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        token_normalize_scope: str = "global",
        mb_spec: MicroBatchSpec | None = None,
        version_steps: int | None = None,
        step_if: Callable[[Mapping[str, float]], bool] | None = None,
        cut: Cut = "sample",
    ) -> dict[str, float]:
        """One optimizer step on `input_`, however many micro-batches and ranks it is spread over.

        `loss_fn(output, micro_batch)` returns a sum; `loss_weight_fn(micro_batch)` returns its
        weight. With `token_normalize_scope="global"`, the sum is divided by the weight over all
        micro-batches and ranks; with "dp", each rank divides by its own weight and the results are
        averaged. `step_if` sees the reduced stats before the update and may reject it: weights,
        optimizer state and schedule then stay as they are. `version_steps` is the number of the
        training step, by default `training_step`. `cut="sequence"` allows a sample's group to be
        spread over micro-batches, for a loss that does not compare sequences.

        Returns `loss`, `grad_norm`, `lr`, `loss_weight`, `update_skipped` and the loss function's
        stats. If the total weight is zero, there is nothing to learn: the update is skipped and
        counted in `update_skipped`.
        """
        micro_batches = self._micro_batches(input_, mb_spec, cut)
        weight = _total_weight(micro_batches, loss_weight_fn)
        divisor, total = self._normalizer(weight, token_normalize_scope)
        self.optimizer_zero_grad()
        if total == 0:
            return {"loss": 0.0, "grad_norm": 0.0, "loss_weight": 0.0, "update_skipped": 1.0}
        sums = self.forward_backward_batch(_in_rows(micro_batches), for_responses(loss_fn), divisor)
        stats = reduce_stats(sums, weight, self._reduce) | {"loss_weight": total}
        if step_if is not None and not step_if(stats):
            self.optimizer_zero_grad()
            return stats | {"update_skipped": 1.0}
        lr = self.lr_scheduler_step(self.training_step if version_steps is None else version_steps)
        grad_norm = self.optimizer_step()
        return stats | {
            "grad_norm": grad_norm,
            "lr": lr,
            "update_skipped": float(not math.isfinite(grad_norm)),
        }

    def _normalizer(self, weight: torch.Tensor, scope: str) -> tuple[torch.Tensor, float]:
        total = self.all_reduce(weight.to(self.device))
        if scope == "global":
            return total, float(total)
        if scope == "dp":
            return weight.to(self.device).clamp(
                min=torch.finfo(torch.float32).tiny
            ) * self.dp_size, float(total)
        raise ValueError(f"token_normalize_scope is {scope!r}; it must be 'global' or 'dp'")


class PipelinableEngine(TrainEngine, GenerationEngine):
    """An engine that scores, trains and generates.

    A method that a subclass lacks raises NotImplementedError when it is called, so that an engine
    can be written one method at a time; `rlcli test backend` requires everything that its backend
    declares.
    """


def _missing(name: str) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no {name}")

    return method


_engine: Any = PipelinableEngine
for _name in sorted(_engine.__abstractmethods__):
    setattr(_engine, _name, _missing(_name))
abc.update_abstractmethods(_engine)


def _logits(output: ModelOutput, micro_batch: SequenceSample) -> torch.Tensor:
    return output.logits


def _in_rows(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    return [
        replace(micro_batch, sample=in_rows(micro_batch.sample)) for micro_batch in micro_batches
    ]


def _total_weight(
    micro_batches: Sequence[MicroBatch], loss_weight_fn: LossWeightFn
) -> torch.Tensor:
    weights = [
        loss_weight_fn(micro_batch.sample)
        for micro_batch in micro_batches
        if not micro_batch.is_idle
    ]
    return on_host(weights).sum()
