"""Checks how long to train, on which data, in which portions, and what is kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlcli.api.dataflow import calls_ahead
from rlcli.recipe.components import (
    argument_of,
    declared,
    declared_mapping,
    sources_of,
    with_sources,
)
from rlcli.recipe.graph import train_graph
from rlcli.recipe.parsing.tree import COMMAND_LINE, at
from rlcli.recipe.schema import Call, Recipe
from rlcli.recipe.validation.semantics.notes import Notes
from rlcli.recipe.validation.semantics.ranking import check_ranking
from rlcli.spelling import nearest_name

LONGEST_PATH = 4096
"""Linux's limit. It also bounds the time spent looking at all parent folders."""


def check(notes: Notes) -> None:
    _length(notes)
    _data(notes)
    _misspelt_datasets(notes)
    _portions(notes)
    _dropped_ahead(notes)
    _stale(notes)
    _kept(notes)
    _folder(notes)


def _length(notes: Notes) -> None:
    train = notes.recipe.train
    if train.steps is not None and train.epochs is not None:
        places = (
            f"steps at {notes.mark(('train', 'steps'))}, epochs at "
            f"{notes.mark(('train', 'epochs'))}"
        )
        lower = next(
            (key for key in ("steps", "epochs") if notes.mark(("train", key)).file != COMMAND_LINE),
            "epochs",
        )
        hint = f"train.{lower}=null removes that one"
        notes.note(
            "R47",
            f"train has both steps and epochs; keep one ({places})",
            ("train", "epochs"),
            hint,
        )
    if train.steps is None and train.epochs is None:
        needs = [("train", "steps"), ("train", "epochs")]
        notes.note("R39", "train needs steps or epochs", ("train",), needs=needs)


def _data(notes: Notes) -> None:
    train = notes.recipe.train
    if train.dataset not in notes.recipe.datasets:
        notes.unknown("dataset", train.dataset, ("datasets",), ("train", "dataset"))
    _sources(notes)
    held_out = train.eval.dataset
    if held_out is not None and held_out not in notes.recipe.datasets:
        notes.unknown(
            "dataset",
            held_out,
            ("datasets",),
            ("train", "eval", "dataset"),
            "train.eval.dataset=null evaluates nothing",
        )
    elif held_out is not None and not train.eval.graph:
        message = "train.eval.graph is required: which calls evaluate?"
        notes.note("R39", message, ("train", "eval"), needs=[("train", "eval", "graph")])


def _sources(notes: Notes) -> None:
    """The datasets that others are made of exist, and none is made of itself."""
    datasets = notes.recipe.datasets
    for name, dataset in datasets.items():
        for source in sources_of(dataset):
            argument = declared("datasets", dataset.type, "KEYS_OF")
            path = ("datasets", name, "args", argument, source)
            if source not in datasets:
                notes.unknown("dataset", source, ("datasets",), path)
            elif name in (circle := with_sources(datasets, source)):
                message = f"the dataset {name} is made of itself: it takes rows of {source}"
                needs = [("datasets", member) for member in circle]
                notes.note_once(("circle", *sorted(circle)), "R71", message, path, None, needs)


def _misspelt_datasets(notes: Notes) -> None:
    """Datasets may be unused, to be chosen by name. One that only the command line has, and whose
    name is like that of a used one, is misspelt."""
    recipe = notes.recipe
    used = {each for name in recipe.used_datasets for each in with_sources(recipe.datasets, name)}
    for name in recipe.datasets:
        near = None if name in used else nearest_name(name, used)
        node = at(notes.tree, ("datasets", name))
        if near is not None and node is not None and node.mark.file == COMMAND_LINE:
            needs = [
                ("datasets",),
                ("train", "dataset"),
                ("train", "eval", "dataset"),
            ]
            message = f"nothing uses the dataset {name}"
            notes.note("R71", message, ("datasets", name), f"did you mean {near}?", needs=needs)


def _portions(notes: Notes) -> None:
    """Uneven portions are fine, and a default that was not chosen may leave some empty; explicitly
    setting more portions than there are prompts is a mistake."""
    rows = notes.recipe.train.prompts_per_step
    for name, call in notes.recipe.graph.items():
        parts, path = (
            call.interface.args.get("minibatches"),
            ("graph", name, "interface", "args", "minibatches"),
        )
        if call.call == "train_step" and isinstance(parts, int) and parts > rows:
            message = (
                f"{name} spreads a step over {parts} minibatches, but a step has {rows} "
                f"prompt{'s'[: rows > 1]}"
            )
            hint = (
                f"use minibatches of at most {rows}, or train.prompts_per_step of at least {parts}"
            )
            needs = [("train", "prompts_per_step"), ("graph", name, "call")]
            notes.note_once(("minibatches", parts), "R49", message, path, hint, needs)


def _dropped_ahead(notes: Notes) -> None:
    """Which of the samples that are made ahead of training are kept must not depend on the weights
    of their step."""
    recipe, graph = notes.recipe, train_graph(notes.recipe)
    ahead = [mfc.name for mfc in calls_ahead(graph)] if recipe.train.max_staleness else []
    for name in [mfc.name for mfc in graph if mfc.drops] if ahead else ():
        if name not in ahead:
            message = (
                f"{name} drops samples by the weights of their step, so none can "
                "be sampled ahead of it"
            )
            notes.note(
                "R71",
                message,
                ("graph", name),
                "set train.max_staleness=0",
                needs=[("train", "max_staleness")],
            )


def _stale(notes: Notes) -> None:
    """An interface's class may declare `STALE_NEEDS`: what it needs to know of the policy that is
    trained, where that has changed since it sampled."""
    recipe = notes.recipe
    if not recipe.train.max_staleness or not calls_ahead(train_graph(recipe)):
        return
    for name, call in recipe.graph.items():
        needs = declared_mapping("interfaces", call.interface.type, "STALE_NEEDS")
        for argument, alternatives in needs.items():
            if _is_set(call, argument) and not any(_is_set(call, key) for key in alternatives):
                _note_stale(notes, name, argument, alternatives)


def _is_set(call: Call, argument: str) -> bool:
    return bool(argument_of("interfaces", call.interface, argument))


def _note_stale(notes: Notes, name: str, argument: str, alternatives: Iterable[str]) -> None:
    args = ("graph", name, "interface", "args")
    problem = (
        f"{argument} of {name} needs {' or '.join(alternatives)} where samples may "
        "be older than their step"
    )
    hint = "set train.max_staleness=0, or use a profile that has the call for it: async, async_grpo"
    needs = [("train", "max_staleness"), *((*args, key) for key in alternatives)]
    notes.note_once(("stale", argument), "R71", problem, (*args, argument), hint, needs)


def _kept(notes: Notes) -> None:
    recipe, settings = notes.recipe, notes.recipe.checkpoint
    for index, name in enumerate(settings.roles or ()):
        if name not in recipe.models:
            notes.unknown("role", name, ("models",), ("checkpoint", "roles", index))
        elif not recipe.models[name].has_weights:
            needs = [("models", name)]
            notes.note(
                "R49", f"{name} has no weights to save", ("checkpoint", "roles", index), needs=needs
            )
    if settings.keep_best:
        check_ranking(notes)


def _folder(notes: Notes) -> None:
    """Runs are written next to their inputs, never into them."""
    for code, problem in _problems_of_folder(notes.recipe):
        notes.note(code, f"log.dir {problem}", ("log", "dir"), "for example runs")


def _problems_of_folder(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(message id, what is wrong) for each reason not to write runs into `log.dir`."""
    text = recipe.log.dir
    if re.search(r"(^|/)\.\.(/|$)|\0", text) or not text.strip():
        yield "R68", f"{text!r} is not a folder for runs"
        return
    try:
        if len(text) > LONGEST_PATH:
            raise ValueError("too long for a path")
        folder = Path(text).expanduser().absolute()
        parents = (above for above in (folder, *folder.parents) if above.exists())
        existing = next(parents, folder)
        if not existing.is_dir():
            yield "R69", f"{text!r} is below a file: {existing}"
        for name, role in recipe.models.items():
            if role.path and _is_in_model(folder, Path(role.path)):
                yield (
                    "R69",
                    f"{text!r} is inside the folder of models.{name}.path, which is only read",
                )
    except (OSError, ValueError, RuntimeError):
        yield "R59", f"{text[:200]!r} is not a valid name for a folder"


def _is_in_model(folder: Path, model: Path) -> bool:
    return folder.is_relative_to(model.absolute()) and (model / "config.json").is_file()
