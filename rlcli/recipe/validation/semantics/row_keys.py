"""Checks that the rows of a dataset have the keys that only rows can bring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rlcli import registry
from rlcli.api.declared_keys import largest_number
from rlcli.recipe.components import dataset_keys, declared_of_call, holds_pairs
from rlcli.recipe.graph import Graph
from rlcli.recipe.parsing.tree import KeyPath, Scalar, at, dotted
from rlcli.recipe.schema import Call
from rlcli.recipe.validation.semantics.keys import readers_of, removed_maker, they_read
from rlcli.recipe.validation.semantics.notes import Notes, in_words


def check_rows(
    notes: Notes, graph: Graph, unmade: Mapping[str, list[str]], basis: Iterable[KeyPath]
) -> set[str]:
    """Report keys that nothing makes, but rows of some other dataset have, as one problem of the
    dataset. Returns those keys. `unmade`: key → its readers."""
    candidates = _only_in_rows(notes, graph, unmade)
    dataset = graph.dataset
    has = dataset_keys(notes.recipe.datasets, dataset)
    if not candidates or has is None or dataset is None or dataset not in notes.recipe.datasets:
        return set()
    fitting = list(_datasets_with(candidates))
    if not fitting:
        return set()
    section = ("datasets", dataset)
    rows = f"rows of {dotted(section)} ({notes.recipe.datasets[dataset].type}) have {in_words(has)}"
    message = f"{rows}, but {they_read(readers_of(candidates, unmade), candidates)}"
    _refuse(notes, section, message, _instead(notes, section, fitting), basis)
    return set(candidates)


def check_pairs(notes: Notes, calls: Mapping[str, Call], dataset: str) -> None:
    """Report a dataset of single sequences where calls compare the sequences of a row. Those of a
    graph that generates compare responses."""
    comparing = [
        name
        for name, call in calls.items()
        if largest_number(declared_of_call("NEEDS_GROUP", call)) > 1
    ]
    generates = any(call.call == "generate" for call in calls.values())
    if generates or not comparing or holds_pairs(notes.recipe.datasets, dataset) is not False:
        return
    section = ("datasets", dataset)
    kind = notes.recipe.datasets[dataset].type
    compare = "compare" if comparing[1:] else "compares"
    message = (
        f"rows of {dotted(section)} ({kind}) have one sequence each, but "
        f"{in_words(comparing)} {compare} pairs"
    )
    fitting = [name for name in registry.names("datasets") if holds_pairs({}, name)]
    needs = [("graph", name, "interface", "type") for name in comparing]
    _refuse(notes, section, message, _instead(notes, section, fitting), needs)


def _refuse(
    notes: Notes, section: KeyPath, message: str, hint: str, needs: Iterable[KeyPath]
) -> None:
    """Report a dataset that does not fit, and none of the problems of its arguments."""
    if notes.note("R71", message, (*section, "type"), hint, needs=needs):
        notes.problems.withdraw((*section, "args"))


def _only_in_rows(notes: Notes, graph: Graph, unmade: Iterable[str]) -> list[str]:
    """The keys that nothing makes, that rows of some dataset have, and that no removed call
    made."""
    made_before = {key for key in unmade if removed_maker(notes, graph, key) is not None}
    return [key for key in unmade if key not in made_before and any(_datasets_with([key]))]


def _datasets_with(keys: Iterable[str]) -> Iterator[str]:
    """The datasets whose rows have all these keys."""
    for name in registry.names("datasets"):
        if set(keys) <= set(dataset_keys({}, name) or ()):
            yield name


def _instead(notes: Notes, section: KeyPath, fitting: list[str]) -> str:
    """Datasets to use instead; if a lower layer had a fitting one, only that."""
    node = at(notes.tree, (*section, "type"))
    replaced = node.over if isinstance(node, Scalar) else None
    if isinstance(replaced, Scalar) and replaced.value in fitting:
        back = f"{dotted(section)}={replaced.value}"
        return f"rows of {replaced.value}, which it replaces, have them: {back}"
    return f"these have them: {', '.join(fitting)}"
