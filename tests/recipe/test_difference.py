"""Differences of recipes: general properties of any two, and how they are grouped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.recipe.introspection.difference import (
    Values,
    differences,
    grouped,
    sections_of_one,
    values_of,
)
from rlcli.recipe.resolve import load_recipe

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.text("ab", max_size=2),
    st.lists(st.integers(0, 2)),
)
values = st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), plain).map(
    lambda of: Values(of, {})
)


@given(values)
def test_a_recipe_does_not_differ_from_itself(recipe):
    assert differences(recipe, recipe) == []


@given(values, values)
def test_exchanging_the_recipes_inverts_each_difference(left, right):
    forth = {d.key: d for d in differences(left, right)}
    back = {d.key: d for d in differences(right, left)}
    assert forth.keys() == back.keys()
    turned = {"added": "removed", "removed": "added", "changed": "changed"}
    for key, difference in forth.items():
        assert (back[key].before, back[key].now) == (difference.now, difference.before)
        assert back[key].kind == turned[difference.kind]


@given(values, values)
def test_applying_the_differences_gives_the_other_recipe(left, right):
    result = dict(left.of)
    for difference in differences(left, right):
        path = tuple(difference.key.split("."))
        if difference.kind == "removed":
            del result[path]
        else:
            result[path] = difference.now
    assert result == right.of


@given(values, values)
def test_groups_hold_every_difference_once(left, right):
    ungrouped = differences(left, right)
    assert sorted(d.key for group in grouped(ungrouped) for d in group.differences) == sorted(
        d.key for d in ungrouped
    )


def test_true_differs_from_1_but_1_does_not_differ_from_1_0():
    left, right = (Values({("a", "x"): value, ("a", "y"): 1}, {}) for value in (True, 1))
    assert [d.key for d in differences(left, right)] == ["a.x"]
    assert differences(Values({("a",): 1}, {}), Values({("a",): 1.0}, {})) == []


def test_the_same_change_at_several_keys_is_one_group():
    origins = {"g.a.kl": "f:1:1", "g.b.kl": "f:1:1"}
    before = Values({("g", "a", "kl"): 1, ("g", "b", "kl"): 1}, origins)
    now = Values({("g", "a", "kl"): 2, ("g", "b", "kl"): 2}, origins)
    (group,) = grouped(differences(before, now))
    assert group.pattern == "g.*.kl"


def test_sections_that_only_one_recipe_has_are_found():
    before, now = (
        Values({("m", "a", "x"): 1, ("m", "b"): None}, {}),
        Values({("m", "b", "x"): 1}, {}),
    )
    assert sections_of_one(differences(before, now), before, now) == {
        "m.a.x": "m.a",
        "m.b.x": "m.b",
    }


@pytest.mark.parametrize("args", ["text", ["list"], 3])
def test_arguments_of_another_type_in_a_recipe_that_was_not_checked_are_compared_as_they_are(args):
    recipe = load_recipe("sft_math").recipe.model_dump(mode="json")
    recipe["models"]["actor"]["backend"]["args"] = args
    compared = values_of(recipe, {}).of
    assert any(key[:4] == ("models", "actor", "backend", "args") for key in compared)
