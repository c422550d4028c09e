"""What components declare in their classes, and which recipes are refused because of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli import registry
from rlcli.errors import RecipeError
from rlcli.recipe.components import dataset_keys, declared
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Component
from rlcli.recipe.warm_start import chain

GROUPED = """
from dataclasses import dataclass
from typing import ClassVar

from rlcli.api import model as model_api


class Base(model_api.ModelInterface):
    NEEDS_GROUP: ClassVar = {"train_step": ("4 if size=3", "2")}
    PLAIN = (1, 2)
    computed: ClassVar[int] = len("abc")


@dataclass
class Grouped(Base):
    size: int = 3

    READS: ClassVar = {"train_step": ("packed_input_ids",)}

    def train_step(self, model, data, mb_spec):
        return {}


model_api.register_interface("grouped", Grouped)
"""


@pytest.fixture
def project(folder: Path) -> Path:
    """A project with an interface that compares the responses to one prompt."""
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    (folder / "interfaces").mkdir()
    (folder / "interfaces" / "grouped.py").write_text(GROUPED)
    (folder / "grouped.yaml").write_text(
        "extends: ppo_math\ngraph: {actor_train: {interface: {type: grouped}}}\n"
    )
    return folder


def test_class_constants_are_read_without_importing(project: Path):
    constants = registry.signature("interfaces", "grouped").constants
    assert constants == {
        "NEEDS_GROUP": {"train_step": ("4 if size=3", "2")},
        "PLAIN": (1, 2),
        "READS": {"train_step": ("packed_input_ids",)},
    }
    assert declared("interfaces", "nowhere", "NEEDS_GROUP") is None
    keys = ("packed_input_ids", "prompt_mask", "prompt_lens")
    assert dataset_keys({"train": Component(type="paired")}, "train") == keys
    assert dataset_keys(
        {"train": Component(type="paired", args={"margin_key": "by"})}, "train"
    ) == (*keys, "margins")


def test_too_few_responses_for_a_grouped_interface_are_refused(project: Path):
    load_recipe("grouped")
    with pytest.raises(RecipeError, match="needs at least 4, but actor_gen makes 3") as caught:
        load_recipe("grouped", ["generation.responses_per_prompt=3"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where, problem.hint) == (
        "R49",
        "command line",
        "generation.responses_per_prompt=8",
    )
    load_recipe("grouped", ["generation.responses_per_prompt=5", "ppo.train_on_best=3"])
    load_recipe(
        "grouped", ["generation.responses_per_prompt=3", "graph.actor_train.interface.args.size=2"]
    )


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("grpo_math", ()),
        ("grpo_math", ("grpo.baseline=none",)),
        ("grpo_math", ("grpo.scale=none",)),
        ("ppo_math", ("ppo.group_adv_norm=true",)),
    ],
)
def test_comparing_responses_to_a_prompt_requires_two_of_them(
    recipe: str, settings: tuple[str, ...]
):
    load_recipe(recipe, [*settings, "generation.responses_per_prompt=2"])
    with pytest.raises(RecipeError, match="needs at least 2, but actor_gen makes 1"):
        load_recipe(recipe, [*settings, "generation.responses_per_prompt=1"])


def test_comparing_with_the_batch_allows_one_response_per_prompt():
    load_recipe(
        "grpo_math",
        ["grpo.baseline=batch", "grpo.scale=batch", "generation.responses_per_prompt=1"],
    )


def test_responses_longer_than_the_warm_start_model_allows_are_refused(folder: Path):
    chain(load_recipe("ppo_math"))
    with pytest.raises(RecipeError, match=r"512 positions of models\.actor") as caught:
        chain(load_recipe("ppo_math", ["generation.max_new_tokens=600"]))
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [
        ("R49", "command line")
    ]


def test_a_kv_cache_too_small_for_a_response_is_refused(folder: Path):
    setting = "models.actor.backend.args.kv_cache_tokens="
    load_recipe("ppo_math", [f"{setting}104"])
    with pytest.raises(RecipeError, match="a KV cache of 103 tokens has no room") as caught:
        load_recipe("ppo_math", [f"{setting}103"])
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("R49", "command line")
    assert problem.hint == "use at least 104"
    with pytest.raises(RecipeError, match="kv_cache_tokens"):
        load_recipe("ppo_math", [f"{setting}0"])


def test_only_a_row_limit_set_by_the_user_is_checked_against_the_model(folder: Path):
    """Only a limit that somebody chose is checked against the model's positions."""
    (folder / "rows.jsonl").write_text("")
    settings = [
        "models.actor.scratch={model_type: llama, max_position_embeddings: 300}",
        "models.actor.path=null",
        "models.actor.tokenizer=builtin:arithmetic",
        "datasets.train={type: math_prompts, args: {path: rows.jsonl}}",
        "train.eval.dataset=null",
    ]
    load_recipe("ppo_math", settings)
    with pytest.raises(RecipeError, match="at most 236"):
        load_recipe(
            "ppo_math",
            [*settings[:3], settings[3].replace("}}", ", max_length: 250}}"), settings[4]],
        )
