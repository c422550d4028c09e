"""The dataflow graph: model function calls, linked by the keys they produce and consume.
No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rlcli.api.config import MicroBatchSpec, ModelInterfaceAbstraction
from rlcli.errors import UsageError


class ModelInterfaceType(StrEnum):
    """Which method of its interface a call runs."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"


Transfer = Literal["full", "delta"]
"""All elements of the weights, or what changed in them since the last copy."""


@dataclass(frozen=True, kw_only=True)
class ParamReallocHook:
    """Once the call is done, give `target` the parameters of the call's role.

    target ← eta · source + (1 − eta) · target: a copy at eta 1,
    below that an exponential moving average.
    """

    target: str
    eta: float = 1.0
    transfer: Transfer = "full"
    """How the weights are sent between ranks."""


@dataclass(frozen=True, kw_only=True)
class OffloadHook:
    """Once the call is done, keep its role's weights in host memory until the role's next call."""


Hook = ParamReallocHook | OffloadHook


@dataclass(frozen=True, kw_only=True)
class MFCDef:
    """One model function call of the graph: `model.call(inputs) -> outputs`."""

    name: str
    model_name: str
    """The role that runs the call."""
    interface_type: ModelInterfaceType
    interface_impl: ModelInterfaceAbstraction
    input_keys: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    """Name in the buffer → name the interface reads."""
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    """Name the interface writes → name in the buffer."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    post_hooks: tuple[Hook, ...] = ()
    """What happens to weights once the call is done, in this order."""
    drops: tuple[str, ...] = ()
    """The reasons for which it may drop samples."""
    compares_samples: bool = False
    """Whether a sample's result depends on the others of the step."""

    @property
    def is_train(self) -> bool:
        return self.interface_type is ModelInterfaceType.TRAIN_STEP

    @property
    def takes_batch(self) -> bool:
        """Whether it takes all samples of a step at once."""
        return self.is_train or self.compares_samples

    @property
    def needs_batch(self) -> bool:
        """Whether it belongs to a step as a whole: it takes all samples at once,
        or changes weights."""
        return self.takes_batch or bool(self.written_roles)

    @property
    def written_roles(self) -> tuple[str, ...]:
        """The roles whose weights the call changes: its own if it trains,
        and those that it copies to."""
        trained = (self.model_name,) if self.is_train else ()
        return trained + tuple(
            hook.target for hook in self.post_hooks if isinstance(hook, ParamReallocHook)
        )

    @property
    def weight_copy(self) -> ParamReallocHook | None:
        """The copy of weights once the call is done."""
        return next((hook for hook in self.post_hooks if isinstance(hook, ParamReallocHook)), None)

    @property
    def produced_keys(self) -> tuple[str, ...]:
        """The keys that appear in the buffer once the call is done."""
        return tuple(self.output_key_remap.get(key, key) for key in self.output_keys)


class CallGraph:
    """Calls, linked by the keys that one makes and another reads.

    In a loaded recipe, no two calls make the same key, and none wait for each other
    (`rlcli.recipe.graph`).
    """

    def __init__(self, mfcs: Sequence[MFCDef]):
        makers = {key: mfc.name for mfc in mfcs for key in mfc.produced_keys}
        self.reads: dict[str, dict[str, tuple[str, ...]]] = {}
        """Call → the calls whose outputs it reads → the keys that it reads from them."""
        for mfc in mfcs:
            from_calls = self.reads.setdefault(mfc.name, {})
            for key in mfc.input_keys:
                if key in makers:
                    from_calls[makers[key]] = (*from_calls.get(makers[key], ()), key)

    def before(self, call: str) -> set[str]:
        """All calls that it waits for, directly or not."""
        direct = set(self.reads[call])
        return direct.union(*(self.before(earlier) for earlier in direct))

    def after(self, call: str) -> set[str]:
        """All calls that wait for it, directly or not."""
        return {later for later in self.reads if call in self.before(later)}

    def order(self) -> list[str]:
        """The calls, each after those that it waits for, otherwise in the order in which they were
        given."""
        left, ordered = list(self.reads), list[str]()
        while left:
            first = next(call for call in left if set(ordered).issuperset(self.reads[call]))
            left.remove(first)
            ordered.append(first)
        return ordered


def weight_writers(mfcs: Sequence[MFCDef]) -> dict[str, list[str]]:
    """Role → the calls after which it has the weights of the next version: they train it,
    or copy weights to it."""
    writers: dict[str, list[str]] = {}
    for mfc in mfcs:
        for role in mfc.written_roles:
            writers.setdefault(role, []).append(mfc.name)
    return writers


def earlier_turns(mfcs: Sequence[MFCDef]) -> dict[str, set[str]]:
    """Call → those that have their turn before it: those that it reads from, and, if it changes
    weights, the other calls of these roles, which need the old weights."""
    linked, writers = CallGraph(mfcs), weight_writers(mfcs)
    earlier = {name: set(makers) for name, makers in linked.reads.items()}
    for mfc in mfcs:
        for role in mfc.written_roles:
            readers = {reader.name for reader in mfcs if reader.model_name == role}
            earlier[mfc.name] |= readers - linked.after(mfc.name) - set(writers[role])
    return earlier


def in_turn(mfcs: Sequence[MFCDef]) -> list[MFCDef]:
    """Calls in the order of their turns, otherwise in the order of the graph.

    Raises UsageError if calls wait for each other.
    """
    calls, earlier, ordered = {mfc.name: mfc for mfc in mfcs}, earlier_turns(mfcs), list[str]()
    while len(ordered) < len(calls):
        free = [name for name in calls if name not in ordered and earlier[name] <= set(ordered)]
        if not free:
            waiting = ", ".join(name for name in calls if name not in ordered)
            raise UsageError(f"calls wait for each other's weights: {waiting}", where="graph")
        ordered.append(free[0])
    return [calls[name] for name in ordered]


def updates_per_step(mfcs: Sequence[MFCDef]) -> dict[str, int]:
    """Role whose weights change → by how much its version grows in a training step. A role that
    follows another grows with it."""
    trained = Counter(mfc.model_name for mfc in mfcs if mfc.is_train)
    for mfc in mfcs:
        if mfc.weight_copy is not None and trained[mfc.model_name]:
            trained.setdefault(mfc.weight_copy.target, trained[mfc.model_name])
    return trained


def calls_ahead(mfcs: Sequence[MFCDef]) -> list[MFCDef]:
    """The calls that may work on samples of later steps while weights are trained: generation, and
    calls of roles whose weights never change, if they wait for such calls only. Empty if there is
    no generation among them, or nothing is trained."""
    writers = weight_writers(mfcs)
    bound = {
        mfc.name
        for mfc in mfcs
        if mfc.needs_batch
        or (mfc.model_name in writers and mfc.interface_type is not ModelInterfaceType.GENERATE)
    }
    makers = {key: mfc.name for mfc in mfcs for key in mfc.produced_keys}

    def reads(mfc: MFCDef) -> set[str | None]:
        return {makers.get(key) for key in mfc.input_keys}

    while reached := {mfc.name for mfc in mfcs if not bound.isdisjoint(reads(mfc))} - bound:
        bound |= reached
    ahead = [mfc for mfc in mfcs if mfc.name not in bound]
    generates = any(mfc.interface_type is ModelInterfaceType.GENERATE for mfc in ahead)
    return ahead if bound and generates else []
