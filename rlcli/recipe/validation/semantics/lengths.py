"""Checks that sequences fit into the model's positions and the KV cache,
and groups into a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

from rlcli.api.key_meaning import SEQUENCES
from rlcli.recipe.components import dataset_keys
from rlcli.recipe.graph import graphs_of, tokens_of_microbatch
from rlcli.recipe.lengths import (
    cache_of,
    generation_of,
    keeps_groups,
    limit_of_rows,
    positions_of,
    responses_of,
    scores_sequences,
)
from rlcli.recipe.parsing.tree import KeyPath, dotted
from rlcli.recipe.schema import Call
from rlcli.recipe.validation.semantics.notes import Notes

CAP = "max_tokens_per_microbatch"
NEW_TOKENS = ("generation", "max_new_tokens")
RESPONSES = ("generation", "responses_per_prompt")
NEW_TOKENS_OF_CALL = ("interface", "args", *NEW_TOKENS)
"""Where a call has its own limit of new tokens."""


def check(notes: Notes) -> None:
    for path, calls, dataset in graphs_of(notes.recipe):
        for name, call in calls.items():
            if call.call == "generate" and dataset is not None:
                _positions(notes, call, (*path, name), dataset)
                _cache(notes, call, (*path, name), dataset)
    for name, call in notes.recipe.graph.items():
        if call.call == "train_step":
            _rows(notes, call, ("graph", name))
        if call.call == "generate":
            _micro_batches(notes, call, ("graph", name))


def _positions(notes: Notes, call: Call, path: KeyPath, dataset: str) -> None:
    """Check prompt and response against `max_position_embeddings` of the generating role."""
    limit = positions_of(notes.recipe, call.model, notes.positions)
    prompt, new = _limit_of_dataset(notes, dataset), _new_tokens(notes, call)
    if limit is None or new is None:
        return
    positions, role = limit
    if (prompt or 1) + new <= positions:
        return
    row, of_call = _row_length(dataset), (*path, *NEW_TOKENS_OF_CALL)
    message = (
        f"{_sequences(prompt, new)} do not fit into the {positions} positions of models.{role}"
    )
    shorter = positions - new if prompt else 0
    hint = _limits({"max_new_tokens": positions - (prompt or 1), dotted(row): shorter})
    where = notes.first_set(of_call, NEW_TOKENS, row, path)
    needs = [("models", role), ("datasets", dataset), (*path, "model"), of_call]
    notes.note_once(("positions", new, role), "R49", message, where, hint, needs)


def _sequences(prompt: int | None, new: int) -> str:
    """`prompts of up to 8 tokens and responses of up to 16`."""
    prompts = f"prompts of up to {prompt} tokens and " if prompt else ""
    return f"{prompts}responses of up to {new}"


def _row_length(dataset: str) -> KeyPath:
    """The key that limits the tokens of a row."""
    return ("datasets", dataset, "args", "max_length")


def _new_tokens(notes: Notes, call: Call) -> int | None:
    """The most tokens of a response, if a number is set."""
    new = generation_of(notes.recipe, call)["max_new_tokens"]
    return new if isinstance(new, int) else None


def _limits(sizes: Mapping[str, int]) -> str | None:
    """`use a of at most 4, or b of at most 8`; None if no size is positive."""
    limits = [f"{key} of at most {size}" for key, size in sizes.items() if size > 0]
    return f"use {', or '.join(limits)}" if limits else None


def _limit_of_dataset(notes: Notes, dataset: str) -> int | None:
    """The most tokens in a row, if a dataset limits them."""
    component = notes.recipe.datasets.get(dataset)
    return limit_of_rows(component) if component else None


def _cache(notes: Notes, call: Call, path: KeyPath, dataset: str) -> None:
    """Check one response and its prompt against the KV cache of the generating role."""
    room = cache_of(notes.recipe, call.model)
    new = _new_tokens(notes, call)
    prompt = _limit_of_dataset(notes, dataset) or 1
    if room is None or new is None or prompt + new <= room:
        return
    message = (
        f"a KV cache of {room} tokens has no room for a prompt of {prompt} and a response of {new}"
    )
    needs = [
        ("datasets", dataset),
        (*path, "model"),
        (*path, *NEW_TOKENS_OF_CALL),
        NEW_TOKENS,
    ]
    where = ("models", call.model, "backend", "args", "kv_cache_tokens")
    notes.note_once(
        ("cache", room, call.model), "R49", message, where, f"use at least {prompt + new}", needs
    )


def _rows(notes: Notes, call: Call, path: KeyPath) -> None:
    """Check rows that are whole sequences against the positions of the role trained on them."""
    dataset = notes.recipe.train.dataset
    model_limit = positions_of(notes.recipe, call.model, notes.positions)
    limit = _limit_of_dataset(notes, dataset)
    if model_limit is None or limit is None:
        return
    positions, role = model_limit
    if limit <= positions:
        return
    if SEQUENCES not in (dataset_keys(notes.recipe.datasets, dataset) or ()):
        return
    message = (
        f"rows of up to {limit} tokens do not fit into the {positions} positions of models.{role}"
    )
    needs = [("models", role), ("datasets", dataset), (*path, "model")]
    where, hint = _row_length(dataset), f"use at most {positions}"
    notes.note_once(("rows", limit, role), "R49", message, where, hint, needs)


def _micro_batches(notes: Notes, call: Call, path: KeyPath) -> None:
    """All responses to a prompt are one sample, which may be cut only for interfaces that allow
    it."""
    new = _new_tokens(notes, call)
    if new is None:
        return
    recipe, responses = notes.recipe, responses_of(notes.recipe, call)
    for name, reader in recipe.graph.items():
        together = responses if keeps_groups(reader) else 1
        is_too_long = together * new > tokens_of_microbatch(recipe, reader)
        if is_too_long and scores_sequences(recipe, reader):
            _too_long(notes, name, path, together, new)


def _too_long(notes: Notes, reader: str, sampler: KeyPath, together: int, new: int) -> None:
    """Report responses of `new` tokens, `together` of which do not fit into a micro-batch of a call
    that reads them."""
    recipe, cap_path = notes.recipe, ("graph", reader, CAP)
    cap = tokens_of_microbatch(recipe, recipe.graph[reader])
    prompt = _limit_of_dataset(notes, recipe.train.dataset) or 0
    group = f"a prompt's {together} responses" if together > 1 else "a response"
    message = f"a micro-batch holds {cap} tokens; {group} of up to {new} must fit into one"
    hint = f"use at least {together * (prompt + new)}"
    where = notes.first_set(cap_path, ("train", CAP), RESPONSES, NEW_TOKENS, sampler)
    needs = [cap_path, ("generation",), (*sampler, "interface")]
    notes.note_once(("cap", cap), "R49", message, where, hint, needs)
