"""`rlcli diff`: what differs between two recipes or two runs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlcli.cli.arguments import AsJson
from rlcli.cli.output import print_json, print_text, wrapped
from rlcli.observe.series import short
from rlcli.units import count

if TYPE_CHECKING:
    from rlcli.observe.run_comparison import Recorded, RecordedPair
    from rlcli.recipe.introspection.difference import Difference, DifferenceGroup, Values
    from rlcli.recipe.resolve import Resolved


@dataclass(frozen=True)
class Side:
    """A recipe or a run."""

    letter: str
    """`A` or `B`."""
    argument: str
    name: str
    values: Values
    resolved: Resolved | None
    """None for a run."""
    run: Recorded | None
    """None for a recipe."""

    @property
    def kind(self) -> str:
        return "run" if self.run else "recipe"


def diff(
    before: Annotated[
        str, typer.Argument(metavar="A", help="A recipe's name or file, or a run's folder.")
    ],
    now: Annotated[str, typer.Argument(metavar="B", help="The one to compare with.")],
    as_json: AsJson = False,
) -> None:
    """Show what differs between two recipes, or two runs: values and their origins, code,
    environment, results.

    Example: rlcli diff ppo_math mine.yaml
    """
    from rlcli.recipe.introspection.difference import differences

    left, right = _side("A", before), _side("B", now)
    recipe = differences(left.values, right.values)
    recorded = _recorded(left, right)
    if as_json:
        document: dict[str, Any] = {"a": _as_json(left), "b": _as_json(right)}
        document["recipe"] = list(map(asdict, recipe))
        for name in ("code", "environment", "results"):
            document[name] = list(map(_strict, recorded.get(name, ())))
        print_json(document)
        return
    for side in (left, right):
        print_text(f"{side.letter}  {side.kind} {side.argument}")
    print_text()
    _print_recipe(recipe, left, right)
    if recorded:
        _print_pairs("code", recorded["code"])
        _print_pairs("environment", recorded["environment"])
        _print_results(recorded["results"])


def _recorded(left: Side, right: Side) -> dict[str, list[RecordedPair]]:
    """What two runs have recorded about their code, environment and results; empty if one of the
    two is a recipe."""
    if left.run is None or right.run is None:
        return {}
    from rlcli.observe.run_comparison import code_differences, environment_differences, results

    return {
        "code": code_differences(left.run, right.run),
        "environment": environment_differences(left.run, right.run),
        "results": results(left.run, right.run),
    }


def _side(letter: str, argument: str) -> Side:
    from rlcli.recipe.introspection.difference import values_of_resolved
    from rlcli.recipe.resolve import load_recipe

    if "\0" not in argument and Path(argument).is_dir():
        from rlcli.api.run_folder import is_run
        from rlcli.observe.run_comparison import read_run

        if is_run(Path(argument)):
            run = read_run(Path(argument))
            return Side(letter, argument, run.name, run.values, None, run)
    resolved = load_recipe(argument)
    values = values_of_resolved(resolved)
    return Side(letter, argument, resolved.recipe.name, values, resolved, None)


def _print_recipe(changed: list[Difference], left: Side, right: Side) -> None:
    from rlcli.recipe.introspection.difference import grouped, implied, sections_of_one

    if not changed:
        print_text("recipe   no difference: every value is the same")
        return
    section_of = sections_of_one(changed, left.values, right.values)
    in_both = [difference for difference in changed if difference.key not in section_of]
    explicit = [difference for difference in in_both if not implied(difference)]
    print_text("recipe")
    for group in grouped(explicit):
        _print_group(group, left, right)
    for kind, side, other_side in (("removed", left, right), ("added", right, left)):
        keys = [difference.key for difference in changed if difference.kind == kind]
        sections = dict.fromkeys(section_of[key] for key in keys if key in section_of)
        if sections:
            _print_sections(list(sections), side, other_side)
    if defaults := len(in_both) - len(explicit):
        print_text(f"  {count(defaults, 'default')} that only one of the two has: --json")


def _print_sections(sections: list[str], side: Side, other_side: Side) -> None:
    """The sections that only one side has, and where the other one removes them."""
    names = ", ".join(_with_removal(section, other_side) for section in sections)
    print_text(wrapped(f"only in {side.letter}: {names}", "  ", "    "))


def _print_group(group: DifferenceGroup, left: Side, right: Side) -> None:
    """The keys of a group, and the value on each side with its origin."""
    difference = group.differences[0]
    number = len(group.differences)
    print_text(f"  {group.pattern}  ({number} keys)" if number > 1 else f"  {group.pattern}")
    origins = (difference.origin_before, difference.origin_now)
    values = list(map(_value_text, (difference.before, difference.now), origins))
    width = min(max(map(len, values)), 40)
    for side, value, origin in zip((left, right), values, origins, strict=True):
        row = f"    {side.letter}  {value:<{width}}  {_origin_text(origin, side)}".rstrip()
        print_text(wrapped(row, rest="       "))


def _value_text(value: Any, origin: str | None) -> str:
    from rlcli.recipe.introspection.fields import yaml_word

    return "not set" if origin is None else yaml_word(value)


def _with_removal(key: str, side: Side) -> str:
    """A section that a recipe lacks, and where it removes it."""
    mark = side.resolved.removed.get(key) if side.resolved else None
    return f"{key} (removed at {_origin_text(str(mark), side)})" if mark else key


def _origin_text(origin: str | None, side: Side) -> str:
    """An origin with the label of its layer; empty for a key that is not set."""
    from rlcli.recipe.introspection.readable import by_label

    return by_label(origin, side.resolved) if origin and side.resolved else origin or ""


def _print_pairs(title: str, pairs: list[RecordedPair]) -> None:
    print_text()
    if not pairs:
        print_text(f"{title:<12} no difference")
        return
    print_text(title)
    width = max(len(pair.name) for pair in pairs)
    for pair in pairs:
        print_text(f"  {pair.name:<{width}}  {_fact(pair.before)} -> {_fact(pair.now)}")


def _fact(value: Any) -> str:
    if isinstance(value, str) and len(value) == 40:  # a commit hash
        return value[:10]
    return "-" if value is None else str(value)


def _print_results(pairs: list[RecordedPair]) -> None:
    rows = [(pair.name, _result(pair.before), _result(pair.now), _change(pair)) for pair in pairs]
    name, left, right = (max(len(row[column]) for row in rows) for column in range(3))
    print_text()
    print_text(f"{'results':<{name + 2}}  {'A':>{left}}  {'B':>{right}}")
    for label, before, now, change in rows:
        print_text(f"  {label:<{name}}  {before:>{left}}  {now:>{right}}  {change}".rstrip())


def _result(value: Any) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, str | int) else short(value)


def _change(pair: RecordedPair) -> str:
    """The difference of two numbers with its sign; empty for other values and equal ones."""
    if not (isinstance(pair.before, float) and isinstance(pair.now, float)):
        return ""
    if pair.before == pair.now:
        return ""
    sign = "+" if pair.now > pair.before else "-"
    return f"{sign}{short(abs(pair.now - pair.before))}"


def _as_json(side: Side) -> dict[str, Any]:
    return {"kind": side.kind, "given": side.argument, "name": side.name}


def _strict(pair: RecordedPair) -> dict[str, Any]:
    """A pair as strict JSON, which cannot express non-finite numbers."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return {"name": pair.name, "a": plain(pair.before), "b": plain(pair.now)}
