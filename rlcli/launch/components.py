"""Components that the command line names."""

from __future__ import annotations

from typing import Any

from rlcli.errors import UsageError
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.reader import parse
from rlcli.recipe.parsing.tree import plain

Component = dict[str, Any]
"""`{type: …, args: …}`, as in a recipe."""


def read_component(text: str, option: str) -> Component:
    """A component on the command line: its name, or `{type: …, args: {…}}`, read as in a recipe.
    Raises UsageError."""
    if not text.lstrip().startswith("{"):
        return {"type": text}
    problems = Problems()
    tree = parse(text, option, problems)
    problems.raise_if_any()
    component = plain(tree) if tree is not None else None
    if (
        not isinstance(component, dict)
        or not isinstance(component.get("type"), str)
        or not isinstance(component.get("args") or {}, dict)
    ):
        hint = "write '{type: NAME, args: {KEY: VALUE}}'"
        raise UsageError(f"{text[:80]!r} names no component", where=option, hint=hint)
    return component


def read_reward(text: str) -> Component:
    """What `--reward` names, as in the verbs that take a recipe. Raises UsageError."""
    from rlcli.recipe.shorthand import reward_interface

    return read_component(reward_interface(text), "--reward")
