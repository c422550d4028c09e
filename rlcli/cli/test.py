"""`rlcli test`: the conformance tests of a component, or a smoke run of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.api.headway import doing, heard_by
from rlcli.cli.arguments import AsJson
from rlcli.cli.checks import CheckPrinter, SilentPrinter
from rlcli.cli.output import print_json, print_table, print_text
from rlcli.errors import UsageError
from rlcli.observe.series import short

if TYPE_CHECKING:
    from rlcli.testing.reward_trial import RewardTrial, TriedRow

SHOWN = 8
"""Rows whose rewards are printed, spread over the file."""
LONGEST_CELL = 24
"""Characters of a response or an answer in the table."""
DISTINCT = 5
"""Rewards that are counted one by one."""


def test(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="interface, backend, dataset, environment, family, recipe, reward; or all.",
        ),
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name; without one: all of that kind.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Arguments of the component, overrides of the recipe."
        ),
    ] = None,
    keyword: Annotated[
        str,
        typer.Option("-k", metavar="WORDS", help="Only checks whose names contain these words."),
    ] = "",
    exit_first: Annotated[
        bool, typer.Option("--exit-first", "-x", help="Stop at the first failure.")
    ] = False,
    check_seconds: Annotated[
        float,
        typer.Option("--timeout", min=0.1, metavar="SECONDS", help="Time limit of one check."),
    ] = 120.0,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of each failure.")
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option("--junit", metavar="FILE", help="Write the results as JUnit XML too."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FILE.jsonl", help="For a reward: score these rows instead."
        ),
    ] = None,
    all_layouts: Annotated[
        bool,
        typer.Option(
            "--all-layouts",
            help="Try a backend in every layout of ranks, and run own tests that take long; "
            "takes minutes.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Run the conformance tests of a component and its own tests, on the CPU, with tiny models.

    With --data, a reward scores your own rows: {"prompt": …, "response": …, "answer": …}.

    Example: rlcli test dataset arithmetic
    """
    file = next((word for word in (kind, name or "") if word.endswith(".py")), None)
    if file is not None and kind in ("reward", file):
        rows = data or "FILE.jsonl"
        command = f"rlcli test reward function_reward path={file} function=NAME --data {rows}"
        raise UsageError(f"{file} is a file, not a reward", hint=command)
    if data is not None:
        return _try_reward(kind, name, settings or (), data, as_json)
    from rlcli.testing.results import exit_code
    from rlcli.testing.subjects import subjects

    chosen = subjects(kind, name, settings or ())
    printer = SilentPrinter() if as_json else CheckPrinter(traceback)
    with printer, heard_by(None):  # it says itself what is done
        from rlcli.testing.runner import Options, run_checks

        options = Options(keyword, exit_first, junit, check_seconds, all_layouts)
        tested = run_checks(chosen, printer, options)
    code = exit_code(tested)
    if as_json:
        print_json(
            {
                "ok": code == 0,
                "exit_code": code,
                "components": [component.as_json() for component in tested],
            }
        )
    else:
        printer.total(tested)
    return code


def _try_reward(
    kind: str, name: str | None, settings: Sequence[str], data: Path, as_json: bool
) -> int:
    if kind != "reward" or name is None:
        raise UsageError("--data is for a reward", hint="rlcli test reward NAME --data FILE.jsonl")
    from rlcli.testing.reward_trial import try_reward_on

    with doing(f"scoring the rows of {data}"):
        trial = try_reward_on(name, settings, data)
    if as_json:
        rows = [asdict(row) for row in trial.rows]
        print_json({"rows": rows, "mean": trial.mean, "rewards_per_second": trial.per_second})
    else:
        _print_trial(name, trial)
    return 0


def _print_trial(name: str, trial: RewardTrial) -> None:
    """Print some rows, then figures about all of them."""
    print_table(["row", "reward", "response", "answer", "why"], map(_cells, _spread(trial.rows)))
    counts = trial.counts()
    span = f"from {min(counts):g} to {max(counts):g}"
    print_text(f"{name}: {len(trial.rows)} rows, mean {short(trial.mean)}, {span}")
    if len(counts) <= DISTINCT:
        print_text("  ".join(f"{reward:g}: {times}x" for reward, times in counts.items()))
    print_text(f"{short(trial.per_second)} rewards per second, once its processes run")


def _spread(rows: Sequence[TriedRow]) -> list[TriedRow]:
    count = min(SHOWN, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


def _cells(row: TriedRow) -> tuple[str, ...]:
    answer, reason = row.answer or "", row.reason or ""
    return str(row.line), short(row.reward), _cut(row.response), _cut(answer), reason


def _cut(text: str) -> str:
    """A text on one line; of a long one its end, where answers are."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_CELL else f"…{line[1 - LONGEST_CELL :]}"
