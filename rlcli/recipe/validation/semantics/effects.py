"""Refuses settings that have no effect: overrides that nothing reads, which a layer may have for
just some of the recipes that extend it; arguments without another that they need, as their class
declares in `NEEDS`; and what concerns evaluations, drops or staleness that a recipe does not have.

What is probably not intended, but has an effect, is a warning of `rlcli.inspect.doubtful`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rlcli.api.dataflow import calls_ahead
from rlcli.api.limits import unmet
from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.recipe.components import argument_of, known_signature
from rlcli.recipe.expansion.generation import GENERATION, with_generation
from rlcli.recipe.graph import calls_of, train_graph
from rlcli.recipe.parsing.interpolation import references_in
from rlcli.recipe.parsing.places import GRAPHS
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    KeyPath,
    MappingNode,
    at,
    dotted,
    is_within,
    key_mark,
    keys_at,
    leaves,
)
from rlcli.recipe.schema import Component, Generation
from rlcli.recipe.validation.semantics.notes import Notes
from rlcli.recipe.validation.value_messages import rows_of
from rlcli.spelling import did_you_mean


def check(notes: Notes) -> None:
    for kind, component, path in _components(notes):
        _needs(notes, kind, component, (*path, "args"))
    _evaluations(notes)
    _draws(notes)


def _components(notes: Notes) -> Iterator[tuple[str, Component, KeyPath]]:
    for path, call in calls_of(notes.recipe):
        yield "interfaces", call.interface, (*path, "interface")
    for name, role in notes.recipe.models.items():
        yield "backends", role.engine, ("models", name, "backend")
    for name, dataset in notes.recipe.datasets.items():
        yield "datasets", dataset, ("datasets", name)


def _needs(notes: Notes, kind: str, component: Component, args: KeyPath) -> None:
    signature = known_signature(kind, component.type)
    needs = signature.needs if signature is not None else {}
    value_of = partial(argument_of, kind, component)
    default_of = partial(argument_of, kind, Component(type=component.type))
    problems = unmet(needs, value_of, default_of)
    for (argument, needed), problem in problems.items():
        places = [(*args, argument), (*args, needed)]
        written = f" ({notes.mark(places[1])})" if notes.is_set(places[1]) else ""
        message = f"{problem}{written}"
        removal = f"remove it, or set {notes.key(places[0])}=null"
        hint = removal if notes.is_set(places[0]) else None
        notes.note("R71", message, notes.first_set(*places), hint, needs=places, same=problem)


def _evaluations(notes: Notes) -> None:
    """Evaluations during a run need a dataset; a null says that there are none."""
    train, path = notes.recipe.train, ("train", "eval", "dataset")
    if train.eval.every_steps is None or notes.is_set(path):
        return
    others = [name for name in notes.recipe.datasets if name != train.dataset]
    new = [] if others else [rows_of("held_out", "FILE")]
    hint = " ".join(["name held-out rows:", *new, f"{dotted(path)}={[*others, 'held_out'][0]}"])
    message = "train.eval.every_steps has no effect: train.eval.dataset names no dataset"
    _refuse(notes, message, ("train", "eval", "every_steps"), hint, [("datasets",), path])


def _draws(notes: Notes) -> None:
    """Prompts are drawn a few at a time where calls drop some of them, or where they are sampled
    ahead of training."""
    graph = train_graph(notes.recipe)
    drops, sampling = any(mfc.drops for mfc in graph), calls_ahead(graph)
    ahead = sampling and notes.recipe.train.max_staleness
    if not sampling:
        _without_effect(notes, ["max_staleness"], "no call samples responses to train on")
    if not drops:
        _without_effect(notes, ["max_redraws"], "no call drops prompts")
    if not ahead:
        keys = ["max_segments", "take_first"]
        _without_effect(notes, keys, "no call samples ahead of training")
    if not drops and not ahead:
        reason = "no call drops prompts, and none samples them ahead of training"
        _without_effect(notes, ["prompts_per_draw"], reason)


def _without_effect(notes: Notes, keys: Iterable[str], reason: str) -> None:
    """Refuse keys of `train` that are not at their default."""
    train = notes.recipe.train
    for key in keys:
        if getattr(train, key) != type(train).model_fields[key].default:
            message, hint = f"train.{key} has no effect: {reason}", f"train.{key}=null removes it"
            needs = [("graph",), ("train", "max_staleness")]
            _refuse(notes, message, ("train", key), hint, needs)


def _refuse(notes: Notes, message: str, path: KeyPath, hint: str, needs: Iterable[KeyPath]) -> None:
    """Report a setting without effect; not in the recipe that a run was started with, which may
    have been before it was refused."""
    if Path(notes.mark(path).file).name != RESOLVED_RECIPE:
        notes.note("R71", message, path, hint, needs)


# -- overrides that nothing reads ------------------------------------------------------------------


def refuse_unread(
    blocks: set[str],
    tree: MappingNode,
    layer_trees: Sequence[MappingNode],
    override_trees: Sequence[MappingNode],
    problems: Problems,
) -> None:
    """Refuse a key of a block that only the command line has, and that no reference leads to; and a
    setting of generation that calls have of their own. `tree`: all layers merged, with references
    as written."""
    written = _targets([*layer_trees, *override_trees])
    read = _targets([tree])
    for override in override_trees:
        if not blocks.isdisjoint(override.entries):
            _refuse_keys_of_blocks(override, written, layer_trees, problems)
        if GENERATION in override.entries and with_generation(tree) is tree:
            _refuse_generation(override, read, tree, problems)


def _targets(trees: Sequence[MappingNode]) -> set[KeyPath]:
    """What references lead to."""
    return {reference.target for tree in trees for reference in references_in(tree)}


def _refuse_keys_of_blocks(
    override: MappingNode,
    targets: set[KeyPath],
    layer_trees: Sequence[MappingNode],
    problems: Problems,
) -> None:
    for path in _without_reference(override, targets):
        # no other override has it either, for what is set twice is refused
        if all(at(tree, path) is None for tree in layer_trees):
            key, keys = str(path[-1]), keys_at(problems.written, path[:-1])
            hint = did_you_mean(key, (name for name in keys if name != key))
            mark = key_mark(override, path)
            problems.add("R42", f"unknown key {dotted(path)}", mark, hint, width=len(key))


def _refuse_generation(
    override: MappingNode, targets: set[KeyPath], tree: MappingNode, problems: Problems
) -> None:
    for path in _without_reference(override, targets):
        setting = str(path[-1])
        if path != (GENERATION, setting) or setting not in Generation.model_fields:
            continue  # an unknown key is refused as such
        of_calls = [dotted(key) for key in _settings_of_calls(tree, setting)]
        if of_calls:
            message = f"{dotted(path)} has no effect: each call has its own"
            problems.add("R42", message, key_mark(override, path), f"set {', '.join(of_calls)}")


def _without_reference(override: MappingNode, targets: set[KeyPath]) -> Iterator[KeyPath]:
    """The keys of an override that no reference to one of these targets leads to."""
    for path, _ in leaves(override):
        if not any(is_within(path, target) or is_within(target, path) for target in targets):
            yield path


def _settings_of_calls(tree: MappingNode, setting: str) -> Iterator[KeyPath]:
    """The keys of a setting of generation in the arguments of calls."""
    for graph in GRAPHS:
        for call in keys_at(tree, graph):
            args = (*graph, call, "interface", "args")
            if at(tree, (*args, GENERATION)) is not None:
                yield (*args, GENERATION, setting)
            if at(tree, (*args, setting)) is not None:
                yield (*args, setting)
