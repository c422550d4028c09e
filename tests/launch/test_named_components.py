"""Components that the command line names: read as in a recipe."""

from __future__ import annotations

import pytest

from rlcli.errors import UsageError
from rlcli.launch.components import read_component


def test_values_are_those_of_a_recipe():
    text = (
        "{type: game, args: {bonus: -1e-1, word: on, time: '1:30', day: 2026-01-01, limit: null}}"
    )
    args = {"bonus": -0.1, "word": "on", "time": "1:30", "day": "2026-01-01", "limit": None}
    assert read_component(text, "--environment") == {"type": "game", "args": args}
    assert read_component("game", "--environment") == {"type": "game"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{type: [game]}", "names no component"),
        ("{type: game, args: [1]}", "names no component"),
        ("{args: {}}", "names no component"),
        ("{type: game", "is never closed"),
        ("{type: game, type: other}", "set twice"),
        ("{type: !!python/name:os.system x}", "tags are not allowed"),
    ],
)
def test_what_names_no_component_is_refused(text, says):
    with pytest.raises(UsageError, match=says):
        read_component(text, "--environment")
