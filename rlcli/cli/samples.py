"""`rlcli samples`: prompts, responses and rewards of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlcli.cli.arguments import AsJson, RunName, RunsFolder, overview_of
from rlcli.cli.output import print_json, print_labelled, print_styled, print_talk
from rlcli.errors import ResourceError, UsageError
from rlcli.observe.run_search import RUNS
from rlcli.observe.series import short
from rlcli.units import count

if TYPE_CHECKING:
    from rlcli.observe.samples import SampleRecord, SampleSelection

LONGEST = 600
"""Maximum characters of a text that are shown, half from either end."""


class Phase(StrEnum):
    """The purpose of a sample."""

    TRAIN = "train"
    EVAL = "eval"


def samples(
    run: RunName,
    step: Annotated[
        list[int] | None,
        typer.Option("--step", metavar="N", help="Samples of this step; repeatable."),
    ] = None,
    phase: Annotated[
        Phase | None, typer.Option("--phase", help="Only those of training, or of evaluations.")
    ] = None,
    row: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Only samples of this row.")
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option(
            "--grep", metavar="REGEX", help="Only where the prompt or the response matches."
        ),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option("--worst", metavar="N", min=1, help="The lowest rewards of all steps."),
    ] = None,
    best: Annotated[
        int | None,
        typer.Option("--best", metavar="N", min=1, help="The highest rewards of all steps."),
    ] = None,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed", help="Only prompts answered differently at the first and the last step."
        ),
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=1, help="Print at most this many.")
    ] = 5,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts.")] = False,
    runs: RunsFolder = RUNS,
    as_json: AsJson = False,
) -> None:
    """Show prompts, responses and rewards: those of the last step, or those that the options
    select.

    Control characters in them are printed as escapes.

    Example: rlcli samples runs/ppo_math/20260412-093011 --worst 3
    """
    from rlcli.observe.samples import (
        SampleSelection,
        by_reward,
        changed_between,
        iterate_samples,
        matching,
        select_samples,
    )

    if sum((worst is not None, best is not None, changed)) > 1:
        raise UsageError(
            "--worst, --best and --changed exclude each other", hint="keep one of them"
        )
    is_ranked = bool(worst or best)
    selection = SampleSelection(
        tuple(step or ()), phase.value if phase else None, row, _pattern(grep), is_ranked
    )
    recorded = iterate_samples(_file(run, runs))
    if changed:
        pairs = changed_between(recorded, selection)
        total = len(pairs)
        _show_pairs(pairs[:limit], full, as_json)
    else:
        if is_ranked:
            limit = worst or best or limit
            chosen = by_reward(matching(recorded, selection), limit, best=bool(best))
        else:
            chosen = select_samples(recorded, selection)
        total = len(chosen)
        _show_samples(chosen[:limit], full, as_json)
    if total > limit:
        print_talk(f"and {total - limit} more: --limit")
    elif not total:
        print_talk(_nothing(selection, changed))


def _show_pairs(
    pairs: Sequence[tuple[SampleRecord, SampleRecord]], full: bool, as_json: bool
) -> None:
    if as_json:
        documents = [{"before": asdict(before), "after": asdict(after)} for before, after in pairs]
        print_json({"changed": documents})
        return
    for number, (before, after) in enumerate(pairs, start=1):
        _print_pair(number, before, after, full)


def _show_samples(records: Sequence[SampleRecord], full: bool, as_json: bool) -> None:
    if as_json:
        print_json({"samples": [asdict(sample) for sample in records]})
        return
    for number, sample in enumerate(records, start=1):
        _print_sample(number, sample, full)


def _file(run: str, runs: Path) -> Path:
    folder = overview_of(run, runs).folder
    if not (folder / "samples.jsonl").is_file():
        hint = "a run that generates nothing has none; log.samples_per_step says how many are kept"
        raise ResourceError(f"{folder} has no samples", hint=hint, code="F72")
    return folder / "samples.jsonl"


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text is not None else None
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(
            f"--grep {text!r} is not a regular expression: {error}",
            hint="escape special characters with \\",
        ) from None


def _nothing(selection: SampleSelection, is_about_changes: bool) -> str:
    if selection.steps or selection.phase or selection.id or selection.pattern:
        return "no samples match"
    if is_about_changes:
        return "no prompt has answers of two steps that differ"
    return "no samples have a reward" if selection.every_step else "there are no samples yet"


def _print_sample(number: int, sample: SampleRecord, full: bool) -> None:
    _print_head(number, sample)
    _print_text("prompt", sample.prompt, full)
    for label, text in sample.parts():
        _print_text(label, text, full)
    if sample.reason is not None:
        _print_text("why", sample.reason, full)


def _print_pair(number: int, before: SampleRecord, after: SampleRecord, full: bool) -> None:
    _print_head(number, after)
    _print_text("prompt", before.prompt, full)
    for sample in (before, after):
        _print_text(f"step {sample.step}", f"{sample.response}{_rewarded(sample)}", full)


def _rewarded(sample: SampleRecord) -> str:
    return f"  [reward {short(sample.reward)}]" if sample.reward is not None else ""


def _print_head(number: int, sample: SampleRecord) -> None:
    from rlcli.observe.terminal import one_line

    reward = f"reward {short(sample.reward)}  " if sample.reward is not None else ""
    measured = "".join(f"{fact}  " for fact in _measures(sample))
    answer = f"  answer {one_line(sample.answer)}" if sample.answer is not None else ""
    print_styled(
        (f"[{number}] ", "dim"),
        (reward, "bold"),
        (f"{measured}step {sample.step}  {sample.phase}", ""),
    )
    _print_text("row", f"{one_line(str(sample.id))}{answer}", full=False)


def _measures(sample: SampleRecord) -> Iterator[str]:
    if sample.advantage is not None:
        yield f"advantage {short(sample.advantage)}"
    if sample.length is not None:
        yield count(sample.length, "token")
    if sample.finish == "length":
        yield "cut off at the limit"


def _print_text(label: str, text: str, full: bool) -> None:
    text = text.strip("\n")
    half = LONGEST // 2
    if len(text) > LONGEST and not full:
        text = f"{text[:half]} [... {len(text) - LONGEST} characters ...] {text[-half:]}"
    print_labelled(label, text)
