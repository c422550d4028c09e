"""The closing report of a run on stdout: before and after, two answers compared,
the commands to type next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlcli.errors import escape_control
from rlcli.observe.samples import SampleRecord
from rlcli.observe.series import clock_time, curve, find_key, series, short
from rlcli.observe.terminal import one_line, open_console, short_path, speaks_unicode

WIDTH = 80
NARROW = 60
"""Width in columns below which the change from before to after is not printed."""
EDGE = 5
"""Steps at either end that a training curve is averaged over;
a single step is too noisy to quote."""
LONGEST_TEXT = 300

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
    models: Mapping[str, Path] = field(default_factory=dict)
    """Role → folder of its saved model."""
    samples: Sequence[tuple[SampleRecord, SampleRecord]] = ()
    """Answers to one prompt before and after training; the first two pairs are shown."""
    next_commands: Sequence[str] | None = None
    """None: the usual ones."""


@dataclass(frozen=True)
class MetricRow:
    """One line of the table; a value that was measured only once has no before."""

    label: str
    before: float | None
    after: float


def before_and_after(records: Sequence[Mapping[str, Any]]) -> list[MetricRow]:
    """First and last value of each evaluation result, then the first and last EDGE steps of the
    training curves."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    rows = []
    for key in sorted((key for key in keys if key.startswith("eval/")), key=_telling):
        _, values = series(records, key)
        if values:
            before = values[0] if len(values) > 1 else None
            rows.append(MetricRow(f"held-out {key.removeprefix('eval/')}", before, values[-1]))
    curves = ["reward", "kl", "length"] if find_key(keys, "reward") else ["loss", "kl", "length"]
    for name in curves:
        _, values = curve(records, name)
        if values:
            edge = min(EDGE, len(values))
            before = sum(values[:edge]) / edge if len(values) > EDGE else None
            rows.append(MetricRow(LABELS.get(name, name), before, sum(values[-edge:]) / edge))
    return rows


def print_report(outcome: RunOutcome, console: Console | None = None) -> None:
    """Print the report, 80 columns wide; without colour or boxes if stdout is not a terminal."""
    if console is None:
        console = open_console(sys.stdout, width=None if sys.stdout.isatty() else WIDTH)
    steps = max((int(record["step"]) for record in outcome.records if "step" in record), default=0)
    duration = f" in {clock_time(outcome.seconds)}" if outcome.seconds is not None else ""
    console.print()
    console.print(Text.assemble((one_line(outcome.recipe), "bold"), f": {steps} steps{duration}"))
    rows = before_and_after(outcome.records)
    if rows:
        console.print(_table(rows, console))
    for before, after in outcome.samples[:2]:
        _print_sample(console, before, after)
    for role, path in outcome.models.items():
        _print_verbatim(console, f"model {one_line(role)}: {short_path(path)}")
    commands = usual_commands(outcome) if outcome.next_commands is None else outcome.next_commands
    if commands:
        console.print("\nnext:")
        for command in commands:
            _print_verbatim(console, f"  {command}")


def usual_commands(outcome: RunOutcome) -> list[str]:
    """Commands to view the samples, draw the curves, and run the trained model without rlcli."""
    run = Path(short_path(outcome.run_dir))
    samples = outcome.run_dir / "samples.jsonl"
    has_samples = samples.is_file() and samples.stat().st_size > 0
    commands = [f"less {shlex.quote(str(run / 'samples.jsonl'))}"] if has_samples else []
    has_screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_screen and (outcome.run_dir / "curve.png").exists():
        commands.insert(0, f"xdg-open {shlex.quote(str(run / 'curve.png'))}")
    if (outcome.run_dir / "tensorboard").exists() and shutil.which("tensorboard"):
        commands.append(f"tensorboard --logdir {shlex.quote(str(run / 'tensorboard'))}")
    return commands


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
        change = _signed(row.after - row.before) if row.before is not None else ""
        cells: list[str | Text] = [
            Text(one_line(row.label)),
            before,
            Text(short(row.after), style="bold"),
            change,
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def _signed(change: float) -> str:
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
