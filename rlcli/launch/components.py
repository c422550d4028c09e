"""Components that the command line names."""

from __future__ import annotations

from typing import Any

from rlcli.errors import UsageError

Component = dict[str, Any]
"""`{type: …, args: …}`, as in a recipe."""


def read_component(text: str, option: str) -> Component:
    """A component on the command line: its name, or `{type: …, args: {…}}`. Raises UsageError."""
    import yaml

    try:
        component = yaml.safe_load(text) if text.lstrip().startswith("{") else {"type": text}
    except yaml.YAMLError:
        component = None
    if (
        not isinstance(component, dict)
        or "type" not in component
        or not isinstance(component.get("args") or {}, dict)
    ):
        hint = "write '{type: NAME, args: {KEY: VALUE}}'"
        raise UsageError(f"{text[:80]!r} names no component", where=option, hint=hint)
    return component


def read_reward(text: str) -> Component:
    """What `--reward` names, as in the verbs that take a recipe. Raises UsageError."""
    from rlcli.recipe.shorthand import reward_interface

    return read_component(reward_interface(text), "--reward")
