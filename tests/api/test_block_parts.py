"""Ranges and blocks of tensors: blocks tile a range, and files written for one partition are read
for another."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from rlcli.api.block_parts import BlockPart, flat_part
from rlcli.api.engine import EngineState
from rlcli.checkpoint.state import copy_to_host, write_optimizer
from rlcli.checkpoint.state_reading import fill
from rlcli.checkpoint.tensor_files import stored_tensors

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(shapes)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


def flat_part_of(tensor, start, stop):
    return flat_part(tensor.shape, start, tensor.reshape(-1)[start:stop].clone(), None)


@given(ranges())
def test_blocks_cover_the_range_in_order_and_share_its_memory(case):
    shape, start, stop = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    flat = flat_part_of(tensor, start, stop)
    blocks = [box.tensor.reshape(-1) for box in flat.boxes()]
    assert torch.cat([tensor.new_zeros(0), *blocks]).tolist() == list(range(start, stop))
    for box in flat.boxes():
        assert torch.equal(tensor[box.region], box.tensor)
        assert box.tensor.untyped_storage().data_ptr() == flat.values.untyped_storage().data_ptr()


def test_ranges_written_for_one_partition_fill_those_of_another(tmp_path):
    tensor = torch.arange(60.0).view(4, 3, 5)
    cuts = [(0, 7), (7, 7), (7, 38), (38, 60)]
    for rank, cut in enumerate(cuts):
        copy = copy_to_host(
            EngineState({}, {"w/moment": flat_part_of(tensor, *cut)}), leads=rank == 0
        )
        write_optimizer(copy, tmp_path, rank)
    for start, stop in [(0, 60), (0, 1), (11, 52), (30, 30)]:
        flat = flat_part_of(torch.zeros_like(tensor), start, stop)
        fill({"w/moment": flat}, tmp_path)
        assert flat.values.tolist() == list(range(start, stop))
    assert torch.equal(torch.from_numpy(stored_moment(tmp_path)), tensor)


def test_several_blocks_of_a_rank_are_written_and_read(tmp_path):
    tensor = torch.arange(32.0).view(2, 4, 4)
    for rank, row in enumerate((0, 2)):
        spans = [((0, row, 0), (2, 1, 4)), ((0, row + 1, 1), (1, 1, 3))]
        block_part = BlockPart.of(tensor.shape, spans, None)
        for box in block_part.boxes():
            box.tensor.copy_(tensor[box.region])
        copy = copy_to_host(EngineState({}, {"w/m": block_part}), leads=rank == 0)
        write_optimizer(copy, tmp_path, rank)
    two_rows = BlockPart.of(tensor.shape, [((1, 2, 1), (1, 1, 2)), ((0, 3, 2), (1, 1, 2))], None)
    fill({"w/m": two_rows}, tmp_path)
    assert two_rows.values.tolist() == [25.0, 26.0, 14.0, 15.0]


def stored_moment(folder):
    (folder / "config.json").write_text("{}")
    return stored_tensors(folder)["w/moment"].read().view("float32")


def test_an_optimizer_file_has_one_metadata_entry(tmp_path):
    """Entries of a file's metadata are written in random order, so there must be only one."""
    copy = copy_to_host(
        EngineState({}, {"w/moment": flat_part_of(torch.arange(6.0).view(2, 3), 0, 6)}), leads=True
    )
    [file] = write_optimizer(copy, tmp_path, 0)
    with safe_open(str(file), framework="np") as opened:
        assert len(opened.metadata()) == 1
