"""Ranges of tensors: their blocks tile them, and files give every range what another cut wrote."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from rlcli.api.engine import EngineState
from rlcli.api.flat_parts import FlatPart
from rlcli.checkpoint.state import copy_to_host, write_optimizer
from rlcli.checkpoint.state_reading import fill
from rlcli.checkpoint.tensor_files import stored_tensors

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(shapes)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


def part_of(whole, start, stop):
    return FlatPart(whole.shape, start, whole.reshape(-1)[start:stop].clone(), None)


@given(ranges())
def test_blocks_hold_the_range_in_order(case):
    shape, start, stop = case
    whole = torch.arange(math.prod(shape)).view(shape)
    part = part_of(whole, start, stop)
    found = [box.tensor.reshape(-1) for box in part.boxes()]
    assert torch.cat([whole.new_zeros(0), *found]).tolist() == list(range(start, stop))
    for box in part.boxes():
        region = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.tensor.shape, strict=True))
        assert torch.equal(whole[region], box.tensor)
        assert box.tensor.untyped_storage().data_ptr() == part.values.untyped_storage().data_ptr()


def test_ranges_that_one_cut_wrote_fill_those_of_another(tmp_path):
    whole = torch.arange(60.0).view(4, 3, 5)
    cuts = [(0, 7), (7, 7), (7, 38), (38, 60)]
    for rank, cut in enumerate(cuts):
        copy = copy_to_host(EngineState({}, {"w/moment": part_of(whole, *cut)}), leads=rank == 0)
        write_optimizer(copy, tmp_path, rank)
    for start, stop in [(0, 60), (0, 1), (11, 52), (30, 30)]:
        part = part_of(torch.zeros_like(whole), start, stop)
        fill({"w/moment": part}, tmp_path)
        assert part.values.tolist() == list(range(start, stop))
    assert torch.equal(torch.from_numpy(stored_tensors_of(tmp_path)), whole)


def stored_tensors_of(folder):
    (folder / "config.json").write_text("{}")
    return stored_tensors(folder)["w/moment"].read().view("float32")


def test_a_rank_writes_the_same_bytes_in_any_process(tmp_path):
    """Entries of a file's metadata are written in random order: there is only one."""
    copy = copy_to_host(EngineState({}, {"w/moment": part_of(torch.arange(6.0).view(2, 3), 0, 6)}), leads=True)
    [file] = write_optimizer(copy, tmp_path, 0)
    with safe_open(str(file), framework="np") as opened:
        assert len(opened.metadata()) == 1
