"""Schemas of tools are those that chat templates expect, and arguments are checked against them."""

import math
from typing import Any, Literal, Optional, Union

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils import get_json_schema

from rlcli.api.tool_schema import MOST_PROBLEMS, check_arguments, tool_schema


def search(
    query: str,
    limit: int,
    sort: Literal["date", "size"],
    weights: list[float],
    filters: dict[str, int],
    within: Optional[int] = None,  # noqa: UP045
    exact: bool = False,
    spot: Union[str, int] = "here",  # noqa: UP007
):
    """
    Search the library.

    It has two lines.

    Args:
        query: What to find,
            in words.
        limit: How many at most.
        sort: The order.
        weights: A number for each field.
        filters: Field and value.
        within (int): How far.
        exact: Whether all words count.
        spot: Where: a name, or a number.

    Returns:
        What there is.
    """


class Desk:
    def write(self, text: str | list[str], options: dict, level: Literal[1, 2, "all"] = 1) -> str:
        """Write a text.

        Args:
            text: The text.
            options: Any options.
            level: How loud.
        """
        return str(text)

    def clear(self) -> None:
        """Clear the desk."""


@pytest.mark.parametrize("method", [search, Desk().write, Desk().clear, Desk.write])
def test_schemas_are_those_of_transformers(method):
    schema, expected = tool_schema(method), get_json_schema(method)
    for parameter in schema["function"]["parameters"]["properties"].values():
        parameter.pop("default", None)
    expected["function"].pop("return", None)
    for declared in (schema, expected):
        declared["function"]["parameters"].get("properties", {}).pop("return", None)
    assert schema == expected


def test_defaults_are_in_the_schema():
    parameters = tool_schema(search)["function"]["parameters"]["properties"]
    assert parameters["exact"]["default"] is False
    assert parameters["spot"]["default"] == "here"
    assert "default" not in parameters["within"]


def test_a_docstring_may_leave_arguments_out():
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    function = tool_schema(add)["function"]
    assert function["description"] == "Add two numbers."
    assert function["parameters"]["properties"] == {
        "a": {"type": "integer"},
        "b": {"type": "integer"},
    }


def untyped(a): ...
def with_star(*a: int): ...
def with_class(a: Desk): ...
def with_bytes_choice(a: Literal[b"x"]): ...
def with_number_keys(a: dict[int, str]): ...
def with_unknown(a: "Unknown"): ...  # noqa: F821


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (untyped, "untyped: the parameter a has no type hint"),
        (with_star, "with_star: a tool cannot have the parameter"),
        (with_class, "with_class: a has the type .*Desk.*, which JSON cannot express"),
        (with_bytes_choice, "choices that JSON cannot express"),
        (with_number_keys, "which JSON cannot express"),
        (with_unknown, "with_unknown has a type hint that is not defined"),
    ],
)
def test_a_method_that_no_model_could_call_is_refused(method, message):
    with pytest.raises(ValueError, match=message):
        tool_schema(method)


GOOD = {"query": "a", "limit": 1, "sort": "date", "weights": [1, 0.5], "filters": {"x": 1}}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, None),
        ({"within": None, "exact": True, "spot": 3}, None),
        ({"limit": "1"}, 'limit is "1"; it must be integer'),
        ({"limit": True}, "limit is true; it must be integer"),
        ({"limit": 1.0}, "limit is 1.0; it must be integer"),
        ({"limit": None}, "limit is null; it must be integer"),
        ({"sort": "name"}, 'sort is "name"; it must be one of "date", "size"'),
        ({"weights": [1, "x"]}, 'weights[1] is "x"; it must be number'),
        ({"weights": [math.nan]}, "weights[0] is NaN; it must be number"),
        ({"weights": "x"}, 'weights is "x"; it must be array'),
        ({"filters": {"x": "y"}}, 'filters.x is "y"; it must be integer'),
        ({"spot": 1.5}, "spot is 1.5; it must be integer or string"),
        ({"exact": 0}, "exact is 0; it must be boolean"),
        (
            {"colour": "red"},
            '"colour" is not an argument; the arguments are: query, limit, sort, weights, '
            "filters, within, exact, spot",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_described(changed, problem):
    assert check_arguments(search, GOOD | changed) == ([] if problem is None else [problem])


def test_missing_arguments_are_named():
    assert check_arguments(search, {"query": "a", "limit": 1, "sort": "date", "weights": []}) == [
        "filters is missing"
    ]


@pytest.mark.parametrize("arguments", [None, [], "text", 3, [[[]]] * 1000])
def test_arguments_must_be_an_object(arguments):
    (problem,) = check_arguments(search, arguments)
    assert problem.endswith("they must be a JSON object")
    assert len(problem) < 200


@pytest.mark.parametrize("value", ["x" * 10**6, ["x"] * 10**5, {"\n\x1b" * 1000: "x\n"}])
def test_problems_are_short_lines(value):
    for problem in check_arguments(search, GOOD | {"limit": value, "filters": value, "x\n": 1}):
        assert "\n" not in problem
        assert len(problem) < 300


def test_a_schema_of_someone_else_is_checked_as_far_as_it_is_known():
    schema = {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": ["integer", "null"], "minimum": 3},
                "b": {"$ref": "#/definitions/b"},
                "c": {"type": "object", "properties": {"d": {"type": "string"}}, "required": ["d"]},
            },
        },
    }
    assert check_arguments(schema, {"a": None, "b": object()}) == []
    assert check_arguments(schema, {"c": {"d": "x"}}) == []
    assert check_arguments(schema, {"c": {}}) == ["c.d is missing"]
    assert check_arguments({"name": "now"}, {}) == []
    assert check_arguments({"name": "now"}, {"a": 1}) == [
        '"a" is not an argument; the arguments are: none'
    ]


NUMBERS = st.one_of(st.integers(-5, 5), st.floats(-2, 2).filter(lambda x: x != int(x)))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(["date", "size", "x"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("xy"), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*GOOD, "within", "exact", "spot", "other"]), VALUES))
def test_what_is_accepted_is_valid_json_schema(changed: dict[str, Any]):
    parameters = tool_schema(search)["function"]["parameters"] | {"additionalProperties": False}
    parameters["properties"]["within"] = {"type": ["integer", "null"]}
    arguments = GOOD | changed
    problems = check_arguments(search, arguments)
    assert (not problems) == jsonschema.Draft202012Validator(parameters).is_valid(arguments)
    assert len(problems) <= MOST_PROBLEMS
