"""Plans of slices: every number that is wanted comes once, from a rank that has it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcli.api.weight_blocks import WeightBlock
from rlcli.errors import WorkerError
from rlcli.topology.weight_plan import plan_slices

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


@settings(max_examples=60, deadline=None)
@given(layouts([0, 1, 2]), layouts([2, 3, 4]), st.sampled_from([1, 20, 1000]))
def test_what_is_wanted_arrives_whole_from_ranks_that_have_it(held, wanted, size):
    whole = {name: np.arange(math.prod(shape)).reshape(shape) for name, shape in SHAPES.items()}

    def read(block):
        return whole[block.name][
            tuple(slice(a, a + n) for a, n in zip(block.offsets, block.sizes, strict=True))
        ]

    arrived = {
        (rank, block): np.full(block.sizes, -1)
        for rank, blocks in wanted.items()
        for block in blocks
    }
    plans = {rank: plan_slices(held, wanted, size, rank) for rank in range(5)}
    for rank, plan in plans.items():
        told = [one for bucket in plan for one in bucket.slices]
        assert all(rank in (one.source, one.target) for one in told)
        for one in told:  # the other end knows of it too
            others = plans[one.source + one.target - rank]
            assert one in [other for bucket in others for other in bucket.slices]
    for plan in plans.values():
        assert [bucket.names for bucket in plan] == [bucket.names for bucket in plans[0]]
    for target, plan in plans.items():
        for one in (one for bucket in plan for one in bucket.slices if one.target == target):
            assert one.source_block in held[one.source]
            assert one.target_block in wanted[one.target]
            place = arrived[one.target, one.target_block]
            assert (place[one.block.within(one.target_block)] == -1).all()  # nothing comes twice
            place[one.block.within(one.target_block)] = read(one.source_block)[
                one.block.within(one.source_block)
            ]
    for (_, block), numbers in arrived.items():
        assert (numbers == read(block)).all()
    names = [name for bucket in plans[0] for name in bucket.names]
    assert sorted(names) == sorted(SHAPES)
    assert all(
        len(b.names) == 1 or sum(math.prod(SHAPES[name]) for name in b.names) <= size
        for b in plans[0]
    )


def test_what_a_rank_has_itself_does_not_travel():
    whole = WeightBlock.whole("w", (4, 2))
    ends = []
    for rank in range(3):
        (bucket,) = plan_slices({0: [whole], 1: [whole]}, {1: [whole], 2: [whole]}, 100, rank)
        ends.append([(one.source, one.target) for one in bucket.slices])
    assert ends == [[(0, 2)], [(1, 1), (1, 2)], [(0, 2), (1, 2)]]


@pytest.mark.parametrize(
    ("holders", "takers"), [(3, 1), (1, 3), (3, 4), (4, 3), (7, 5), (16, 2), (8, 64), (5, 5)]
)
def test_holders_of_the_same_block_share_the_sending(holders, takers):
    """Also of a model that is mostly one large parameter."""
    blocks = [WeightBlock.whole(name, (4000, rows)) for name, rows in [("head", 9), ("body", 1)]]
    sources = dict.fromkeys(range(holders), blocks)
    targets = dict.fromkeys(range(holders, holders + takers), blocks)
    sent = [numbers_sent(plan_slices(sources, targets, 10**9, rank), rank) for rank in sources]
    assert sum(sent) == takers * 40_000
    assert max(sent) <= 1.1 * sum(sent) / holders


def numbers_sent(plan, rank):
    return sum(
        moving.block.numbers
        for bucket in plan
        for moving in bucket.slices
        if moving.source == rank != moving.target
    )


@pytest.mark.parametrize(
    ("held", "what"),
    [
        ({0: [WeightBlock("w", (4,), (0,), (2,))]}, "does not hold every number of w"),
        ({0: [WeightBlock("w", (4,), (0,), (3,)), WeightBlock("w", (4,), (2,), (2,))]}, "once"),
        ({0: [WeightBlock.whole("w", (5,))]}, "does not hold every number of w"),
        ({0: [WeightBlock.whole("v", (4,))]}, "has no such parameter"),
    ],
)
def test_a_source_that_lacks_numbers_is_refused(held, what):
    with pytest.raises(WorkerError, match=what):
        plan_slices(held, {1: [WeightBlock.whole("w", (4,))]}, 100, 1)
