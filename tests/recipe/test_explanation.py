"""What `explain` claims about a change, compared with what a change does."""

from __future__ import annotations

import dataclasses

import pytest

from rlcli.errors import RlcliError
from rlcli.recipe.introspection.explanation import Explanation, explain, known_values
from rlcli.recipe.parsing.tree import dotted
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import SECTIONS
from rlcli.topology import plan_topology

RECIPES = ["ppo_math", "sft_math"]


def another_value(value: object) -> str | None:
    """Another value of the same kind, as an override; None where there is no telling which would be
    legal."""
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int) and value > 0:
        return str(value * 2)
    if isinstance(value, float) and value > 0:
        return str(value / 2)
    return None


@pytest.mark.parametrize(
    ("recipe", "sections"),
    [
        ("ppo_math", ("generation", "cluster")),
        ("sft_math", ("train", "cluster", "models", "graph", "log")),
    ],
)
def test_explain_names_the_keys_that_change_topology_or_batch(recipe, sections):
    resolved = load_recipe(recipe)
    before = plan_topology(resolved.recipe)
    tried = 0
    for path, value in known_values(resolved).items():
        text = another_value(value)
        if path[0] not in sections or text is None or "scratch" in path:
            continue
        overrides = [f"{dotted(path)}={text}"]
        if path[0] == "cluster":
            overrides.append("launch=local")
        try:
            after = plan_topology(load_recipe(recipe, overrides).recipe)
        except RlcliError:  # not every other value is legal
            continue
        tried += 1
        explanation = explain(resolved, dotted(path))
        assert isinstance(explanation, Explanation)
        if dataclasses.replace(after, batch=before.batch) != before:
            assert explanation.topology == "topology", path
        elif after.batch != before.batch:
            assert explanation.topology == "batch", path
        else:
            assert explanation.topology != "topology", path
    assert tried > 3


@pytest.mark.parametrize("recipe", RECIPES)
def test_at_most_one_step_wins_for_every_key(recipe):
    resolved = load_recipe(recipe, ["seed=9"])
    for path in known_values(resolved):
        explanation = explain(resolved, dotted(path))
        assert isinstance(explanation, Explanation)
        assert sum(step.wins for step in explanation.steps) <= 1
        assert any(step.wins for step in explanation.steps) or not explanation.steps, path
    assert explain(resolved, "seed").value == 9


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("ppo_math", "ppo.kl_ctl"),
        ("ppo_math", "ppo.eps_clip"),
        ("ppo_math", "generation.temperature"),
        ("ppo_math", "models.critic.backend.args.lr"),
        ("sft_math", "models.actor.backend.args.weight_decay"),
    ],
)
def test_an_override_changes_exactly_the_explained_uses(recipe, key):
    resolved = load_recipe(recipe)
    before = known_values(resolved)
    path = tuple(key.split("."))
    value = before[path]
    explanation = explain(resolved, key)
    assert isinstance(explanation, Explanation)
    after = known_values(load_recipe(recipe, [f"{key}={value / 2}"]))
    changed = {
        dotted(path) for path in after if after[path] != before[path] and path[0] in SECTIONS
    }
    assert changed - {key} == {use.key for use in explanation.uses} - {key}
