"""Differences of recipes: laws that hold for any two, and how they are put together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlcli.recipe.introspection.difference import Values, differences, grouped, sections_of_one

plain = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.text("ab", max_size=2), st.lists(st.integers(0, 2)))
values = st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), plain).map(
    lambda of: Values(of, {})
)


@given(values)
def test_nothing_differs_from_itself(one):
    assert differences(one, one) == []


@given(values, values)
def test_seen_from_the_other_side_each_difference_is_turned_round(one, other):
    there = {d.key: d for d in differences(one, other)}
    back = {d.key: d for d in differences(other, one)}
    assert there.keys() == back.keys()
    turned = {"added": "removed", "removed": "added", "changed": "changed"}
    for key, found in there.items():
        assert (back[key].before, back[key].now) == (found.now, found.before)
        assert back[key].kind == turned[found.kind]


@given(values, values)
def test_the_differences_applied_to_one_give_the_other(one, other):
    result = dict(one.of)
    for found in differences(one, other):
        path = tuple(found.key.split("."))
        if found.kind == "removed":
            del result[path]
        else:
            result[path] = found.now
    assert result == other.of


@given(values, values)
def test_groups_hold_every_difference_once(one, other):
    found = differences(one, other)
    assert sorted(d.key for group in grouped(found) for d in group.differences) == sorted(d.key for d in found)


def test_true_and_1_differ_but_1_and_1_0_do_not():
    one, other = (Values({("a", "x"): value, ("a", "y"): 1}, {}) for value in (True, 1))
    assert [d.key for d in differences(one, other)] == ["a.x"]
    assert differences(Values({("a",): 1}, {}), Values({("a",): 1.0}, {})) == []


def test_one_value_at_many_keys_is_one_group():
    origins = {"g.a.kl": "f:1:1", "g.b.kl": "f:1:1"}
    one = Values({("g", "a", "kl"): 1, ("g", "b", "kl"): 1}, origins)
    other = Values({("g", "a", "kl"): 2, ("g", "b", "kl"): 2}, origins)
    (group,) = grouped(differences(one, other))
    assert group.pattern == "g.*.kl"


def test_a_section_of_one_side_is_found():
    one, other = Values({("m", "a", "x"): 1, ("m", "b"): None}, {}), Values({("m", "b", "x"): 1}, {})
    assert sections_of_one(differences(one, other), one, other) == {"m.a.x": "m.a", "m.b.x": "m.b"}
