"""Training steps of an interface over the watched tiny engine,
and the differences between two of them."""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import pytest
import torch

from rlcli.api.component import module_name
from rlcli.api.config import MicroBatchSpec, ModelInterfaceAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import largest_number
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import REFERENCE, SAMPLED_LOGPROBS
from rlcli.api.metrics import Metrics, declared_metrics
from rlcli.api.model import Model, call_interface
from rlcli.registry import Argument, make_interface, signature
from rlcli.testing.arguments import Changes
from rlcli.testing.batches import KEYS, PAIRS, DigitTokenizer, Lengths, make_batch
from rlcli.testing.class_source import source_of
from rlcli.testing.contract import (
    Contract,
    Violation,
    place_of,
    skip_unless,
    skip_without_arguments,
)
from rlcli.testing.interface.actions import action_seqlens
from rlcli.testing.interface.recording_engine import WatchedEngine
from rlcli.testing.tiny_engine import TinyEngine, TinyLM, TinyRanks

MADE_BY = {"teacher_distributions": "distill"}
"""Key that only an inference can make → a built-in interface that has it."""
WHOLE = MicroBatchSpec()
"""One micro-batch."""


State = dict[str, Any]
"""The own state of an interface, as JSON has it."""


class Make(Protocol):
    """Builds a new interface with the contract's arguments, some of them possibly changed."""

    def __call__(self, **changes: Any) -> ModelInterface: ...


class Batches(Protocol):
    """Makes a batch with the keys that the interface's training reads,
    with sequences of the given lengths."""

    def __call__(self, lengths: Lengths = PAIRS, seed: int = 0) -> SequenceSample: ...


@dataclass(frozen=True)
class TrainingOutcome:
    """The results of one or several training steps."""

    stats: dict[str, float]
    """Stats of the last step."""
    weights: dict[str, torch.Tensor]
    state: State
    """The interface's own state, after a round trip through JSON."""
    model: Model
    interface: ModelInterface

    @property
    def engine(self) -> WatchedEngine:
        return self.model.module


@dataclass(frozen=True)
class StepDifference:
    """The number with the largest relative difference between two outcomes."""

    name: str
    """Name of the stat, the parameter or the entry of the state."""
    kind: str
    """stat, weights or state"""
    first: float
    second: float

    @property
    def size(self) -> float:
        return abs(self.first - self.second) / max(1.0, abs(self.first))

    def describe(self, how_one: str, how_other: str) -> str:
        """`loss is 0.31 with …, 0.62 with …`"""
        if self.kind == "weights":
            return (
                f"{self.name} differs by up to {abs(self.first - self.second):.3g} between "
                f"{how_one} and {how_other}"
            )
        return f"{self.name} is {self.first:.6g} {how_one}, {self.second:.6g} {how_other}"


def is_close(value: float, expected: float, tolerance: float = 1e-6) -> bool:
    """Whether two numbers are the same up to rounding, and neither is NaN."""
    return abs(value - expected) <= tolerance * max(1.0, abs(expected))


def difference(
    first: TrainingOutcome, second: TrainingOutcome, tolerance: float = 1e-6
) -> StepDifference | None:
    """None if both are the same up to rounding: the loss first, then other stats,
    then weights and state."""
    for differences in (
        _in_stats(first.stats, second.stats),
        _in_weights(first, second),
        _in_states(first.state, second.state),
    ):
        worst = [entry for entry in differences if not entry.size <= tolerance]
        if worst:
            return max(worst, key=lambda entry: (entry.name == "loss", entry.size))
    return None


def _in_stats(first: Mapping[str, float], second: Mapping[str, float]) -> list[StepDifference]:
    nan = float("nan")
    names = [*first, *(name for name in second if name not in first)]
    return [
        StepDifference(name, "stat", first.get(name, nan), second.get(name, nan)) for name in names
    ]


def _in_weights(first: TrainingOutcome, second: TrainingOutcome) -> list[StepDifference]:
    gaps = {
        name: (tensor - second.weights[name]).abs().max() for name, tensor in first.weights.items()
    }
    return [
        StepDifference(f"weight {name}", "weights", 0.0, float(gap)) for name, gap in gaps.items()
    ]


def difference_of_states(first: State, second: State) -> StepDifference | None:
    """None if two states are the same up to rounding."""
    return next((entry for entry in _in_states(first, second) if not entry.size <= 1e-6), None)


def _in_states(first: Any, second: Any, name: str = "state") -> list[StepDifference]:
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [
            entry for key in first for entry in _in_states(first[key], second[key], f"{name} {key}")
        ]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [
            entry for a, b in zip(first, second, strict=True) for entry in _in_states(a, b, name)
        ]
    if isinstance(first, int | float) and isinstance(second, int | float):
        return [StepDifference(name, "state", float(first), float(second))]
    return [] if first == second else [StepDifference(name, "state", 0.0, float("nan"))]


class Rehearsal:
    """Trains an interface on tiny models with identical initial weights."""

    def __init__(self, make: Make, batches: Batches):
        self.make = make
        self.batches = batches

    @cached_property
    def batch(self) -> SequenceSample:
        """The usual batch; after `fit`, and never changed by a check."""
        return self.fit(self.batches())

    @cached_property
    def result(self) -> TrainingOutcome:
        """One step on `batch` in one micro-batch, used by most checks."""
        return self.train(self.batch)

    @property
    def where(self) -> str:
        return place_of_call(self.make(), "train_step")

    @property
    def heads(self) -> set[str]:
        """The heads of the model that training uses."""
        return self.result.engine.heads

    @cached_property
    def metrics(self) -> Metrics:
        """The declared ones."""
        return declared_metrics(type(self.make()))

    def declared(self, stats: Mapping[str, float]) -> list[tuple[str, str, str]]:
        """(name, unit, meaning) of the declared ones among some stats."""
        return [(name, *self.metrics[name]) for name in sorted(self.metrics.keys() & stats.keys())]

    def model(
        self,
        ranks: TinyRanks | None = None,
        rank: int = 0,
        lr: float = 0.01,
        module: TinyLM | None = None,
    ) -> Model:
        engine = WatchedEngine(module or TinyLM(), lr, ranks, rank)
        return Model("tested", engine, DigitTokenizer(), torch.device("cpu"))

    def fit(
        self,
        batch: SequenceSample,
        model: Model | None = None,
        interface: ModelInterface | None = None,
    ) -> SequenceSample:
        """The batch as a rollout of the model would have left it:
        log-probs and values are the model's own."""
        return as_sampled(interface or self.make(), model or self.model(), batch)

    def train(
        self,
        *batches: SequenceSample,
        spec: MicroBatchSpec = WHOLE,
        model: Model | None = None,
        interface: ModelInterface | None = None,
        lr: float = 0.01,
        changes: Changes = MappingProxyType({}),
    ) -> TrainingOutcome:
        """One step on each batch; by default of a new model with this learning rate, and of an
        interface with some arguments changed."""
        interface, model = interface or self.make(**changes), model or self.model(lr=lr)
        stats: dict[str, float] = {}
        for batch in batches:
            stats = call_interface(interface, "train_step", model, batch, spec)
        named = model.module.model.named_parameters()
        weights = {name: parameter.detach().clone() for name, parameter in named}
        return TrainingOutcome(dict(stats), weights, _own_state(interface), model, interface)

    def demand_same(
        self,
        first: TrainingOutcome,
        second: TrainingOutcome,
        how: tuple[str, str],
        cause: str,
        tolerance: float = 1e-6,
        where: str = "",
    ) -> None:
        """Raise Violation if two outcomes differ; `how`: how each of them was made."""
        mismatch = difference(first, second, tolerance)
        if mismatch is not None:
            raise Violation(mismatch.describe(*how), cause, where or self.where)

    def train_on_ranks(
        self, batch: SequenceSample, shares: Sequence[Sequence[int]]
    ) -> list[TrainingOutcome]:
        """One step on a batch of which each rank has a share; the outcome on each rank."""
        ranks = TinyRanks(len(shares))

        def one_rank(rank: int) -> TrainingOutcome:
            return self.train(batch.select_indices(shares[rank]), model=self.model(ranks, rank))

        return ranks.run(one_rank)


def _own_state(interface: ModelInterface) -> State:
    """State after a round trip through JSON; empty if it is not JSON, which has its own check."""
    try:
        return state_through_json(interface)
    except Violation:
        return {}


def state_through_json(interface: ModelInterface) -> State:
    """The interface's own state as a checkpoint restores it. Raises Violation if it is not JSON."""
    try:
        return json.loads(json.dumps(interface.state_dict(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise Violation(
            f"state_dict is not JSON: {error}",
            "return plain numbers, strings, lists and dicts",
            place_of_call(interface, "state_dict"),
        ) from error


def as_sampled(interface: ModelInterface, model: Model, batch: SequenceSample) -> SequenceSample:
    """A copy of the batch in which everything that a rollout computes with the trained model is
    computed with it.

    Keys returned by the interface's own inference come from there, log-probs and values otherwise
    directly from the model: the old policy is the one that sampled. Log-probs of other policies are
    made slightly different from its own.
    """
    sampled = batch.select(batch.keys)
    written, read = interface.writes("inference"), interface.reads("inference")
    has_inputs = read is None or set(read.needed) <= batch.keys
    makes = written is not None and batch.keys & set(written.all)
    if makes and has_inputs and overrides(interface, "inference"):
        inferred = call_interface(interface, "inference", model, batch, WHOLE)
        sampled.update_(inferred.select(inferred.keys & batch.keys & {*KEYS}))
    has_sampled = SAMPLED_LOGPROBS in batch.keys
    if has_sampled and not (written and SAMPLED_LOGPROBS in written.all):
        sampled.data[SAMPLED_LOGPROBS] = outputs_of_actions(model, batch, "logprobs").float()
    if "old_logprobs" in batch.keys:
        sampled.data["old_logprobs"] = (
            sampled.data[SAMPLED_LOGPROBS]
            if has_sampled
            else outputs_of_actions(model, batch, "logprobs").float()
        )
    for key in {REFERENCE, "proximal_logprobs"} & batch.keys:
        drawn = sampled.data[key]
        base = sampled.data.get(SAMPLED_LOGPROBS, drawn)
        sampled.data[key] = base + 0.2 * (drawn - drawn.mean())
    return sampled


def outputs_of_actions(model: Model, batch: SequenceSample, name: str) -> torch.Tensor:
    """[T - N] an output of the model, such as `logprobs`, for each action."""
    return model.module.forward(
        batch,
        post_hook=lambda output, _: getattr(output, name),
        output_seqlens=action_seqlens(batch),
    )


def usual_batches(interface: ModelInterface) -> Batches:
    """Makes batches with the keys that training declares, in groups of the required size: including
    those that it only reads if given. If it declares none, all known keys; a required key that is
    unknown here, and that its inference does not make, must be supplied."""
    declared = interface.reads("train_step")
    if declared is None:
        keys = dict.fromkeys((*KEYS, *keys_in_source(interface, "train_step")))
    else:
        keys = dict.fromkeys((*declared.needed, *(key for key in declared.if_given if key in KEYS)))
    usual_keys = [key for key in keys if key not in _of_teacher(interface)]

    def make(lengths: Lengths = PAIRS, seed: int = 0) -> SequenceSample:
        batch = make_batch(usual_keys, in_groups(interface, "train_step", lengths), seed)
        return as_of_teacher(interface, batch)

    return make


def teacher() -> Model:
    """A model that differs from the one that is trained."""
    return Model("teacher", TinyEngine(TinyLM(seed=1), 0.0), DigitTokenizer(), torch.device("cpu"))


def as_of_teacher(
    interface: ModelInterface, batch: SequenceSample, model: Model | None = None
) -> SequenceSample:
    """A copy of the batch in which those keys for training that only the interface's own inference
    can make are made by it for a teacher."""
    copy = batch.select(batch.keys)
    for key, maker in _of_teacher(interface).items():
        inferred = call_interface(maker, "inference", model or teacher(), batch, WHOLE)
        copy.update_(inferred.select([key]))
    return copy


def _of_teacher(interface: ModelInterface) -> dict[str, ModelInterface]:
    """The keys that are not generally known and that training needs, each with the interface whose
    inference makes it: this one, or else a built-in one."""
    needed, written = interface.reads("train_step"), interface.writes("inference")
    unknown = [key for key in (needed.needed if needed else ()) if key not in KEYS]
    makes = written.all if written is not None and overrides(interface, "inference") else ()
    makers = {key: interface for key in unknown if key in makes}
    for key in unknown:
        if key in MADE_BY and key not in makes:
            makers[key] = make_interface(ModelInterfaceAbstraction(MADE_BY[key]))
    return makers


def group_size(interface: ModelInterface, call: str) -> int:
    """How many sequences a sample must have at least for a call."""
    return largest_number(interface.group_sizes(call))


def in_groups(interface: ModelInterface, call: str, lengths: Lengths) -> Lengths:
    """The lengths, with as many sequences in each sample as the call needs."""
    size = group_size(interface, call)
    return [list(group) * -(-size // len(group)) for group in lengths]


def keys_in_source(interface: ModelInterface, call: str) -> tuple[str, ...]:
    """The strings with which the method's file indexes `.data`, as far as can be determined."""
    module = inspect.getmodule(getattr(type(interface), call))
    keys = (
        node.slice.value
        for node in ast.walk(source_of(module))
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in ("data", "seqlens")
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    )
    return tuple(dict.fromkeys(("packed_input_ids", *keys)))


def overrides(interface: ModelInterface, method: str) -> bool:
    """Whether the interface defines the method itself."""
    return getattr(type(interface), method) is not getattr(ModelInterface, method)


def place_of_call(interface: ModelInterface, call: str) -> str:
    """The line of a method, such as `train_step`; that of the class if it inherits the method from
    another file, where its author would find no mistake."""
    cls = type(interface)
    method = getattr(cls, call)
    return place_of(method if method.__module__ == cls.__module__ else cls)


def place_of_number(
    rehearsal: Rehearsal,
    name: str,
    outcome_at_fault: TrainingOutcome,
    compared: TrainingOutcome | None = None,
) -> str:
    """The source of a number of a training step that is wrong in `outcome_at_fault`, or differs
    from `compared`.

    The loss is blamed for its numbers only if it is computed directly from the input of train_step.
    """
    call = next(iter(outcome_at_fault.engine.calls), None)
    if call is None:
        return rehearsal.where
    weights = [
        outcome.stats.get("loss_weight", 0.0)
        for outcome in (outcome_at_fault, compared or outcome_at_fault)
    ]
    if name == "loss_weight" or (name in ("loss", "grad_norm") and not math.isclose(*weights)):
        return place_of(call.loss_weight_fn)
    if name in ("loss", "grad_norm") and call.batch.keys <= rehearsal.batch.keys:
        return place_of(call.loss_fn)
    return rehearsal.where


def untried(
    name: str, call: str, fixture: str, interface: ModelInterface, error: ValueError
) -> Violation:
    """Report that no batch can be made for a call, and how its author can provide one."""
    file = f"tests/interfaces/test_{module_name(name)}.py"
    return Violation(
        f"no batch can be made for {call}: {error}",
        (
            f"give TestContract in {file} a fixture `{fixture}`, whose value is a function "
            "(lengths, seed) -> batch"
        ),
        place_of(type(interface)),
    )


class InterfaceSubject(Contract):
    """The interface under test; all fixtures may be overridden in a subclass."""

    kind = "interface"

    @pytest.fixture
    def make(self, request: pytest.FixtureRequest) -> Make:
        """Builds the interface. `args`, if it is a fixture, is resolved here."""
        args = self.args if isinstance(self.args, Mapping) else request.getfixturevalue("args")
        skip_without_arguments(self.kind, self.name, args)

        def configured(**changes: Any) -> ModelInterface:
            return make_interface(ModelInterfaceAbstraction(self.name, {**args, **changes}))

        return configured

    def described_arguments(self) -> Sequence[Argument]:
        return signature("interfaces", self.name).arguments if self.name else ()

    def arguments_documented_as(self, meaning: re.Pattern[str]) -> list[str]:
        """The names of the arguments whose documentation says so."""
        return [each.name for each in self.described_arguments() if meaning.search(each.doc)]

    def require_documented_as(self, meaning: re.Pattern[str], reason: str) -> list[str]:
        """The same; skips the check for this reason if there are none."""
        names = self.arguments_documented_as(meaning)
        skip_unless(names, reason)
        return names

    @pytest.fixture
    def batches(self, make: Make) -> Batches:
        """Makes batches. Override if the interface reads its own keys; groups are as large as
        NEEDS_GROUP requires."""
        return usual_batches(make())

    @pytest.fixture
    def rehearsal(self, make: Make, batches: Batches) -> Rehearsal:
        """Training steps of the interface on tiny models."""
        skip_unless(overrides(make(), "train_step"), "does not train")
        try:
            batches()
        except ValueError as error:
            pytest.skip(f"not tried: no batch: {error}")
        return Rehearsal(make, batches)
