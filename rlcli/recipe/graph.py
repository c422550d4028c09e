"""The calls of a recipe: where they are, how they depend on each other, what is wrong with how they
are connected, and what they are as `MFCDef`s."""

from __future__ import annotations

import graphlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rlcli.api.config import MicroBatchSpec, ModelInterfaceAbstraction
from rlcli.api.dataflow import Hook, MFCDef, ModelInterfaceType, OffloadHook, ParamReallocHook
from rlcli.recipe.components import dataset_keys, declared, declared_of_call
from rlcli.recipe.parsing.tree import KeyPath
from rlcli.recipe.schema import Call, Hooks, Recipe


class Graph(NamedTuple):
    """The calls of a graph, where they are written, and the dataset they run on."""

    path: KeyPath
    calls: Mapping[str, Call]
    dataset: str | None

    def at(self, *keys: str) -> KeyPath:
        """The path of a call, or of a key below it."""
        return (*self.path, *keys)


def graphs_of(recipe: Recipe) -> tuple[Graph, Graph]:
    """The recipe's graphs: the one of a training step, and the one of an evaluation."""
    train = recipe.train
    return (
        Graph(("graph",), recipe.graph, train.dataset),
        Graph(("train", "eval", "graph"), train.eval.graph, train.eval.dataset),
    )


def calls_of(recipe: Recipe) -> Iterator[tuple[KeyPath, Call]]:
    """The calls of all graphs, with their paths."""
    for path, calls, _ in graphs_of(recipe):
        yield from (((*path, name), call) for name, call in calls.items())


def train_graph(recipe: Recipe) -> list[MFCDef]:
    """The calls of one training step."""
    return [_mfc(name, call, recipe) for name, call in recipe.graph.items()]


def eval_graph(recipe: Recipe) -> list[MFCDef]:
    """The calls of an evaluation; empty without an evaluation dataset."""
    if recipe.train.eval.dataset is None:
        return []
    return [_mfc(name, call, recipe) for name, call in recipe.train.eval.graph.items()]


def _mfc(name: str, call: Call, recipe: Recipe) -> MFCDef:
    return MFCDef(
        name=name,
        model_name=call.model,
        interface_type=ModelInterfaceType(call.call),
        interface_impl=ModelInterfaceAbstraction(call.interface.type, call.interface.args),
        input_keys=tuple(call.inputs),
        output_keys=tuple(call.outputs),
        input_key_remap=call.input_key_remap,
        output_key_remap=call.output_key_remap,
        mb_spec=MicroBatchSpec(
            n_mbs=call.microbatches or recipe.train.microbatches,
            max_tokens_per_mb=tokens_of_microbatch(recipe, call),
        ),
        post_hooks=_hooks(call.hooks),
        drops=reasons_to_drop(call),
        compares_samples=compares_samples(call),
    )


def tokens_of_microbatch(recipe: Recipe, call: Call) -> int:
    """The most tokens in a micro-batch of a call."""
    return call.max_tokens_per_microbatch or recipe.train.max_tokens_per_microbatch


def _hooks(hooks: Hooks) -> tuple[Hook, ...]:
    copy = (
        (ParamReallocHook(target=hooks.copy_to, eta=hooks.eta, transfer=hooks.transfer),)
        if hooks.copy_to is not None
        else ()
    )
    return (*copy, OffloadHook()) if hooks.offload else copy


@dataclass(frozen=True)
class GraphProblem:
    """`call`: where to point; `key`: the batch key in question, None for a cycle."""

    fault: str
    call: str
    key: str | None = None
    is_unmade: bool = False
    """The call reads the key, but nothing makes it."""


def made_keys(call: Call) -> list[str]:
    """Batch names of a call's outputs."""
    return [call.output_key_remap.get(key, key) for key in call.outputs]


def reasons_to_drop(call: Call) -> tuple[str, ...]:
    """Reasons for which it may drop samples, as its interface declares."""
    declared = declared_of_call("DROPS", call)
    return declared.needed + declared.if_given if declared is not None else ()


def compares_samples(call: Call) -> bool:
    """Whether a call takes all samples of a step at once, as its interface declares."""
    return call.call in (declared("interfaces", call.interface.type, "TAKES_BATCH") or ())


def producers(calls: Mapping[str, Call]) -> dict[str, list[str]]:
    """Batch key → the calls that produce it."""
    makers: dict[str, list[str]] = {}
    for name, call in calls.items():
        for key in made_keys(call):
            makers.setdefault(key, []).append(name)
    return makers


def available_keys(recipe: Recipe, graph: Graph) -> list[str]:
    """The batch keys that the calls of a graph make, and those that the dataset's rows bring."""
    brought = dataset_keys(recipe.datasets, graph.dataset) or ()
    return list(dict.fromkeys([*producers(graph.calls), *brought]))


def waits_for(calls: Mapping[str, Call]) -> dict[str, set[str]]:
    """Call → the calls whose outputs it reads."""
    makers = producers(calls)
    return {
        name: {maker for key in call.inputs for maker in makers.get(key, ())}
        for name, call in calls.items()
    }


def runs_after(calls: Mapping[str, Call]) -> dict[str, set[str]]:
    """Call → the calls that run before it: those whose outputs it reads and, where calls drop
    samples, before training all that select its batch."""
    after = waits_for(calls)
    if not any(reasons_to_drop(call) for call in calls.values()):
        return after
    late = {
        name
        for name, call in calls.items()
        if call.call == "train_step" or call.hooks.copy_to is not None or compares_samples(call)
    }
    while late_readers := {name for name, before in after.items() if before & late} - late:
        late |= late_readers
    selecting = set(calls) - late
    return {name: before | selecting if name in late else before for name, before in after.items()}


def stages(calls: Mapping[str, Call]) -> list[list[str]]:
    """Calls that may run at the same time, stage by stage. The graph must have no cycle."""
    sorter = graphlib.TopologicalSorter(runs_after(calls))
    sorter.prepare()
    result: list[list[str]] = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=list(calls).index)
        result.append(ready)
        sorter.done(*ready)
    return result


def graph_problems(
    calls: Mapping[str, Call], dataset_keys: Collection[str] | None
) -> list[GraphProblem]:
    """Every reason why the calls cannot run. `dataset_keys`: None if any key may be provided."""
    problems: list[GraphProblem] = []
    made_by = producers(calls)
    for key, makers in made_by.items():
        for second in makers[1:]:
            problems.append(
                GraphProblem(f"both {makers[0]} and {second} produce {key}", second, key)
            )
    for name, call in calls.items():
        for key in call.inputs:
            if dataset_keys is not None and key not in made_by and key not in dataset_keys:
                fault = f"{name} reads {key}, which neither a call nor the dataset provides"
                problems.append(GraphProblem(fault, name, key, is_unmade=True))
    try:
        graphlib.TopologicalSorter(waits_for(calls)).prepare()
    except graphlib.CycleError as error:
        cycle = list(error.args[1])
        problems.append(
            GraphProblem("the calls wait for each other: " + " → ".join(cycle), cycle[0])
        )
    return problems
