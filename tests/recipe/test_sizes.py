"""Recipes of absurd sizes and numbers: refused or planned quickly, for any number and any key."""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest

from rlcli.errors import RecipeError, RlcliError
from rlcli.recipe.components import signature_of
from rlcli.recipe.resolve import Resolved, load_recipe
from rlcli.topology.report import make_plan, plan_json
from rlcli.topology.text import plan_lines

SECONDS, BYTES = 2.0, 512 << 20
"""The processor time and memory that a recipe may cost before it is refused or planned."""
RECIPES = ("ppo_math", "sft_math", "ppo_gsm8k", "sft_gsm8k")
ABSURD = ("0", "-1", "1000000000000", "1e300", "1" + "0" * 300)
MANY = 9_000


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """The keys of a recipe that hold a number, or nothing."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, (*path, str(key)))
    elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        yield ".".join(path)


def arguments(resolved: Resolved) -> Iterator[str]:
    """The keys of all arguments of its components, set or not."""
    recipe = resolved.recipe
    named = [
        *(
            ("datasets", f"datasets.{name}", dataset.type)
            for name, dataset in recipe.datasets.items()
        ),
        *(
            ("backends", f"models.{name}.backend", role.backend.type)
            for name, role in recipe.models.items()
        ),
        *(
            ("interfaces", f"graph.{name}.interface", call.interface.type)
            for name, call in recipe.graph.items()
        ),
    ]
    for kind, path, component in named:
        yield from (
            f"{path}.args.{argument.name}" for argument in signature_of(kind, component).arguments
        )


@pytest.fixture(autouse=True)
def as_on_the_command_line():
    """The command line does not collect garbage; here that would go through the objects of all
    other tests."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder in which the shipped recipes find their files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return tmp_path


def usable(name: str) -> list[str]:
    """Overrides that name the data files of a shipped recipe."""
    if "gsm8k" not in name:
        return []
    return [f"datasets.{dataset}.args.path=rows.jsonl" for dataset in ("train", "held_out", "test")]


def loadable(name: str) -> tuple[Resolved, list[str]]:
    """A shipped recipe, and the overrides that its files need here."""
    overrides: list[str] = []
    for override in usable(name):
        try:
            load_recipe(name, [*overrides, override])
        except RecipeError:
            continue  # it has no such dataset
        except RlcliError:
            pass  # another file is missing still
        overrides.append(override)
    return load_recipe(name, overrides), overrides


def numeric_keys(resolved: Resolved) -> dict[str, None]:
    keys = [
        *numbers(resolved.to_json()),
        *arguments(resolved),
        "ppo.minibatches",
        "ppo.generation_size",
    ]
    return dict.fromkeys(keys)


@pytest.mark.exhaustive
@pytest.mark.timeout(400)  # many hundred recipes, perhaps on a busy machine
@pytest.mark.parametrize("name", RECIPES)
def test_absurd_numbers_are_refused_or_planned_within_time_and_memory(data, name):
    resolved, overrides = loadable(name)
    keys = numeric_keys(resolved)
    assert len(keys) > 60
    tried = {
        key
        for earlier in RECIPES[: RECIPES.index(name)]
        for key in numeric_keys(loadable(earlier)[0])
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused: dict[str, RlcliError] = {}
    for key in keys:
        # all of them once, and one in every recipe
        for value in ABSURD if key not in tried else ABSURD[2:3]:
            began = time.process_time()
            try:
                plan = make_plan(load_recipe(name, [*overrides, f"{key}={value}"], fresh=False))
                json.dumps(plan_json(plan))
                list(plan_lines(plan))
            except RlcliError as error:
                refused[f"{key}={value}"] = error
            assert time.process_time() - began < SECONDS, f"{key}={value}"
    assert {
        key: error for key, error in refused.items() if error.exit_code not in (2, 4, 5, 6)
    } == {}
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES


CROWDS = {
    "keys at the top": "".join(f"k{i}: 1\n" for i in range(MANY)),
    "keys of a block": "ppo:\n" + "".join(f"  k{i}: 1\n" for i in range(MANY)),
    "numbers that are not finite": "log:\n" + "".join(f"  k{i}: .nan\n" for i in range(MANY // 2)),
    "keys set twice": "".join("seed: 1\n" for _ in range(MANY)),
    "mappings": "".join(f"k{i}: {{a: 1}}\n" for i in range(MANY // 4)),
    "references": "models:\n actor:\n  scratch:\n"
    + "".join(f"   k{i}: ${{seed}}\n" for i in range(MANY // 2)),
    "a chain of references": "b:\n  k0: 1\n"
    + "".join(f"  k{i}: ${{b.k{i - 1}}}\n" for i in range(1, MANY // 2)),
    "keys that a call writes": (
        f"graph: {{gen: {{outputs: [{', '.join(f'o{i}' for i in range(MANY))}]}}}}\n"
    ),
    "keys that a call reads": (
        f"graph: {{sft_train: {{inputs: [{', '.join(f'o{i}' for i in range(MANY))}]}}}}\n"
    ),
    "arguments": (
        f"datasets: {{train: {{args: {{{', '.join(f'k{i}: 1' for i in range(MANY // 2))}}}}}}}\n"
    ),
    "roles": "models:\n" + "".join(f"  m{i}: {{path: a/b}}\n" for i in range(MANY // 4)),
    "roles from each other": "models:\n"
    + "".join(f"  m{i}: {{init: m{i + 1}}}\n" for i in range(250)),
    "a long text": f"log: {{dir: '{'x/' * 400_000}'}}\n",
    "a long path": f"log: {{dir: '{'x/' * 30_000}'}}\n",
    "unclosed references": f"log: {{dir: '{'${' * 400_000}'}}\n",
}


@pytest.mark.parametrize("crowd", CROWDS)
def test_thousands_of_entries_are_refused_or_loaded_within_two_seconds(folder, crowd):
    (folder / "bad.yaml").write_text("extends: small\n" + CROWDS[crowd])
    began = time.process_time()
    with suppress(RecipeError):
        load_recipe("bad.yaml")
    assert time.process_time() - began < SECONDS


def test_sixty_thousand_keys_in_many_layers_are_refused_quickly(folder):
    names = [f"layer{i}" for i in range(8)]
    for name in names:
        (folder / f"{name}.yaml").write_text("".join(f"{name}_{i}: 1\n" for i in range(7_500)))
    (folder / "bad.yaml").write_text(f"extends: [small, {', '.join(names)}]\n")
    began = time.process_time()
    with pytest.raises(RecipeError, match="more than 10000 values"):
        load_recipe("bad.yaml")
    assert time.process_time() - began < SECONDS


def test_more_than_a_thousand_overrides_are_refused(folder):
    began = time.process_time()
    with pytest.raises(RecipeError, match="12000 overrides; at most 1000") as caught:
        load_recipe(
            "small", [f"models.actor.scratch.rope_parameters.k{i}=1" for i in range(12_000)]
        )
    assert caught.value.exit_code == 2
    assert load_recipe(
        "small", [f"models.actor.scratch.rope_parameters.k{i}=1" for i in range(1_000)]
    )
    assert time.process_time() - began < SECONDS


def test_a_cluster_of_absurd_size_is_refused(folder, refusal):
    assert refusal("extends: small\ncluster: {devices_per_node: 100000000}\n") == [
        ("R35", "bad.yaml:2:29")
    ]
    assert ("R49", "bad.yaml:2:18") in refusal(
        "extends: small\ncluster: {nodes: 4096, devices_per_node: 1024}\n"
    )
