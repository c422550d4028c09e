"""Checks of the rows as a whole: which ones there are, and that they are the same wherever they are
read."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import pytest

from rlcli.api.data import SequenceSample
from rlcli.checkpoint.light_tokenizer import LightTokenizer
from rlcli.testing.contract import Contract, Violation, place_of, skip_if, skip_unless
from rlcli.testing.dataset_checks.elsewhere import answers, as_read
from rlcli.testing.dataset_checks.first_rows import LOOKED_AT, FirstRows, reader
from rlcli.testing.dataset_checks.records import (
    content_of,
    contents,
    difference,
    first_difference,
    id_of,
    ids_of,
)
from rlcli.testing.dataset_checks.trial import Rows, Trial, longest_sequence, read, shown_rows

DRAW_BY_SEED = (
    "draw from random.Random(stable_seed(self.util.seed, row id)), never from "
    "random, numpy or torch itself"
)
MANY_ROWS = 8
"""This many rows will not be in the same order by coincidence."""
COPIES = 8
"""Of a row; what is drawn for them will not be the same for all by coincidence."""
LONG_STREAM = 600
STARTS = (0, 255, 257, 400, 511)
"""Rows from which a long stream is read."""


class OrderChecks(Contract):
    """Which rows there are."""

    def test_rows_end(self, trial: Trial) -> None:
        """there are as many rows as it says"""
        dataset = trial.demand()
        location = place_of(reader(dataset))
        if not len(dataset):
            raise Violation("it has no rows", "", place_of(type(dataset).__len__))
        dataset[len(dataset) - 1 if trial.reads_file else 0]
        try:
            dataset[len(dataset)]
        except IndexError:
            return
        except Exception as error:
            raise Violation(
                (
                    f"row {len(dataset)} of {len(dataset)} raises "
                    f"{type(error).__name__}, not IndexError"
                ),
                "Python asks for rows until IndexError comes",
                location,
            ) from error
        raise Violation(
            f"len() says {len(dataset)}, but there is a row {len(dataset)}",
            "raise IndexError for a row beyond the last; make len() the number of rows",
            location,
        )

    def test_ids(self, trial: Trial) -> None:
        """ids are unique, whatever the seed"""
        first, second = (ids_of(trial.samples(seed=seed)) for seed in (1, 2))
        for id_ in first:
            if first.count(id_) > 1:
                raise Violation(
                    f"{first.count(id_)} of {len(first)} rows have the id {id_!r}",
                    "name a row by its own id, or by its file and line",
                    trial.location,
                )
        if set(first) != set(second):
            missing = min({*map(str, first)} ^ {*map(str, second)})
            raise Violation(
                f"ids change with the run's seed: {missing!r} exists for one seed only",
                "take ids from the rows, not from random numbers or the seed",
                trial.location,
            )

    def test_determinism(self, trial: Trial) -> None:
        """the same seed gives the same rows"""
        with _global_randomness(0):
            expected = trial.samples()
        for seed in (1, 2, 3, 4):
            with _global_randomness(seed) as moved:
                again, drawn_from = trial.samples(), moved()
            trial.demand_same(expected, again, "built twice with one seed", DRAW_BY_SEED)
            if drawn_from:
                raise Violation(
                    f"reading it advances the random state of the whole process: {drawn_from}",
                    DRAW_BY_SEED,
                    trial.location,
                )

    def test_draws_depend_on_the_seed(self, trial: Trial) -> None:
        """what is drawn for a row depends on the run's seed"""
        skip_unless(trial.goes_by_ids, "reads no rows that have ids")
        copies = trial.copies(COPIES)
        dataset, reseeded = trial.demand(copies), trial.demand(copies, seed=2)
        skip_if(len(dataset) != len(copies), "has no sample for each row")
        first, second = (
            contents(drawn[index] for index in range(len(copies))) for drawn in (dataset, reseeded)
        )
        rows = len(trial.rows)
        is_drawn = first[rows:] != first[:-rows]  # a copy follows each row at this distance
        if is_drawn and first == second:
            raise Violation(
                "equal rows with other ids give other samples, but another seed of the run gives "
                "the same ones",
                DRAW_BY_SEED,
                trial.location,
            )

    def test_elsewhere(self, trial: Trial) -> None:
        """other processes and hash seeds give the same rows"""
        if not isinstance(trial.tokenizer, LightTokenizer):
            pytest.skip("not tried: other processes know the tests' own tokenizer only")
        rows = trial.at_least(MANY_ROWS)
        here = as_read(trial.demand(rows))
        for hash_seed, answer in answers(trial, rows):
            if mismatch := first_difference(here["rows"], answer["rows"]):
                raise Violation(
                    f"{mismatch} in a process with PYTHONHASHSEED={hash_seed}",
                    (
                        "sets and hash() differ between processes: sort what comes out of a set, "
                        "and use stable_seed"
                    ),
                    trial.location,
                )
            if answer["heavy"]:
                raise Violation(
                    f"its rows cannot be previewed without {', '.join(answer['heavy'])}",
                    (
                        "import torch in __getitem__ alone: rlcli check and rlcli tokens "
                        "read previews without it"
                    ),
                    place_of(trial.cls.preview),
                )

    def test_continues(self, trial: Trial) -> None:
        """a stream continues from any place; with `streaming`, it has the same rows"""
        streaming = {"streaming": True} if trial.takes("streaming") else {}
        dataset = trial.demand(changes=streaming)
        if not isinstance(dataset, FirstRows):
            pytest.skip("not a stream")
        for start in range(1, len(dataset) + (len(dataset) < LOOKED_AT)):
            stream = trial.demand(changes=streaming)
            again = list(islice(stream.rows_from(0, start), LOOKED_AT - start))
            trial.demand_same(
                dataset.rows[start:],
                again,
                f"read from row {start} on",
                "rows_from(epoch, start) gives what is left of rows_from(epoch, 0), so that a run "
                "can be resumed",
                place_of(reader(dataset)),
            )

    def test_long_streams(self, trial: Trial) -> None:
        """with `streaming`, a long file gives its rows from any place, also where some are
        dropped"""
        skip_unless(trial.takes("streaming"), "has no setting streaming")
        copies = trial.copies(math.ceil(LONG_STREAM / len(trial.rows)))
        _demand_same_rows(trial, copies)
        if trial.takes("overlong") and trial.takes("max_length"):
            lengths = sorted(set(map(longest_sequence, trial.samples())))
            for length in lengths[-2:-1]:  # the longest rows are dropped, if others are left
                _demand_same_rows(trial, copies, overlong="drop", max_length=length)

    def test_any_order(self, trial: Trial) -> None:
        """a row is the same whenever it is read"""
        used, resumed = trial.demand(), trial.demand()
        forward = read(used)
        numbers = range(len(forward))
        middle = len(forward) // 2
        for occasion, dataset, order in (
            ("the second time", used, numbers[::-1]),
            ("when reading begins in the middle", resumed, (*numbers[middle:], *numbers[:middle])),
        ):
            samples = {index: dataset[index] for index in order}
            trial.demand_same(
                forward,
                [samples[index] for index in numbers],
                occasion,
                "__getitem__ must not remember what was read: a run that is resumed begins in the "
                "middle",
                place_of(type(used).__getitem__),
            )

    def test_no_shared_state(self, trial: Trial) -> None:
        """changing a sample changes no other"""
        dataset, expected = trial.demand(), trial.samples()
        for index in range(shown_rows(dataset)):
            _spoil(dataset[index])
        trial.demand_same(
            expected,
            read(dataset),
            "after samples were changed",
            "make the tensors and lists of a sample when it is asked for, or copy them",
            trial.reader,
        )

    def test_neighbours(self, trial: Trial) -> None:
        """a row is the same whatever its neighbours"""
        rows = trial.named_rows_or_skip()
        expected = trial.samples(rows)
        reversed_ = trial.samples(rows[::-1])
        alone = [trial.demand([row])[0] for row in rows[:4]]
        for condition, samples in (("in reverse order", reversed_), ("alone in their file", alone)):
            different = _unlike(expected, samples, trial.goes_by_ids)
            if different:
                raise Violation(
                    f"with the rows {condition}, {different}",
                    (
                        "make a sample from its row alone; seed random draws with the row's id, "
                        "not its position"
                    ),
                    place_of(trial.cls.__getitem__),
                )

    @pytest.mark.parametrize("ranks", [1, 2, 3])
    def test_ranks(self, trial: Trial, ranks: int) -> None:
        """over 1, 2 and 3 ranks, each row appears once"""
        rows = trial.at_least(2 * ranks + 1)  # a number not divisible by the number of ranks
        all_ids = ids_of(trial.samples(rows))
        skip_if(
            trial.reads_file and len(set(all_ids)) < ranks, f"not tried: there are not {ranks} rows"
        )
        parts = [ids_of(trial.samples(rows, rank=rank, ranks=ranks)) for rank in range(ranks)]
        if all(ids == all_ids for ids in parts):
            return  # the runtime distributes the rows
        dealt = Counter(chain(*parts))
        lost, repeated = {*all_ids} - dealt.keys(), dealt.total() - len(dealt)
        if repeated or (trial.reads_file and dealt.keys() != {*all_ids}):
            raise Violation(
                f"of {len(all_ids)} rows on {ranks} ranks {len(lost)} on no rank, {repeated} on "
                "several ranks",
                "leave the rows to the runtime, which deals them out; or take "
                "rows[rank::world_size]",
                trial.location,
            )

    def test_digest(self, trial: Trial) -> None:
        """the digest distinguishes these rows from any others"""
        from rlcli.runtime.data_order import digest_rows

        rows = trial.named_rows_or_skip()
        digest = digest_rows(trial.demand(rows))
        location = place_of(trial.cls.digest) if hasattr(trial.cls, "digest") else trial.location
        if digest_rows(trial.demand(rows)) != digest:
            raise Violation(
                "the same rows have another digest", "digest the rows, nothing else", location
            )
        changes = {"one row less": rows[:-1], "the rows in reverse order": rows[::-1]}
        same_id = {"id": rows[0]["id"]} if "id" in rows[0] else {}
        others = [row | same_id for row in rows[1:] if row | same_id != rows[0]]
        if others:
            changes["other words in row 0"] = [others[0], *rows[1:]]
        for change, changed in changes.items():
            if digest_rows(trial.demand(changed)) == digest:
                raise Violation(
                    f"with {change} the digest is the same",
                    "let it cover every row's id, texts and tokens: a resumed run trusts it",
                    location,
                )


def _demand_same_rows(trial: Trial, copies: Rows, **settings: Any) -> None:
    rows = trial.demand(copies, streaming=False, **settings)
    stream = trial.demand(copies, streaming=True, **settings)
    for start in STARTS:
        continued = list(islice(stream.rows_from(0, start), 2))
        trial.demand_same(
            [rows[index] for index in range(start, min(start + 2, len(rows)))],
            continued,
            f"with streaming, read from row {start} on",
            "a stream has the rows of the file, in its order, without those that it drops",
            place_of(reader(stream)),
        )


def _unlike(
    expected: Sequence[SequenceSample], samples: Sequence[SequenceSample], has_ids: bool
) -> str:
    """How the rows found differ from those of the same id or, without ids,
    from any with the same content."""
    if has_ids:
        by_id = {id_of(sample): content_of(sample) for sample in expected}
        for sample in samples:
            if different := difference(by_id.get(id_of(sample), {}), content_of(sample)):
                return f"row {id_of(sample)!r}: {different}"
        return ""
    former = contents(expected)
    strange = [index for index, content in enumerate(contents(samples)) if content not in former]
    return f"row {strange[0]} holds what no row held before" if strange else ""


def _spoil(sample: SequenceSample) -> None:
    """Change in place whatever can be changed."""
    for tensor in (sample.data or {}).values():
        if tensor is not None:
            tensor.fill_(1)
    for lengths in sample.seqlens.values():
        for inner in lengths:
            inner.append(1)
    for values in sample.metadata.values():
        for value in copy.copy(values):
            if isinstance(value, list):
                value.append("spoilt")
            elif isinstance(value, dict):
                value["spoilt"] = "spoilt"
        values.append("spoilt")
    sample.ids.append("spoilt")


@contextmanager
def _global_randomness(seed: int) -> Iterator[Any]:
    """Set the process's random generators to `seed`, then restore them; yields a function to tell
    which ones moved."""
    import numpy as np
    import torch

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    start = _random_states()

    def moved() -> str:
        return ", ".join(name for name, state in _random_states().items() if state != start[name])

    try:
        yield moved
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _random_states() -> dict[str, Any]:
    """Those of the process's generators, in a form that compares."""
    import numpy as np
    import torch

    return {
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
    }
