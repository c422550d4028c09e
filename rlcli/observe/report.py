"""The closing report of a run on stdout: before and after, two answers compared,
the commands to type next."""

from __future__ import annotations

import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlcli.api.run_folder import is_run
from rlcli.errors import escape_control
from rlcli.observe.json_lines import finite
from rlcli.observe.profile import profile_table, read_calls, traces
from rlcli.observe.samples import SampleRecord
from rlcli.observe.series import clock_time, curve, find_key, number, short
from rlcli.observe.terminal import one_line, open_console, short_path, speaks_unicode
from rlcli.units import count

WIDTH = 80
NARROW = 60
"""Width in columns below which the change from before to after is not printed."""
EDGE = 5
"""Steps at either end that a training curve is averaged over;
a single step is too noisy to quote."""
LONGEST_TEXT = 300

ACTOR = "actor"
GRADED = {"eval/accuracy", "eval/reward"}
"""Results of evaluations in which responses were generated."""

LABELS = {
    "reward": "reward in training",
    "kl": "KL from the reference",
    "length": "response length",
}


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The content of the report."""

    recipe: str
    run_dir: Path
    records: Sequence[Mapping[str, Any]]
    """The records of metrics.jsonl (see `read_metrics`)."""
    seconds: float | None = None
    """How long the steps after `began_after` took."""
    began_after: int = 0
    """The step of the checkpoint that it continued from."""
    models: Mapping[str, Path] = field(default_factory=dict)
    """Role → folder of its saved model."""
    samples: Sequence[tuple[SampleRecord, SampleRecord]] = ()
    """Answers to one prompt before and after training; the first two pairs are shown."""


@dataclass(frozen=True)
class MetricRow:
    """One line of the table; a value that was measured only once has no before."""

    label: str
    before: float | None
    after: float

    def as_document(self) -> dict[str, Any]:
        """The JSON document."""
        return {"label": self.label, "before": finite(self.before), "after": finite(self.after)}


def before_and_after(records: Sequence[Mapping[str, Any]]) -> list[MetricRow]:
    """First and last value of each evaluation result, then the first and last EDGE steps of the
    training curves."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    evaluated = sorted((key for key in keys if key.startswith("eval/")), key=_telling)
    first = "reward" if find_key(keys, "reward") else "loss"
    rows = [_evaluation_row(key, records) for key in evaluated]
    rows += [_curve_row(name, curve(records, name)[1]) for name in (first, "kl", "length")]
    return [row for row in rows if row is not None]


def _evaluation_row(key: str, records: Sequence[Mapping[str, Any]]) -> MetricRow | None:
    """The first and the last value, finite or not; None if there are no values."""
    values = [value for record in records if (value := number(record.get(key))) is not None]
    if not values:
        return None
    before = values[0] if len(values) > 1 else None
    return MetricRow(f"held-out {key.removeprefix('eval/')}", before, values[-1])


def _curve_row(name: str, values: Sequence[float]) -> MetricRow | None:
    """The averages of the first and of the last EDGE values; None if there are no values."""
    if not values:
        return None
    edge = min(EDGE, len(values))
    before = sum(values[:edge]) / edge if len(values) > EDGE else None
    return MetricRow(LABELS.get(name, name), before, sum(values[-edge:]) / edge)


def print_report(outcome: RunOutcome, console: Console | None = None) -> None:
    """Print the report, 80 columns wide; without colour or boxes if stdout is not a terminal."""
    if console is None:
        console = open_console(sys.stdout, width=None if sys.stdout.isatty() else WIDTH)
    console.print()
    console.print(_title(outcome))
    rows = before_and_after(outcome.records)
    if rows:
        console.print(_table(rows, console))
    for before, after in outcome.samples[:2]:
        _print_sample(console, before, after)
    for role, path in outcome.models.items():
        _print_verbatim(console, f"model {one_line(role)}: {short_path(path)}")
    picture = outcome.run_dir / "curve.png"
    if picture.is_file():
        _print_verbatim(console, f"curves: {short_path(picture)}")
    _print_profile(console, outcome.run_dir)
    if commands := next_commands(outcome):
        console.print("\nnext:")
        for command in commands:
            _print_verbatim(console, f"  {command}")


def _title(outcome: RunOutcome) -> Text:
    """The recipe, how many steps it ran, and for how long: if it was resumed, since then."""
    steps = max((int(record["step"]) for record in outcome.records if "step" in record), default=0)
    resumed = f", {steps - outcome.began_after} of them" if outcome.began_after else ""
    duration = f"{resumed} in {clock_time(outcome.seconds)}" if outcome.seconds is not None else ""
    return Text.assemble((one_line(outcome.recipe), "bold"), f": {count(steps, 'step')}{duration}")


def _print_profile(console: Console, run: Path) -> None:
    if calls := read_calls(run):
        console.print(profile_table(calls, console.is_terminal and speaks_unicode(console)))
    if files := traces(run):
        count = f" and {len(files) - 1} more" if len(files) > 1 else ""
        _print_verbatim(
            console, f"profile: {short_path(files[0])}{count}, for https://ui.perfetto.dev"
        )


def next_commands(outcome: RunOutcome) -> list[str]:
    """What to do with the run: view its samples and curves, try its model, compare it with other
    runs of its recipe."""
    run = shlex.quote(short_path(outcome.run_dir))
    keys = {key for record in outcome.records for key in record}
    actor = outcome.models.get(ACTOR)
    fitting = {
        f"rlcli samples {run} --changed": bool(outcome.samples),
        f"rlcli samples {run}{_of_most_interest(keys)}": not outcome.samples
        and _has_samples(outcome.run_dir),
        f"rlcli plot {run}": bool(before_and_after(outcome.records)),
        f"rlcli eval {run}": actor is not None and bool(keys & GRADED),
        f"rlcli chat {run}": actor is not None,
        f"rlcli compare {shlex.quote(short_path(outcome.run_dir.parent))}": _has_siblings(outcome),
        f"tensorboard --logdir {run}/tensorboard": _has_events(outcome.run_dir),
    }
    return [command for command, fits in fitting.items() if fits]


def _of_most_interest(keys: set[str]) -> str:
    """The option for the samples to look at, if they have rewards."""
    return " --worst 3" if find_key(keys, "reward") or "eval/reward" in keys else ""


def _has_samples(run: Path) -> bool:
    file = run / "samples.jsonl"
    return file.is_file() and file.stat().st_size > 0


def _has_events(run: Path) -> bool:
    return (run / "tensorboard").exists() and shutil.which("tensorboard") is not None


def _has_siblings(outcome: RunOutcome) -> bool:
    """Whether there are other runs of the recipe, in the folder of their common name."""
    folder = outcome.run_dir.parent
    runs = (entry for entry in folder.iterdir() if is_run(entry))
    return folder.name == outcome.recipe and next(islice(runs, 1, None), None) is not None


def _telling(key: str) -> tuple[int, str]:
    order = ("eval/accuracy", "eval/reward", "eval/loss")
    return (order.index(key) if key in order else len(order), key)


def _table(rows: Sequence[MetricRow], console: Console) -> Table:
    fancy = console.is_terminal and speaks_unicode(console)
    narrow = console.width < NARROW
    table = Table(
        box=box.SIMPLE_HEAD if fancy else None, pad_edge=False, padding=(0, 1 if narrow else 2)
    )
    table.add_column("", overflow="fold")
    for heading in ("before", "after") if narrow else ("before", "after", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        before = short(row.before) if row.before is not None else "-"
        change = "" if row.before is None else _signed(row.after - row.before)
        cells: list[str | Text] = [
            Text(one_line(row.label)),
            before,
            Text(short(row.after), style="bold"),
            change,
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def _signed(change: float) -> str:
    """A difference; nothing if there is none that is a number."""
    if not math.isfinite(change):
        return ""
    return f"{'-' if change < 0 else '+'}{short(abs(change))}"


def _print_sample(console: Console, before: SampleRecord, after: SampleRecord) -> None:
    """Print the prompt and both answers, control characters escaped,
    long ones shortened in the middle."""
    answer = f"  (answer: {one_line(before.answer)})" if before.answer else ""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("prompt", Text(_cut(before.prompt) + answer))
    for label, sample in (("before", before), ("after", after)):
        reward = f"  [reward {short(sample.reward)}]" if sample.reward is not None else ""
        grid.add_row(label, Text(_cut(sample.response) + reward))
    console.print(grid)
    console.print()


def _cut(text: str) -> str:
    text = escape_control(text.strip())
    half = LONGEST_TEXT // 2
    return text if len(text) <= LONGEST_TEXT else f"{text[:half]} [...] {text[-half:]}"


def _print_verbatim(console: Console, line: str) -> None:
    """Print a line to copy, which is never wrapped."""
    console.print(Text(escape_control(line)), soft_wrap=True)
