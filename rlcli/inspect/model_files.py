"""Checks the files of a role's model before anything is loaded,
for `rlcli train` and `rlcli check` alike."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlcli.api.model_folder import check_config, check_folder, check_sizes
from rlcli.errors import ModelError, ResourceError, RlcliError
from rlcli.inspect.devices import visible_gpus
from rlcli.inspect.host_memory import host_memory
from rlcli.recipe.expansion.generation import GENERATION
from rlcli.recipe.graph import calls_of
from rlcli.recipe.named_files import model_of_call
from rlcli.recipe.role_sources import weights_origin

if TYPE_CHECKING:
    from rlcli.recipe.parsing.tree import KeyPath
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe, Role

NOT_FOLDERS = ("builtin:", "recipe:")
"""Prefixes of sources that are neither a folder nor a model on the Hub."""


def check_model_files(resolved: Resolved, role: str) -> None:
    """Check that a role's folder is complete and harmless, and its tokenizer no larger than its
    embedding; also for a model from the Hub that is already on this machine. Raises ModelError."""
    for error in _faults_of_role(resolved, role):
        raise error


def model_faults(resolved: Resolved) -> Iterator[RlcliError]:
    """Everything that is wrong with the models of a recipe: those of its roles, and those that its
    interfaces load."""
    for role in resolved.recipe.models:
        yield from _faults_of_role(resolved, role)
    yield from faults_beyond_roles(resolved)


def faults_beyond_roles(resolved: Resolved) -> Iterator[RlcliError]:
    """What is wrong with the models of a recipe apart from each role's own files: together they are
    too large, engines cannot run their layouts, or an interface loads a model that is not whole."""
    from rlcli.topology.layouts import layout_errors

    yield from _too_large(resolved)
    yield from layout_errors(resolved)
    yield from _unreachable_stops(resolved)
    graphs = (
        (("graph",), resolved.recipe.graph),
        (("train", "eval", "graph"), resolved.recipe.train.eval.graph),
    )
    for path, graph in graphs:
        for name, call in graph.items():
            source = model_of_call(call)
            if source is not None:
                yield from _faults(
                    resolved, source, (*path, name, "interface", "args", "path"), weights=True
                )


def local_folder(source: str | None) -> Path | None:
    """Where a model is on this machine: its folder, or its part in the Hub's cache;
    None if it is not here."""
    from rlcli.topology.configs import cached_folder

    if source is None or source.startswith(NOT_FOLDERS):
        return None
    folder = Path(source).expanduser()
    return folder if folder.is_dir() else cached_folder(source)


def _faults_of_role(resolved: Resolved, role: str) -> Iterator[RlcliError]:
    section = resolved.recipe.models[role]
    if section.scratch is not None:
        yield from _faults_of_scratch(resolved, role, section)
    if section.path is not None:
        yield from _faults(resolved, section.path, ("models", role, "path"), weights=True)
    if section.tokenizer is not None:
        yield from _faults(
            resolved, section.tokenizer, ("models", role, "tokenizer"), weights=False
        )
    model, tokenizer = local_folder(section.path), local_folder(section.tokenizer or section.path)
    if model is not None and tokenizer is not None:
        try:
            check_sizes(model, tokenizer)
        except ModelError as error:
            yield _at(resolved, ("models", role, "path"), error)


def _faults_of_scratch(resolved: Resolved, role: str, section: Role) -> Iterator[ModelError]:
    """A model from scratch must have possible sizes, and a row of its embedding for each token."""
    from rlcli.topology.architecture import UnknownArchitecture
    from rlcli.topology.configs import vocabulary_of

    assert section.scratch is not None
    path = ("models", role, "scratch")
    try:
        check_config(section.scratch, str(resolved.origin(path)))
        rows = section.scratch.get("vocab_size")
        if isinstance(rows, int) and (tokens := vocabulary_of(section.tokenizer)) > rows:
            message = (
                f"the tokenizer {section.tokenizer} has {tokens} tokens, but the embedding of "
                f"models.{role} has {rows} rows"
            )
            hint = "leave out vocab_size: a model from scratch gets a row for each token"
            yield ModelError(
                message, where=str(resolved.origin((*path, "vocab_size"))), hint=hint, code="F32"
            )
    except ModelError as error:
        yield error
    except UnknownArchitecture:
        return  # only transformers can read that tokenizer


def _faults(
    resolved: Resolved, source: str, path: KeyPath, *, weights: bool
) -> Iterator[ModelError]:
    folder = local_folder(source)
    if folder is None:
        is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        if is_offline and not source.startswith(NOT_FOLDERS):
            message = f"{source} is not in the Hub's cache, and HF_HUB_OFFLINE is set"
            hint = (
                f"fetch it where there is a network, hf download {source}, or take a folder: "
                "--model FOLDER"
            )
            yield ModelError(message, where=str(resolved.origin(path)), hint=hint)
        return
    is_partial = (
        weights
        and not Path(source).expanduser().is_dir()
        and not any(folder.glob("*.safetensors*"))
    )
    try:
        # weights of a cached model may be fetched later
        check_folder(folder, weights=weights and not is_partial)
    except ModelError as error:
        yield _at(resolved, path, error)


def _at(resolved: Resolved, path: KeyPath, error: ModelError) -> ModelError:
    """The error with the place of the recipe that names the model;
    the message includes the file at fault."""
    message = f"{error.where}: {error.what}" if error.where else error.what
    return ModelError(message, where=str(resolved.origin(path)), hint=error.hint, code=error.code)


def _unreachable_stops(resolved: Resolved) -> Iterator[ModelError]:
    """Stop tokens beyond the vocabulary of the model that samples: no response could end there."""
    from rlcli.topology.configs import architecture_of

    errors: dict[str, ModelError] = {}
    for path, call in calls_of(resolved.recipe):
        generation = call.interface.args.get(GENERATION)
        stops = generation.get("stop_token_ids") if isinstance(generation, dict) else None
        if not stops or not resolved.recipe.models[call.model].has_weights:
            continue
        sizes = architecture_of(resolved, weights_origin(resolved.recipe, call.model))
        rows = math.inf if isinstance(sizes, str) else sizes.vocabulary
        if beyond := [id_ for id_ in stops if id_ >= rows]:
            where = resolved.origin((*path, "interface", "args", GENERATION, "stop_token_ids"))
            message = f"no token of models.{call.model} has the id {beyond[0]} of stop_token_ids"
            hint = f"its ids are below {rows}"
            errors.setdefault(str(where), ModelError(message, where=str(where), hint=hint))
    yield from errors.values()


def _too_large(resolved: Resolved) -> Iterator[ResourceError]:
    """Models whose weights alone exceed this machine's memory, if its devices use that memory: a
    role's share counts once per rank here."""
    from rlcli.topology.report import make_plan, parameters_of

    if not _is_on_cpu(resolved.recipe):
        return
    memory = host_memory().total
    plan = make_plan(resolved)
    shares = {role_memory.role: role_memory.resident.weights for role_memory in plan.memory.roles}
    for role, parameters in parameters_of(resolved.recipe, plan.sizes).items():
        here = [
            rank
            for rank in plan.topology.placement(role).ranks
            if rank < resolved.recipe.cluster.devices_per_node
        ]
        needed = len(here) * shares.get(role, 4 * parameters)
        if needed > memory:
            section = resolved.recipe.models[role]
            key = next(
                key for key in ("scratch", "path", "init") if getattr(section, key) is not None
            )
            message = (
                f"the weights of models.{role} take {needed / 2**30:,.0f} GiB; a run here has "
                f"{memory / 2**30:,.0f} GiB of memory"
            )
            where = str(resolved.origin(("models", role, key)))
            yield ResourceError(
                message, where=where, hint=f"rlcli plan {resolved.recipe.name} shows what it takes"
            )


def _is_on_cpu(recipe: Recipe) -> bool:
    return recipe.cluster.device == "cpu" or (
        recipe.cluster.device == "auto" and not visible_gpus()
    )
