"""Scales a recipe down: the same graph, interfaces and backends, on the CPU,
with tiny models and a few rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcli import registry
from rlcli.api import model as model_api
from rlcli.api.architecture import Architecture
from rlcli.api.key_meaning import REWARDS, SOLVED
from rlcli.api.model import Model, ModelInterface
from rlcli.errors import RlcliError
from rlcli.launch.drive import Finished
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.parsing.write import to_yaml
from rlcli.recipe.resolve import Resolved, load_recipe
from rlcli.recipe.role_sources import tokenizer_source
from rlcli.recipe.schema import Component, Recipe
from rlcli.recipe.warm_start import warm_starts
from rlcli.topology import plan_topology
from rlcli.topology.configs import architecture_of, cached_folder

STEPS = 2
NEW_TOKENS = 8
ROWS = 16
"""Minimum number of rows of each dataset."""
NO_CHECKPOINTS = {
    "every_steps": None, "every_epochs": None, "every_seconds": None, "at_end": False,
    "keep_best": 0,
}  # fmt: skip
FEW_PARAMETERS = 3_000_000
BYTES_PER_TOKEN = 8
"""Maximum number of byte tokens per token of the real tokenizer."""

TINY_MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": True,
}
TINY_MIXTURE = TINY_MODEL | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
"""In place of a mixture of experts, which some settings need."""


@dataclass(frozen=True)
class SmokeRun:
    """The results of two steps."""

    finished: Finished
    recipe: Recipe
    """The scaled-down recipe."""
    replaced: tuple[str, ...]
    """What is not available here and was replaced, in words."""
    own_models: tuple[str, ...]
    """Roles with the random weights of the recipe itself, because they are few."""


def run_two_steps(resolved: Resolved, folder: Path, exchanged_rewards: bool = False) -> SmokeRun:
    """Train the scaled-down recipe for two steps in `folder`; `exchanged_rewards`: each response
    gets the reward of the one before it. Raises whatever the run raises."""
    small, replaced = make_small(resolved, folder)
    rewards = _some_better_than_others(shift=int(exchanged_rewards))
    with open(os.devnull, "w", encoding="utf-8") as nowhere, rewards:
        finished = run_recipe(small, folder / "run", PlainDisplay(nowhere, quiet=True))
    return SmokeRun(finished, small.recipe, replaced, tuple(_own_models(resolved)))


@contextmanager
def _some_better_than_others(shift: int) -> Iterator[None]:
    """A tiny model solves nothing, so a rule gives all its answers the same reward, from which
    nothing can be learned, and so does a reward model whose head begins at 0. In that case the
    interface's mock rewards are used instead; to episodes that an environment rewards, and by a
    reward model, by turns 0 and 1. `shift`: how many responses further on each reward goes."""
    real = model_api.call_interface

    def call_interface(
        interface: ModelInterface, call: str, model: Model, data: Any, *rest: Any
    ) -> Any:
        output = real(interface, call, model, data, *rest)
        rewards = output.data.get(REWARDS) if call in ("inference", "generate") else None
        if rewards is not None and len(rewards.unique()) == 1:
            if call == "inference" and model.module is None:
                output = interface.mock(call, model, data)
            else:
                output.data[REWARDS] = torch.arange(len(rewards)).to(rewards) % 2
        for key in {REWARDS, SOLVED} & output.keys if rewards is not None else ():
            output.data[key] = output.data[key].roll(shift)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlcli.runtime.worker.call_interface", call_interface)
        yield


def make_small(resolved: Resolved, folder: Path) -> tuple[Resolved, tuple[str, ...]]:
    """The small recipe, written to `folder`, and what was replaced because it is not available on
    this machine."""
    document = resolved.to_json()
    prompts = max(2, *plan_topology(resolved.recipe).batch.minibatches.values())
    tokenizers = _Tokenizers(folder)
    _shrink_models(document["models"], resolved, tokenizers)
    for dataset in document["datasets"].values():
        _cut_rows(dataset, max(ROWS, STEPS * prompts), has_byte_tokens=bool(tokenizers.replaced))
    for section in ("generation", "graph", "train"):
        _shorten(document[section])
    _shorten_training(document["train"], prompts)
    document |= {"cluster": {"device": "cpu"}, "launch": {"type": "inline"}}
    document["checkpoint"] |= NO_CHECKPOINTS
    document["log"] |= {"dir": str(folder / "runs"), "trackers": [], "plot": False}
    file = folder / f"{resolved.recipe.name}.yaml"
    file.write_text(to_yaml(document), encoding="utf-8")
    return load_recipe(file), tuple(tokenizers.replaced)


def _shrink_models(
    models: dict[str, dict[str, Any]], resolved: Resolved, tokenizers: _Tokenizers
) -> None:
    """Tiny models on one rank, those of one path as copies of one."""
    own_models, first_with = _own_models(resolved), dict[str, str]()
    for name, role in models.items():
        if first_with.setdefault(role["path"], name) != name and role["path"] is not None:
            role |= {"path": None, "init": first_with[role["path"]]}
        elif role["path"] is not None or role["scratch"] is not None:
            if name not in own_models:
                role |= {"path": None, "scratch": _tiny(resolved, name)}
            role["tokenizer"] = tokenizers.local(*_source(resolved, name))
        elif role["tokenizer"] is not None:
            role["tokenizer"] = tokenizers.local(resolved, role["tokenizer"])
        role |= {"backend": _runnable(role["backend"]), "mesh": {}, "devices": None}


def _shorten_training(train: dict[str, Any], prompts: int) -> None:
    """A few steps of a few prompts, without evaluations."""
    train |= {"steps": STEPS, "epochs": None, "prompts_per_step": prompts}
    train["microbatches"] = min(train["microbatches"], 2)
    train["eval"] |= {"every_steps": None, "at_start": False}


def _own_models(resolved: Resolved) -> list[str]:
    """The roles that the recipe starts from scratch, with so few parameters that they need no tiny
    model in their place."""
    sizes = {
        name: architecture_of(resolved, name)
        for name, role in resolved.recipe.models.items()
        if role.scratch is not None
    }
    return [
        name
        for name, size in sizes.items()
        if isinstance(size, Architecture) and size.parameters() <= FEW_PARAMETERS
    ]


def _tiny(resolved: Resolved, role: str) -> dict[str, Any]:
    """The configuration in place of that of a role's model."""
    sizes = architecture_of(resolved, role)
    is_mixture = isinstance(sizes, Architecture) and sizes.experts > 0
    return TINY_MIXTURE if is_mixture else TINY_MODEL


def _source(resolved: Resolved, role: str) -> tuple[Resolved, str]:
    """The recipe that provides a role's tokenizer, at the end of its warm starts,
    and the source as named there."""
    source = tokenizer_source(resolved.recipe, role)
    if not source.startswith("recipe:"):
        return resolved, source
    start = next(
        start
        for start in warm_starts(resolved)
        if resolved.recipe.models[start.role].path == source
    )
    return _source(start.source, start.source_role)


def _runnable(backend: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The backend, or the default in place of one that cannot be loaded here,
    or whose calls run elsewhere."""
    if backend is None:
        return None
    try:
        backend_class = registry.load("backends", backend["type"])
    except RlcliError:
        return None
    return None if getattr(backend_class, "POOLED", False) else backend


def _cut_rows(dataset: dict[str, Any], rows: int, has_byte_tokens: bool) -> None:
    """Limit the dataset to a few rows, if it has such an argument;
    allow longer rows if tokens are bytes."""
    takes = {
        argument.name: argument.default
        for argument in registry.signature("datasets", dataset["type"]).arguments
    }
    args = dataset["args"]
    for name in ("max_rows", "problems"):
        if name in takes:
            args[name] = min(rows, args.get(name) or rows)
    if has_byte_tokens and "max_length" in takes:
        args["max_length"] = BYTES_PER_TOKEN * int(args.get("max_length") or takes["max_length"])


def _shorten(section: Any) -> None:
    """Limit responses to a few tokens, wherever a section sets their length."""
    if isinstance(section, list):
        for item in section:
            _shorten(item)
    if isinstance(section, dict):
        for name in ("max_new_tokens", "min_new_tokens"):
            if isinstance(section.get(name), int):
                section[name] = min(section[name], NEW_TOKENS)
        for inner in section.values():
            _shorten(inner)


class _Tokenizers:
    """Tokenizers available on this machine; a byte tokenizer for any other."""

    def __init__(self, folder: Path):
        self._bytes = folder / "tokenizer"
        self.replaced: list[str] = []

    def local(self, resolved: Resolved, source: str) -> str:
        """A source that can be read here."""
        if source.startswith("builtin:") or Path(source).expanduser().is_dir():
            return source
        cached = cached_folder(source)
        if cached is not None and (cached / "tokenizer_config.json").is_file():
            return str(cached)
        if source not in self.replaced:
            self.replaced.append(source)
        if not self._bytes.exists():
            from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

            as_transformers(byte_tokenizer(chat=True)).save_pretrained(self._bytes)
        return str(self._bytes)


def write_rows(component: Component, file: Path) -> None:
    """Write the example rows of the dataset's class, or of the first kind of rows that it finds
    columns for, with fields named as in the recipe."""
    kinds = component.args.get("kind") or component.type
    described = registry.signature("datasets", kinds if isinstance(kinds, str) else kinds[0])
    names = {
        argument.default: component.args.get(argument.name, argument.default)
        for argument in described.arguments
        if argument.name.endswith("_key")
    }
    examples = described.constants.get("EXAMPLES") or ()
    rows = [{names.get(key, key): value for key, value in row.items()} for row in examples]
    lines = (json.dumps(rows[number % len(rows)]) + "\n" for number in range(ROWS if rows else 0))
    file.write_text("".join(lines), encoding="utf-8")
