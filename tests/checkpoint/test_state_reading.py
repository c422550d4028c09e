"""Which files of a checkpoint a rank opens: its own and the first in the same layout,
otherwise all of them."""

import os

import pytest
import torch
from heard_work import heard_work

from rlcli.api.block_parts import flat_part
from rlcli.api.engine import EngineState
from rlcli.api.headway import BYTES, Count
from rlcli.checkpoint import state_reading
from rlcli.checkpoint.state import copy_to_host, write_optimizer, writers_of
from rlcli.checkpoint.state_reading import fill
from rlcli.errors import ModelError

RANKS, ROWS, COLUMNS = 16, 32, 4
WHOLE = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
SHARED = torch.tensor([3.0, 5.0])
"""A tensor that is the same on all ranks: the first one writes it."""


def parts_of(rank, ranks=RANKS, rows=ROWS, value=None):
    """The tensors of a rank: an equal range of `w`, all of `shared`,
    and `small` only on the first rank."""
    count = rows * COLUMNS // ranks
    start = rank * count
    flat = torch.arange(rows * COLUMNS, dtype=torch.float32)
    values = flat[start : start + count].clone() if value is None else torch.full((count,), value)
    shared = SHARED.clone() if value is None else torch.full((2,), value)
    # empty on other ranks
    first = torch.tensor([7.0] if value is None else [value])[: 1 if rank == 0 else 0]
    small = flat_part(torch.Size((1,)), min(rank, 1), first, None)
    return {
        "w": flat_part(torch.Size((rows, COLUMNS)), start, values, None),
        "shared": shared,
        "small": small,
    }


def save(folder, ranks=RANKS, rows=ROWS):
    for rank in range(ranks):
        state = EngineState(weights={}, optimizer=parts_of(rank, ranks, rows))
        write_optimizer(copy_to_host(state, leads=rank == 0), folder, rank)


@pytest.fixture
def opened(monkeypatch):
    """The files whose headers are read."""
    opened_names, read_headers = [], state_reading._reader_of

    def note(folder, files):
        opened_names.extend(file.name for file in files)
        return read_headers(folder, files)

    monkeypatch.setattr(state_reading, "_reader_of", note)
    return opened_names


@pytest.mark.parametrize("rank", [0, 1, RANKS - 1])
def test_in_the_same_layout_a_rank_opens_its_own_and_the_first_file(tmp_path, opened, rank):
    save(tmp_path)
    into = parts_of(rank, value=-1.0)
    fill(into, tmp_path, writers_of(into, rank, first=0))
    assert torch.equal(into["w"].values, parts_of(rank)["w"].values)
    assert torch.equal(into["shared"], SHARED)
    assert sorted(opened) == sorted(
        {f"shard-{number:05d}-model-00001-of-00001.safetensors" for number in (1, rank + 1)}
    )


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 32])
def test_state_is_restored_on_another_number_of_ranks(tmp_path, ranks):
    save(tmp_path, ranks)
    for rank in range(RANKS):
        into = parts_of(rank, value=-1.0)
        fill(into, tmp_path, writers_of(into, rank, first=0))
        assert torch.equal(into["w"].values, parts_of(rank)["w"].values)
        assert torch.equal(into["shared"], SHARED)


def test_a_larger_tensor_with_equal_first_blocks_is_refused(tmp_path):
    """Finding its own block does not prove to a rank that the tensor is the same."""
    save(tmp_path, ranks=2 * RANKS, rows=2 * ROWS)
    into = parts_of(3, value=-1.0)
    with pytest.raises(
        ModelError, match=rf"w has shape \({2 * ROWS}, {COLUMNS}\).* and \({ROWS}, {COLUMNS}\)"
    ):
        fill(into, tmp_path, writers_of(into, 3, first=0))


def test_a_missing_tensor_is_named(tmp_path):
    save(tmp_path)
    into = parts_of(3) | {"more": torch.zeros(2)}
    with pytest.raises(ModelError, match="has no more"):
        fill(into, tmp_path, writers_of(into, 3, first=0))


def test_without_recorded_shapes_all_files_are_opened(tmp_path, monkeypatch, opened):
    """Earlier versions did not write these shapes."""
    save(tmp_path)
    monkeypatch.setattr(state_reading, "_whole_shapes", lambda files: {})
    into = parts_of(7, value=-1.0)
    fill(into, tmp_path, writers_of(into, 7, first=0))
    assert torch.equal(into["w"].values, parts_of(7)["w"].values)
    assert len(opened) == 2 + len(os.listdir(tmp_path))


def test_the_bytes_that_a_rank_reads_are_counted(tmp_path):
    save(tmp_path)
    tensors = parts_of(1, value=-1.0)
    with heard_work() as heard:
        fill(tensors, tmp_path)
    size = 4 * (ROWS * COLUMNS // RANKS + len(SHARED))
    assert heard.counts[-1] == Count(size, size, BYTES)
