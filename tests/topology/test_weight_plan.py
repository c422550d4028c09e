"""Plans of slices: every number that is wanted comes once, from a rank that has it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError
from rlcli.topology.weight_plan import (
    RankLayout,
    decode_layouts,
    encode_layouts,
    plan_slices,
)

SHAPES = {"embedding": (7, 4), "norm": (5,), "projection": (6, 8), "scale": ()}


def cut(shape, axis, ranks):
    """The regions that ranks have of a parameter which is cut along an axis: the last ones may be
    smaller, or empty."""
    each = -(-shape[axis] // len(ranks))
    for place, rank in enumerate(ranks):
        first = min(shape[axis], place * each)
        region = [slice(0, size) for size in shape]
        region[axis] = slice(first, min(shape[axis], first + each))
        yield rank, tuple(region)


@st.composite
def layouts(draw, ranks):
    """Rank → its blocks: each parameter is whole on some ranks, or cut along an axis."""
    held = {rank: [] for rank in ranks}
    for name, shape in SHAPES.items():
        axis = draw(st.sampled_from([None, *range(len(shape))]))
        some = draw(st.lists(st.sampled_from(ranks), min_size=1, unique=True).map(sorted))
        if axis is None:
            for rank in some:
                held[rank].append(WeightBlock.whole(name, shape))
            continue
        for rank, region in cut(shape, axis, some):
            block = WeightBlock.of_region(name, shape, region)
            if block.numbers:
                held[rank].append(block)
    return held


def planned(sources, targets, size, rank):
    """The plan of a rank, from what all ranks tell each other: their blocks of both roles."""
    ranks = sorted({*sources, *targets})
    texts = [encoded(sources, targets, member) for member in ranks]
    return plan_slices(*decode_layouts(ranks, *zip(*texts, strict=True)), size, rank)


def encoded(sources, targets, rank):
    roles = (sources, targets)
    return encode_layouts(RankLayout.of(blocks.get(rank, ())) for blocks in roles)


def slices_of(plan):
    parameters = (item for bucket in plan for item in bucket.routes.items())
    return [moving.of(name) for name, routes in parameters for moving in routes.slices]


def read(block):
    """Its elements: each has the number of its position in the parameter."""
    numbers = np.arange(math.prod(block.shape)).reshape(block.shape)
    return numbers[block.within(WeightBlock.whole(block.name, block.shape))]


@given(layouts([0, 1, 2]), layouts([2, 3, 4]), st.sampled_from([1, 20, 1000]))
def test_what_is_wanted_arrives_whole_from_ranks_that_have_it(sources, targets, size):
    plans = {rank: planned(sources, targets, size, rank) for rank in range(5)}
    slices = {rank: slices_of(plan) for rank, plan in plans.items()}
    require_that_both_ends_agree(slices)
    require_the_same_buckets([*plans.values()], size)
    for rank, blocks in targets.items():
        arriving = [moving for moving in slices[rank] if moving.target == rank]
        for block in blocks:
            own_slices = [moving for moving in arriving if moving.target_block == block]
            assert (arrived(block, own_slices, sources) == read(block)).all()


def arrived(block, slices, sources):
    """The elements that slices bring to a block of the target; nothing comes twice."""
    numbers = np.full(block.sizes, -1)
    for moving in slices:
        assert moving.source_block in sources[moving.source]
        region = moving.block.within(block)
        assert (numbers[region] == -1).all()
        numbers[region] = read(moving.source_block)[moving.block.within(moving.source_block)]
    return numbers


def require_that_both_ends_agree(slices):
    for rank, moved in slices.items():
        assert all(rank in (moving.source, moving.target) for moving in moved)
        assert all(moving in slices[moving.source + moving.target - rank] for moving in moved)


def require_the_same_buckets(plans, size):
    names = [[*bucket.routes] for bucket in plans[0]]
    for plan in plans:
        assert [[*bucket.routes] for bucket in plan] == names
    assert sorted(itertools.chain(*names)) == sorted(SHAPES)
    for bucket in names:
        elements = sum(math.prod(SHAPES[name]) for name in bucket)
        assert len(bucket) == 1 or elements <= size


def test_what_a_rank_has_itself_does_not_travel():
    whole = WeightBlock.whole("w", (4, 2))
    ends = []
    for rank in range(3):
        plan = planned({0: [whole], 1: [whole]}, {1: [whole], 2: [whole]}, 100, rank)
        ends.append([(moving.source, moving.target) for moving in slices_of(plan)])
    assert ends == [[(0, 2)], [(1, 1), (1, 2)], [(0, 2), (1, 2)]]


@pytest.mark.parametrize(
    ("holders", "takers"), [(3, 1), (1, 3), (3, 4), (4, 3), (7, 5), (16, 2), (8, 64), (5, 5)]
)
def test_holders_of_the_same_block_share_the_sending(holders, takers):
    """Also of a model that is mostly one large parameter."""
    blocks = [WeightBlock.whole(name, (4000, rows)) for name, rows in [("head", 9), ("body", 1)]]
    sources = dict.fromkeys(range(holders), blocks)
    targets = dict.fromkeys(range(holders, holders + takers), blocks)
    sent = [numbers_sent(planned(sources, targets, 10**9, rank), rank) for rank in sources]
    assert sum(sent) == takers * 40_000
    assert max(sent) <= 1.1 * sum(sent) / holders


def numbers_sent(plan, rank):
    return sum(
        moving.block.numbers for moving in slices_of(plan) if moving.source == rank != moving.target
    )


def blocks_of_layers(layers):
    """(sources, targets): of two matrices in each layer and a head, which rank 7 does not have."""
    names = [f"{layer}.{name}" for layer in range(layers) for name in "qk"] + ["head"]
    sources = {
        rank: [WeightBlock.of_region(name, (24, 8), region) for name in names]
        for rank, region in cut((24, 8), 0, range(6))
    }
    complete = [WeightBlock.whole(name, (24, 8)) for name in names]
    return sources, {6: complete, 7: complete[:-1]}


def test_parameters_that_all_ranks_cut_alike_are_planned_once(monkeypatch):
    """Forty layers take no more comparisons of blocks than one. A parameter of the same shape that
    some rank does not hold has routes of its own."""
    comparisons = []
    common = WeightBlock.common

    def counted(*blocks):
        comparisons.append(blocks)
        return common(*blocks)

    monkeypatch.setattr(WeightBlock, "common", counted)
    numbers = []
    for layers in (1, 40):
        comparisons.clear()
        (bucket,) = planned(*blocks_of_layers(layers), 10**9, 0)
        numbers.append(len(comparisons))
        assert bucket.routes["0.q"] is bucket.routes["0.k"] is not bucket.routes["head"]
        assert len({id(routes) for routes in bucket.routes.values()}) == 2
        assert len(slices_of([bucket])) == layers * 4 + 1
    assert numbers[0] == numbers[1] > 0


def test_ranks_that_hold_the_same_parameters_share_one_list_of_them():
    """Of the names of a large model each rank would need megabytes for every other rank."""
    blocks = {rank: [WeightBlock("w", (4,), (rank,), (1,))] for rank in range(4)}
    texts = [encoded(blocks, {}, rank) for rank in blocks]
    sources, _ = decode_layouts([*blocks], *zip(*texts, strict=True))
    assert len({id(layout.parameters) for layout in sources.values()}) == 1
    assert [sources[rank].cuts for rank in range(4)] == [
        (((block.of("")),),) for (block,) in blocks.values()
    ]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({0: [WeightBlock("w", (4,), (0,), (2,))]}, "does not hold every number of w"),
        ({0: [WeightBlock("w", (4,), (0,), (3,)), WeightBlock("w", (4,), (2,), (2,))]}, "once"),
        ({0: [WeightBlock.whole("w", (5,))]}, "does not hold every number of w"),
        ({0: [WeightBlock.whole("v", (4,))]}, "has no such parameter"),
    ],
)
def test_a_source_that_lacks_numbers_is_refused(sources, message):
    with pytest.raises(WorkerError, match=message):
        planned(sources, {1: [WeightBlock.whole("w", (4,))]}, 100, 1)
