"""`rlcli explain`: where a value comes from, and what uses it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import AsJson, Overrides, RecipeName, With, load
from rlcli.cli.output import print_json, print_talk, print_text, wrapped
from rlcli.errors import UsageError

if TYPE_CHECKING:
    from rlcli.recipe.introspection.explanation import Explanation, Leaf, Use, ValueStep
    from rlcli.recipe.introspection.fields import Field
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe

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

    names = [leaf.key.removeprefix(f"{key}.") for leaf in leaves]
    values = [_cut(yaml_word(leaf.value)) for leaf in leaves]
    name_width = min(max(map(len, names)), 36)
    value_width = max(map(len, values))
    print_text(key)
    for name, value, leaf in zip(names, values, leaves, strict=True):
        origin = by_label(leaf.origin, resolved)
        row = f"  {name:<{name_width}}  {value:<{value_width}}  {origin}".rstrip()
        if len(row) > WIDTH:
            row = f"  {name}\n      {value}  {origin}".rstrip()
        print_text(row)
    print_talk(f"one value: rlcli explain {recipe} {leaves[0].key}")


def _print_value(
    explanation: Explanation, reached: list[tuple[Use, str]], resolved: Resolved
) -> None:
    heading = _heading(explanation, resolved)
    print_text(heading if len(heading) <= WIDTH else wrapped(heading, rest="  "))
    if explanation.field and explanation.field.doc:
        print_text(wrapped(explanation.field.doc))
    print_text()
    for line in _step_lines(explanation.steps, resolved):
        print_text(line)
    print_text()
    for line in _used_by(reached):
        print_text(line)
    print_text(
        wrapped(f"{TOPOLOGY[explanation.topology]} {ON_RESUME[explanation.on_resume.value]}")
    )


def _heading(explanation: Explanation, resolved: Resolved) -> str:
    """The key with its value and type, or where it is removed."""
    from rlcli.recipe.introspection.fields import yaml_word
    from rlcli.recipe.introspection.readable import by_label

    if explanation.removed:
        return by_label(f"{explanation.key}: removed {explanation.removed}", resolved)
    heading = f"{explanation.key} = {yaml_word(explanation.value)}"
    return f"{heading}   {explanation.field.type}" if explanation.field else heading


def _step_lines(steps: Sequence[ValueStep], resolved: Resolved) -> Iterator[str]:
    """Numbered lines: who sets the value, and to what. The note of a default is on its line; other
    notes are below theirs."""
    from rlcli.recipe.introspection.readable import by_label

    origins = [by_label(step.where, resolved) for step in steps]
    values = [_cut(step.value) for step in steps]
    origin_width = max(map(len, origins), default=0)
    value_width = max(map(len, values), default=0)
    for number, step in enumerate(steps, start=1):
        origin, value = origins[number - 1], values[number - 1]
        line = f"  {number}  {origin:<{origin_width}}  {value:<{value_width}}"
        is_default = step.where == "default"
        if step.note and is_default:
            line += f"  {step.note}"
        if step.wins:
            line += "  <- wins"
        yield line.rstrip()
        if step.note and not is_default:
            yield f"     {by_label(step.note, resolved)}"


def _cut(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[: LONGEST - 1]}…"


def _used_by(reached: list[tuple[Use, str]]) -> list[str]:
    """Users of the value; those behind one reference are grouped."""
    if not reached:
        return ["used by  nothing in this recipe"]
    lines: list[str] = []
    groups: dict[str, list[tuple[str, str]]] = {}
    for use, who in reached:
        if use.through is None:
            lines.append(f"used by  {who}")
            continue
        owner, rest = _owner(use.key)
        title = f"used by  through {use.through}, as {rest}"
        if len(title) >= WIDTH:
            title = title.replace(", as", ",\n         as")
        groups.setdefault(title, []).append((owner, _with_value(who, use)))
    for title, rows in groups.items():
        width = max(len(owner) for owner, _ in rows)
        lines += [title, *(f"         {owner:<{width}}  {who}".rstrip() for owner, who in rows)]
    return lines


def _with_value(who: str, use: Use) -> str:
    """Who uses a value, and what it is there if it is another one."""
    return who if use.value_there is None else f"{who}; there it is {use.value_there}"


def _owner(key: str) -> tuple[str, str]:
    """(`graph.actor_gen`, `interface.args.kl_ctl`)."""
    parts = key.split(".")
    size = 4 if parts[:3] == ["train", "eval", "graph"] else 2
    return ".".join(parts[:size]), ".".join(parts[size:])


def _who(resolved: Resolved, key: str) -> str:
    """The role, call or part of a run that a key applies to, and its ranks."""
    from rlcli.recipe.graph import calls_of

    recipe, path = resolved.recipe, tuple(key.split("."))
    section = path[0]
    if section == "models":
        role = path[1]
        decides_weights = len(path) > 2 and path[2] in _WEIGHTS
        followers = _followers(recipe, role) if decides_weights else ""
        return f"{role} ({_ranks(recipe, role)}){followers}"
    if section == "datasets":
        return _uses_of_dataset(recipe, path[1]) or "nothing in this recipe"
    for path_of_call, call in calls_of(recipe):
        if path[: len(path_of_call)] == path_of_call:
            return f"{call.model}.{call.call} ({_ranks(recipe, call.model)})"
    return _PARTS.get(".".join(path[:2]), _PARTS.get(section, ""))


def _ranks(recipe: Recipe, role: str) -> str:
    """`rank 0`, `ranks 0-3,5`."""
    from rlcli.topology import plan_topology
    from rlcli.topology.drawing import ranks_text

    ranks = plan_topology(recipe).placement(role).ranks
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {ranks_text(ranks)}"


def _followers(recipe: Recipe, role: str) -> str:
    """The roles that start from the weights of a role, as a clause; empty if there are none."""
    names = [name for name, follower in recipe.models.items() if follower.init == role]
    if not names:
        return ""
    verb = "start" if len(names) > 1 else "starts"
    return f"; {', '.join(names)} {verb} from the same weights"


def _uses_of_dataset(recipe: Recipe, dataset: str) -> str:
    uses = {"training": recipe.train.dataset, "evaluation": recipe.train.eval.dataset}
    return " and ".join(use for use, name in uses.items() if name == dataset)


_WEIGHTS = ("path", "scratch", "init", "tokenizer")
"""Settings of a role that its weights depend on."""
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
    return {
        "key": explanation.key,
        "value": explanation.value,
        **_field_as_json(explanation.field),
        "steps": list(map(asdict, explanation.steps)),
        "used_by": [asdict(use) | {"who": who} for use, who in reached],
        "changes": explanation.topology,
        "on_resume": explanation.on_resume.value,
        "removed": explanation.removed,
    }


def _field_as_json(field: Field | None) -> dict[str, Any]:
    if field is None:
        return dict.fromkeys(("type", "doc", "default", "declared"))
    return {
        "type": field.type,
        "doc": field.doc,
        "default": field.default_text,
        "declared": field.location,
    }
