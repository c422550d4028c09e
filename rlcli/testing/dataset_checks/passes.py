"""The laws of datasets that are made of others."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import SOURCE
from rlcli.testing.contract import Contract, Violation, skip_if, skip_unless
from rlcli.testing.dataset_checks.records import id_of
from rlcli.testing.dataset_checks.trial import Trial

MANY = 400
"""Rows of a pass, of which the first half is looked at."""
UNEVEN = 2.0
"""Of rows drawn at random, no half deviates by more, in square roots of their number."""


class PassChecks(Contract):
    def test_proportions_hold_within_a_pass(self, trial: Trial) -> None:
        """each dataset that it is made of has its share in the first half of a pass, too"""
        sources = [sample.metadata[SOURCE][0] for sample in _pass(trial, MANY)]
        half = sources[: len(sources) // 2]
        for name in sorted(set(sources)):
            share, expected = half.count(name), sources.count(name) * len(half) / len(sources)
            if abs(share - expected) > UNEVEN * len(half) ** 0.5:
                raise Violation(
                    f"{name} has {sources.count(name)} of {len(sources)} rows, but {share} of the "
                    f"first {len(half)}",
                    "spread the rows of each dataset evenly over the pass",
                    trial.location,
                )

    def test_parts_of_a_pass_are_drawn_from_all_rows(self, trial: Trial) -> None:
        """where only some rows of a dataset are used, these are not always its first ones"""
        complete = _by_source(_pass(trial, None))
        prefixes = drawn = 0
        for rows in range(len(complete), sum(map(len, complete.values()))):
            for name, ids in _by_source(_pass(trial, rows)).items():
                if 0 < len(ids) < len(complete[name]):
                    drawn += 1
                    prefixes += set(ids) == set(complete[name][: len(ids)])
        if drawn > len(complete) and drawn == prefixes:
            raise Violation(
                f"of {drawn} parts of passes over its datasets, all are their first rows",
                "draw the rows of a part from the whole dataset",
                trial.location,
            )


def _pass(trial: Trial, rows: int | None) -> list[SequenceSample]:
    """A pass over so many rows; skips the check unless it is made of other datasets."""
    skip_if(len(trial.datasets) < 2 or not trial.takes("rows"), "is not made of other datasets")
    dataset = trial.demand(changes={"rows": rows})
    samples = [dataset[index] for index in range(len(dataset))]
    skip_unless(
        all(SOURCE in sample.metadata for sample in samples),
        "does not say which dataset a row is from",
    )
    return samples


def _by_source(samples: list[SequenceSample]) -> dict[Any, list[Any]]:
    """Name of a dataset → the ids of its rows, each once."""
    ids: dict[Any, dict[Any, None]] = defaultdict(dict)
    for sample in samples:
        ids[sample.metadata[SOURCE][0]][id_of(sample)] = None
    return {name: list(of_source) for name, of_source in ids.items()}
