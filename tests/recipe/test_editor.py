"""The entry that goes into somebody's settings: nothing else of the text changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.recipe.introspection.editor import SETTING, with_entry

OURS = {"./.rlcli/recipe.schema.json": ["recipes/**/*.yaml"]}

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), plain, max_size=4), st.sampled_from([None, 2, 4, "\t"]))
def test_existing_settings_are_kept(settings, indent):
    text = json.dumps(settings, indent=indent)
    result = with_entry(text)
    assert result is not None
    assert json.loads(result) == {**settings, SETTING: OURS}
    assert with_entry(result) == result


@given(st.dictionaries(st.text(max_size=8), st.lists(st.text(max_size=5), max_size=2), max_size=3))
def test_other_schemas_are_kept(schemas):
    result = with_entry(json.dumps({"a": 1, SETTING: schemas, "b": {SETTING: 3}}, indent=4))
    assert result is not None
    assert json.loads(result) == {"a": 1, SETTING: {**OURS, **schemas}, "b": {SETTING: 3}}


def test_comments_trailing_commas_and_line_ends_are_kept():
    text = (
        '// mine\r\n{\r\n  /* "yaml.schemas": {} */\r\n  "a": "// no comment, }", // yes\r\n  '
        '"b": [1, 2,],\r\n}\r\n'
    )
    result = with_entry(text)
    assert result is not None
    assert f'\r\n  "{SETTING}": {json.dumps(OURS)},\r\n' in result
    assert result.replace(f'\r\n  "{SETTING}": {json.dumps(OURS)},', "") == text


@pytest.mark.parametrize("text", ["", "  \n", "{}", "{\n}", "{ }\n", "// only\n{\n  // here\n}\n"])
def test_an_entry_is_added_to_empty_settings(text):
    result = with_entry(text)
    assert result is not None
    assert SETTING in result
    assert with_entry(result) == result


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"a": 1} extra', '{"yaml.schemas": []}', "{'a': 1}", "null"]
)
def test_unreadable_settings_are_left_alone(text):
    assert with_entry(text) is None


def test_a_users_own_entry_for_the_schema_is_kept():
    text = '{"yaml.schemas": {".rlcli/recipe.schema.json": "mine/*.yaml"}}'
    assert with_entry(text) == text
