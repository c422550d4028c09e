"""Rows of a stream by number."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.errors import DataError
from rlcli.runtime import data_order
from rlcli.runtime.data_order import StreamRows


class Numbers:
    """Row n of pass e holds [e, n]; `given` counts what was asked for."""

    def __init__(self, rows):
        self.rows = rows
        self.given = []

    def rows_from(self, epoch, start):
        for number in range(start, self.rows):
            self.given.append((epoch, number))
            yield SequenceSample.from_default(
                ids=[number], seqlens=[2], data={"packed_prompts": torch.tensor([epoch, number])}
            )


def content(sample):
    return tuple(sample.data["packed_prompts"].tolist()) if sample is not None else None


def test_rows_are_read_once_and_forward():
    source = Numbers(10)
    rows = StreamRows(source, "train")
    for number in (0, 1, 4, 2, 1, 5):
        assert content(rows.row(0, number)) == (0, number)
    assert source.given == [(0, number) for number in range(6)]


def test_the_number_of_rows_of_a_pass_is_noted_at_its_end():
    rows = StreamRows(Numbers(4), "train")
    assert content(rows.row(0, 3)) == (0, 3)
    assert rows.length is None
    assert rows.row(0, 4) is None
    assert rows.length == 4
    assert content(rows.row(1, 0)) == (1, 0)


@pytest.mark.parametrize("first", [4, 5, 9])
def test_the_end_is_known_even_if_the_first_row_asked_for_is_beyond_it(first):
    rows = StreamRows(Numbers(4), "train")
    assert rows.row(0, first) is None
    assert rows.length == 4


def test_a_row_that_is_no_longer_cached_is_read_again(monkeypatch):
    monkeypatch.setattr(data_order, "CACHED_ROWS", 2)
    source = Numbers(10)
    rows = StreamRows(source, "train")
    for number in (0, 1, 2, 3, 0, 1):
        assert content(rows.row(0, number)) == (0, number)
    assert source.given == [(0, number) for number in (0, 1, 2, 3, 0, 1)]


def test_passes_of_different_lengths_are_refused():
    source = Numbers(4)
    rows = StreamRows(source, "train")
    assert rows.row(0, 4) is None
    source.rows = 3
    with pytest.raises(DataError, match="3 rows in pass 2, and had 4 in another"):
        rows.row(1, 3)


def test_a_row_that_cannot_be_used_is_named():
    class Broken(Numbers):
        def rows_from(self, epoch, start):
            yield "no sample"

    with pytest.raises(Exception, match="row 1 of dataset train"):
        StreamRows(Broken(1), "train").row(0, 0)
