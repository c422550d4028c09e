"""A sweep: runs of one recipe that differ in a few values and in their seeds. Plain data, for
whatever starts them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlcli.errors import UsageError

MOST_RUNS = 1000
LONGEST_NAME = 60
"""Characters of a run's name; its leading number keeps names distinct."""
CLOSES = {"[": "]", "{": "}", '"': '"', "'": "'"}


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    """Name of its folder within the sweep's: `03-kl_ctl-0.1-seed-2`."""
    settings: tuple[str, ...]
    """The overrides specific to it: `ppo.kl_ctl=0.1`, `seed=2`."""


def sweep_runs(swept: Sequence[str], seeds: int | None, first_seed: int) -> list[SweepRun]:
    """The runs for every combination of the values (`KEY=VALUE,VALUE…`, one per key), each with
    `seeds` seeds starting at `first_seed`. The last key varies first. Raises UsageError."""
    axes = _axes(swept, seeds, first_seed)
    count = math.prod(map(len, axes.values()))
    if count > MOST_RUNS:
        raise UsageError(
            f"this sweep has {count} runs, more than {MOST_RUNS}",
            hint="sweep fewer values at a time",
        )
    width = len(str(count))
    runs: list[SweepRun] = []
    for number, values in enumerate(itertools.product(*axes.values()), start=1):
        settings = dict(zip(axes, values, strict=True))
        overrides = tuple(f"{key}={value}" for key, value in settings.items())
        runs.append(SweepRun(_name(f"{number:0{width}}", settings), overrides))
    return runs


def _axes(swept: Sequence[str], seeds: int | None, first_seed: int) -> dict[str, list[str]]:
    """Key → its values."""
    listed = [_axis(text) for text in swept]
    if seeds is not None:
        listed.append(("seed", [str(first_seed + number) for number in range(seeds)]))
    axes: dict[str, list[str]] = {}
    for key, values in listed:
        if key in axes:
            drop = "drop --seeds, which sets it too"
            hint = drop if key == "seed" else f"--sweep {key}=VALUE,VALUE,VALUE"
            raise UsageError(f"{key} is swept twice", hint=hint)
        axes[key] = values
    return axes


def _axis(text: str) -> tuple[str, list[str]]:
    """Split `ppo.kl_ctl=0.01,0.1` into the key and its values."""
    key, equals, listed = text.partition("=")
    values = [value.strip() for value in _split(listed)]
    if not equals or not key.strip() or "" in values:
        raise UsageError(
            f"--sweep {text!r} is not KEY=VALUE,VALUE",
            hint="for example --sweep ppo.kl_ctl=0.01,0.1",
        )
    if len(set(values)) < len(values):
        raise UsageError(
            f"--sweep {key} has a value twice: {listed}",
            hint="--seeds N repeats each run with other seeds",
        )
    return key.strip(), values


def _split(text: str) -> Iterator[str]:
    """Split at commas outside brackets and quotes: a value may be a list or a mapping."""
    awaited: list[str] = []
    start = 0
    for position, sign in enumerate(text):
        if awaited and sign == awaited[-1]:
            awaited.pop()
        elif awaited and awaited[-1] in "\"'":
            continue
        elif sign in CLOSES:
            awaited.append(CLOSES[sign])
        elif sign == "," and not awaited:
            yield text[start:position]
            start = position + 1
    yield text[start:]


def _name(number: str, settings: Mapping[str, str]) -> str:
    words = [f"{key.rpartition('.')[2]}-{value}" for key, value in settings.items()]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", "-".join(words)).rstrip("._-")
    return f"{number}-{readable}"[:LONGEST_NAME].rstrip("._-")
