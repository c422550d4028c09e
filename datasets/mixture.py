"""Several datasets combined in fixed proportions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from rlcli.api.config import stable_seed
from rlcli.api.data import DatasetUtility, Preview, SequenceSample, register_dataset
from rlcli.api.dataset import is_stream
from rlcli.api.key_meaning import SOURCE
from rlcli.api.limits import Limits, check_arguments
from rlcli.api.preview import preview_of
from rlcli.registry import make_dataset

LOOKED_AT = 2048
"""Rows, spread evenly, that identify a dataset without a digest of its own."""


@register_dataset("mixture")
@dataclass(kw_only=True)
class Mixture:
    """Mixes rows of other datasets of the recipe in given proportions; within an epoch no row is
    repeated before all rows of its dataset have been used.

    A run reports how many samples of each it has trained on so far, as `used/<dataset>`.
    """

    KEYS_OF: ClassVar[str] = "weights"
    LIMITS: ClassVar[Limits] = {"rows": {"ge": 1}}
    TRIED_ON: ClassVar[dict[str, Any]] = {
        "args": {"weights": {"short": 3, "long": 1}},
        "datasets": {
            "short": {"type": "arithmetic", "args": {"problems": 6, "levels": [1]}},
            "long": {"type": "arithmetic", "args": {"problems": 5, "levels": [4], "seed": 1}},
        },
    }

    util: DatasetUtility

    weights: dict[str, float]
    """Dataset in the recipe → its share of the rows, relative to the others."""

    rows: int | None = None
    """Rows per epoch, the same in each; by default as many as are needed to use every row of every
    dataset."""

    _sources: dict[str, Any] = field(init=False, repr=False)
    _plan: list[tuple[str, int, int]] = field(init=False, repr=False)
    """For each row: (dataset, row in it, number of earlier uses)."""
    _metadata: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(self)
        if not self.weights or not all(
            weight > 0 and math.isfinite(weight) for weight in self.weights.values()
        ):
            raise ValueError(
                f"weights is {self.weights}; name at least one dataset, each with a number above 0"
            )
        self._sources = {name: self._open(name) for name in self.weights}
        self._refuse_unlike()
        lengths = {name: len(source) for name, source in self._sources.items()}
        counts = row_counts(lengths, self.weights, self.rows)
        # the rows do not depend on the run's seed
        seeds = {name: stable_seed("mixture", name) for name in counts}
        self._plan = interleaved(
            {name: uses(lengths[name], count, seeds[name]) for name, count in counts.items()}
        )
        firsts = [_preview(source, 0).metadata for source in self._sources.values()]
        self._metadata = tuple(dict.fromkeys(name for metadata in firsts for name in metadata))

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of every sample, the same in every dataset."""
        return _keys(next(iter(self._sources.values())))

    @property
    def notes(self) -> list[str]:
        """How much of each dataset an epoch uses."""
        used = [name for name, _, _ in self._plan]
        return [
            f"{name}: {used.count(name)} rows, {100 * used.count(name) / len(used):.0f} % of all, "
            f"{used.count(name) / len(source):.2f} passes over its {len(source)}"
            for name, source in self._sources.items()
        ]

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, index: int) -> SequenceSample:
        name, row, before = self._plan[index]
        sample = self._sources[name][row]
        sample.ids = [_id(name, sample.ids[0], before)]
        sample.metadata = {key: sample.metadata.get(key, [None]) for key in self._metadata} | {
            SOURCE: [name]
        }
        return sample

    def preview(self, index: int) -> Preview:
        name, row, before = self._plan[index]
        preview = _preview(self._sources[name], row)
        metadata = {key: preview.metadata.get(key) for key in self._metadata} | {SOURCE: name}
        location = preview.where or preview.id  # the same for each use of a row
        return replace(preview, id=_id(name, preview.id, before), where=location, metadata=metadata)

    def digest(self) -> str:
        """Fingerprint of these rows, in this order."""
        content = hashlib.sha256(repr(self._plan).encode())
        for source in self._sources.values():
            content.update(_digest(source).encode())
        return content.hexdigest()

    def _open(self, name: str) -> Any:
        others = {dataset: cfg for dataset, cfg in self.util.datasets.items() if dataset != name}
        if len(others) == len(self.util.datasets):
            names = ", ".join(others) or "none"
            raise ValueError(
                f"weights names {name}, which is not another dataset of the "
                f"recipe; there is {names}"
            )
        util = replace(self.util, datasets=others, name=name)
        source = make_dataset(self.util.datasets[name], util)
        if is_stream(source):
            raise ValueError(
                f"weights names {name}, a stream, whose number of rows is not "
                "known: set its max_rows"
            )
        return source

    def _refuse_unlike(self) -> None:
        keys = {name: tuple(sorted(_keys(source))) for name, source in self._sources.items()}
        if len(set(keys.values())) > 1:
            shown = "; ".join(f"{name}: {', '.join(held_keys)}" for name, held_keys in keys.items())
            raise ValueError(
                f"rows of these datasets have different keys, so they cannot share a batch: {shown}"
            )


def _preview(source: Any, row: int) -> Preview:
    return source.preview(row) if hasattr(source, "preview") else preview_of(source[row])


def _keys(source: Any) -> tuple[str, ...]:
    return tuple(getattr(source, "keys", None) or getattr(source, "KEYS", None) or source[0].keys)


def row_counts(
    lengths: Mapping[str, int], weights: Mapping[str, float], rows: int | None
) -> dict[str, int]:
    """Number of rows taken from each dataset: its share of `rows`, rounded so that they add up."""
    total = sum(map(Fraction, weights.values()))
    shares = {name: Fraction(weight) / total for name, weight in weights.items()}
    if rows is None:
        rows = max(math.ceil(lengths[name] / share) for name, share in shares.items())
    counts = {name: math.floor(rows * share) for name, share in shares.items()}
    by_rest = sorted(shares, key=lambda name: counts[name] - rows * shares[name])
    for name in by_rest[: rows - sum(counts.values())]:
        counts[name] += 1
    return counts


def uses(length: int, count: int, seed: int) -> list[tuple[int, int]]:
    """(row, number of earlier uses) for `count` rows: whole passes in order, then the remaining
    number of distinct rows, drawn at random but also in order."""
    passes, rest = divmod(count, length)
    drawn = np.random.Generator(np.random.PCG64(seed)).permutation(length)[:rest]
    complete = [(row, number) for number in range(passes) for row in range(length)]
    return complete + [(row, passes) for row in sorted(drawn.tolist())]


def interleaved(rows: Mapping[str, list[tuple[int, int]]]) -> list[tuple[str, int, int]]:
    """The rows of all datasets, each dataset's in order and spread evenly over the whole."""
    entries = [(name, row, number) for name, pairs in rows.items() for row, number in pairs]
    counts = [len(pairs) for pairs in rows.values() if pairs]
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return [entries[index] for index in np.argsort(places, kind="stable").tolist()]


def _id(name: str, id_: Any, before: int) -> str:
    return f"{name}/{id_}" + (f"#{before + 1}" if before else "")


def _digest(source: Any) -> str:
    if hasattr(source, "digest"):
        return str(source.digest())
    rows = range(0, len(source), -(-len(source) // LOOKED_AT))
    return "".join(json.dumps(source[row].as_json(), sort_keys=True) for row in rows)
