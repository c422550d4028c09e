"""`rlcli explain`: where a value comes from, and what uses it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import AsJson, Overrides, RecipeName, With, load
from rlcli.cli.output import print_json, print_talk, print_text, wrapped
from rlcli.errors import UsageError

if TYPE_CHECKING:
    from rlcli.recipe.introspection.explanation import Explanation, Leaf, Use
    from rlcli.recipe.resolve import Resolved

TOPOLOGY = {
    "topology": "Changing it alters the topology: see `rlcli plan`.",
    "batch": "Changing it alters the arithmetic of a step, not the topology.",
    "none": "Changing it does not alter the topology.",
}
ON_RESUME = {
    "safe": "A resumed run may change it.",
    "alters": "Changing it on resume needs --accept-changes: it affects the rest of training.",
    "forbidden": "A resumed run must keep it.",
}

WIDTH = 80
LONGEST = 30
"""Maximum characters of a value as a layer writes it; all of it is in the file and in --json."""


def explain(
    recipe: RecipeName,
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="A key such as ppo.kl_ctl, or a section such as train."),
    ] = None,
    overrides: Overrides = None,
    with_: With = None,
    as_json: AsJson = False,
) -> None:
    """Show where a value comes from, through all layers and references, and what uses it; or what
    an error code means (`rlcli explain R42`).

    Example: rlcli explain ppo_math ppo.kl_ctl
    """
    if key is None:
        _explain_code(recipe, as_json)
        return
    from rlcli.recipe.introspection.explanation import explain as explained

    resolved = load(recipe, overrides, with_)
    explanation = explained(resolved, key)
    if isinstance(explanation, list):
        if as_json:
            print_json({"key": key, "values": [asdict(leaf) for leaf in explanation]})
        else:
            _print_section(key, explanation, recipe, resolved)
        return
    reached = [(use, _who(resolved, use.key)) for use in explanation.uses]
    if as_json:
        print_json(_as_json(explanation, reached))
    else:
        _print_value(explanation, reached, resolved)


def _explain_code(word: str, as_json: bool) -> None:
    lines = Path(__file__).with_name("codes.txt").read_text(encoding="utf-8").splitlines()
    meanings = dict(line.split(" ", 1) for line in lines)
    code = word.upper()
    if code not in meanings:
        if re.fullmatch("[A-Z][0-9]+", code):
            raise UsageError(f"no error has the code {code}", hint="for example rlcli explain R42")
        raise UsageError(
            "rlcli explain needs RECIPE and KEY, or the code of an error",
            hint=f"rlcli explain ppo_math ppo.kl_ctl, or what {word} is: rlcli show {word}",
        )
    if as_json:
        print_json({"code": code, "meaning": meanings[code]})
    else:
        print_text(wrapped(f"{code}  {meanings[code]}", rest="     "))


def _print_section(key: str, leaves: list[Leaf], recipe: str, resolved: Resolved) -> None:
    from rlcli.recipe.introspection.fields import yaml_word
    from rlcli.recipe.introspection.readable import by_label

    rows = [
        (
            leaf.key.removeprefix(f"{key}."),
            _cut(yaml_word(leaf.value)),
            by_label(leaf.origin, resolved),
        )
        for leaf in leaves
    ]
    widths = [
        min(max(len(row[column]) for row in rows), most) for column, most in ((0, 36), (1, LONGEST))
    ]
    print_text(f"{key}")
    for name, value, origin in rows:
        for line in _row(name, value, origin, widths):
            print_text(line)
    print_talk(f"one value: rlcli explain {recipe} {leaves[0].key}")


def _row(name: str, value: str, origin: str, widths: Sequence[int]) -> list[str]:
    """A row of three columns; two lines if it would be wider than 80."""
    line = f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {origin}".rstrip()
    return [line] if len(line) <= WIDTH else [f"  {name}", f"      {value}  {origin}".rstrip()]


def _print_value(
    explanation: Explanation, reached: list[tuple[Use, str]], resolved: Resolved
) -> None:
    from rlcli.recipe.introspection.fields import yaml_word
    from rlcli.recipe.introspection.readable import by_label

    kind = f"   {explanation.field.type}" if explanation.field else ""
    head = f"{explanation.key} = {yaml_word(explanation.value)}{kind}"
    if explanation.removed:
        head = by_label(f"{explanation.key}: removed {explanation.removed}", resolved)
    print_text(head if len(head) <= WIDTH else wrapped(head, rest="  "))
    if explanation.field and explanation.field.doc:
        print_text(wrapped(explanation.field.doc))
    print_text()
    rows = [(by_label(step.where, resolved), _cut(step.value), step) for step in explanation.steps]
    places = max((len(where) for where, _, _ in rows), default=0)
    values = max((len(value) for _, value, _ in rows), default=0)
    for number, (where, value, step) in enumerate(rows, start=1):
        declared = f"  {step.note}" if step.note and step.where == "default" else ""
        wins = "  <- wins" if step.wins else ""
        print_text(f"  {number}  {where:<{places}}  {value:<{values}}{declared}{wins}".rstrip())
        if step.note and not declared:
            print_text(f"     {by_label(step.note, resolved)}")
    print_text()
    for line in _used_by(reached):
        print_text(line)
    print_text(
        wrapped(f"{TOPOLOGY[explanation.topology]} {ON_RESUME[explanation.on_resume.value]}")
    )


def _cut(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"


def _used_by(reached: list[tuple[Use, str]]) -> list[str]:
    """Users of the value; those behind one reference are grouped."""
    if not reached:
        return ["used by  nothing in this recipe"]
    lines = [f"used by  {who}" for use, who in reached if use.through is None]
    groups: dict[str, list[tuple[str, str]]] = {}
    for use, who in reached:
        if use.through is not None:
            owner, rest = _owner(use.key)
            title = f"used by  through {use.through}, as {rest}"
            groups.setdefault(
                title if len(title) < 80 else title.replace(", as", ",\n         as"), []
            ).append((owner, who))
    for title, rows in groups.items():
        width = max(len(owner) for owner, _ in rows)
        lines += [title, *(f"         {owner:<{width}}  {who}".rstrip() for owner, who in rows)]
    return lines


def _owner(key: str) -> tuple[str, str]:
    """(`graph.actor_gen`, `interface.args.kl_ctl`)."""
    parts = key.split(".")
    size = 4 if parts[:3] == ["train", "eval", "graph"] else 2
    return ".".join(parts[:size]), ".".join(parts[size:])


def _who(resolved: Resolved, key: str) -> str:
    """The role, call or part of a run that a key applies to, and its ranks."""
    from rlcli.topology import plan_topology
    from rlcli.topology.drawing import ranks_text

    recipe, path = resolved.recipe, key.split(".")
    topology = plan_topology(recipe)

    def on_ranks(role: str) -> str:
        ranks = topology.placement(role).ranks
        return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"

    if path[0] == "models":
        followers = [name for name, role in recipe.models.items() if role.init == path[1]]
        start = (
            f"; {', '.join(followers)} "
            f"start{'' if len(followers) > 1 else 's'} from the same weights"
        )
        weights = len(path) > 2 and path[2] in ("path", "scratch", "init", "tokenizer")
        return f"{path[1]} ({on_ranks(path[1])}){start if weights and followers else ''}"
    calls = {"graph": recipe.graph, "train": recipe.train.eval.graph}.get(path[0], {})
    name = (
        path[1]
        if path[0] == "graph"
        else path[3]
        if path[:3] == ["train", "eval", "graph"] and path[3:]
        else ""
    )
    if name in calls:
        call = calls[name]
        return f"{call.model}.{call.call} ({on_ranks(call.model)})"
    if path[0] == "datasets":
        uses = {"training": recipe.train.dataset, "evaluation": recipe.train.eval.dataset}
        return (
            " and ".join(word for word, name in uses.items() if name == path[1])
            or "nothing in this recipe"
        )
    return _PARTS.get(".".join(path[:2]), _PARTS.get(path[0], ""))


_PARTS = {
    "name": "the run's folder",
    "seed": "every random draw",
    "train": "every step, all roles",
    "train.eval": "evaluation",
    "generation": "the arithmetic of a step",
    "cluster": "all roles",
    "launch": "the start of the workers",
    "checkpoint": "what is saved",
    "log": "what is written while running",
}


def _as_json(explanation: Explanation, reached: list[tuple[Use, str]]) -> dict[str, Any]:
    field = explanation.field
    return {
        "key": explanation.key,
        "value": explanation.value,
        "type": field.type if field else None,
        "doc": field.doc if field else None,
        "default": field.default_text if field else None,
        "declared": field.location if field else None,
        "steps": [asdict(step) for step in explanation.steps],
        "used_by": [{"key": use.key, "through": use.through, "who": who} for use, who in reached],
        "changes": explanation.topology,
        "on_resume": explanation.on_resume.value,
        "removed": explanation.removed,
    }
