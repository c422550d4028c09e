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
from rlcli.observe.units import count

if TYPE_CHECKING:
    from rlcli.observe.run_comparison import Recorded, RecordedPair
    from rlcli.recipe.introspection.difference import Difference, Values
    from rlcli.recipe.resolve import Resolved


@dataclass(frozen=True)
class Side:
    """A recipe or a run."""

    argument: str
    name: str
    values: Values
    resolved: Resolved | None
    """None for a run."""
    run: Recorded | None
    """None for a recipe."""


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

    left, right = _side(before), _side(now)
    recipe = differences(left.values, right.values)
    code: list[RecordedPair] = []
    environment: list[RecordedPair] = []
    outcome: list[RecordedPair] = []
    if left.run is not None and right.run is not None:
        from rlcli.observe.run_comparison import code_differences, environment_differences, results

        code = code_differences(left.run, right.run)
        environment = environment_differences(left.run, right.run)
        outcome = results(left.run, right.run)
    if as_json:
        parts = {"code": code, "environment": environment, "results": outcome}
        document: dict[str, Any] = {
            "a": _as_json(left),
            "b": _as_json(right),
            "recipe": [asdict(d) for d in recipe],
        }
        print_json(
            document | {name: [_strict(pair) for pair in pairs] for name, pairs in parts.items()}
        )
        return
    _print_sides(left, right)
    _print_recipe(recipe, left, right)
    if left.run is not None and right.run is not None:
        _print_pairs("code", code)
        _print_pairs("environment", environment)
        _print_results(outcome)


def _side(argument: str) -> Side:
    from rlcli.recipe.introspection.difference import values_of_resolved
    from rlcli.recipe.resolve import load_recipe

    if "\0" not in argument and Path(argument).is_dir():
        from rlcli.api.run_folder import is_run
        from rlcli.observe.run_comparison import read_run

        if is_run(Path(argument)):
            run = read_run(Path(argument))
            return Side(argument, run.name, run.values, None, run)
    resolved = load_recipe(argument)
    return Side(argument, resolved.recipe.name, values_of_resolved(resolved), resolved, None)


def _print_sides(left: Side, right: Side) -> None:
    for letter, side in (("A", left), ("B", right)):
        print_text(f"{letter}  {'run' if side.run else 'recipe'} {side.argument}")
    print_text()


def _print_recipe(changed: list[Difference], left: Side, right: Side) -> None:
    from rlcli.recipe.introspection.difference import grouped, implied, sections_of_one
    from rlcli.recipe.introspection.fields import yaml_word

    if not changed:
        print_text("recipe   no difference: every value is the same")
        return
    of_one = sections_of_one(changed, left.values, right.values)
    print_text("recipe")
    silent = [
        difference for difference in changed if difference.key not in of_one and implied(difference)
    ]
    for group in grouped([d for d in changed if d.key not in of_one and d not in silent]):
        first = group.differences[0]
        keys = len(group.differences)
        print_text(f"  {group.pattern}{f'  ({keys} keys)' if keys > 1 else ''}")
        rows = [
            (letter, yaml_word(value) if origin is not None else "not set", _place(origin, side))
            for letter, side, value, origin in (
                ("A", left, first.before, first.origin_before),
                ("B", right, first.now, first.origin_now),
            )
        ]
        width = min(max(len(value) for _, value, _ in rows), 40)
        for letter, value, origin in rows:
            row = f"    {letter}  {value:<{width}}  {origin}".rstrip()
            print_text(wrapped(row, rest="       "))
    for letter, kind in (("A", "removed"), ("B", "added")):
        tops = dict.fromkeys(of_one[d.key] for d in changed if d.kind == kind and d.key in of_one)
        if tops:
            other_side = right if letter == "A" else left
            sections = ", ".join(_with_removal(top, other_side) for top in tops)
            print_text(wrapped(f"only in {letter}: {sections}", "  ", "    "))
    if silent:
        print_text(f"  {count(len(silent), 'default')} that only one of the two has: --json")


def _with_removal(key: str, side: Side) -> str:
    """A section that a recipe lacks, and the place where it removes it."""
    mark = side.resolved.removed.get(key) if side.resolved else None
    return f"{key} (removed at {_place(str(mark), side)})" if mark else key


def _place(origin: str | None, side: Side) -> str:
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
    def text(value: Any) -> str:
        return (
            "-" if value is None else str(value) if isinstance(value, str | int) else short(value)
        )

    rows = [(pair.name, text(pair.before), text(pair.now), _change(pair)) for pair in pairs]
    name, left, right = (max(len(row[column]) for row in rows) for column in range(3))
    print_text()
    print_text(f"{'results':<{name + 2}}  {'A':>{left}}  {'B':>{right}}")
    for label, before, now, change in rows:
        print_text(f"  {label:<{name}}  {before:>{left}}  {now:>{right}}  {change}".rstrip())


def _change(pair: RecordedPair) -> str:
    if (
        not (isinstance(pair.before, float) and isinstance(pair.now, float))
        or pair.before == pair.now
    ):
        return ""
    return f"{'+' if pair.now > pair.before else '-'}{short(abs(pair.now - pair.before))}"


def _as_json(side: Side) -> dict[str, Any]:
    return {"kind": "run" if side.run else "recipe", "given": side.argument, "name": side.name}


def _strict(pair: RecordedPair) -> dict[str, Any]:
    """A pair as strict JSON, which cannot express non-finite numbers."""

    def plain(value: Any) -> Any:
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return {"name": pair.name, "a": plain(pair.before), "b": plain(pair.now)}
