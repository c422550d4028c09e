"""Partitions of sequences: the results of the seed systems' code,
and properties that hold for any lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.partition import (
    SequenceSplitSpec,
    ffd_allocate,
    flat2d,
    min_abs_diff_partition,
    partition_balanced,
)


@pytest.mark.parametrize(
    ("lengths", "k", "parts"),
    [
        ([1, 2, 3, 4, 5], 2, [(0, 3), (3, 5)]),
        ([10, 1, 1, 1, 10], 2, [(0, 3), (3, 5)]),
        ([5, 5, 5, 5], 3, [(0, 2), (2, 3), (3, 4)]),
        ([7], 1, [(0, 1)]),
    ],
)
def test_contiguous_parts_match_the_seed_systems(lengths, k, parts):
    assert min_abs_diff_partition(lengths, k) == parts
    assert min_abs_diff_partition(np.array(lengths), k) == parts
    assert partition_balanced(lengths, k).tolist() == [0, *(end for _, end in parts)]


@pytest.mark.parametrize(
    ("values", "capacity", "min_groups", "groups"),
    [
        ([7, 5, 3, 3, 2], 10, 1, [[0, 3], [1, 2, 4]]),
        ([7, 5, 3, 3, 2], 10, 3, [[0], [1, 4], [2, 3]]),
        ([6, 4, 4, 2, 2, 2], 8, 1, [[0, 3], [1, 2], [4, 5]]),
        ([10, 1, 1, 1], 10, 1, [[0], [1, 2, 3]]),
    ],
)
def test_first_fit_decreasing_matches_the_seed_systems(values, capacity, min_groups, groups):
    assert ffd_allocate(values, capacity, min_groups) == groups


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ffd_allocate([11], 10, 1), "larger than capacity"),
        (lambda: ffd_allocate([1, 2], 10, 3), "smaller than min_groups"),
        (lambda: min_abs_diff_partition([[1, 2]], 1), "one-dimensional"),
        (lambda: min_abs_diff_partition([1, 2], 3), "2 items into 3 parts"),
        (lambda: min_abs_diff_partition([1, 2, 3], 2, min_size=2), "at least 2"),
        (lambda: min_abs_diff_partition([1], 0), "at least 1"),
    ],
)
def test_impossible_requests_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_flat2d_concatenates_lists():
    assert flat2d([[1, 2], [], [3]]) == [1, 2, 3]


lengths = st.lists(st.integers(0, 50), min_size=1, max_size=14)


@given(lengths, st.data())
def test_contiguous_parts_cover_everything_and_respect_the_minimum(values, data):
    k = data.draw(st.integers(1, len(values)))
    min_size = data.draw(st.integers(1, len(values) // k))
    parts = min_abs_diff_partition(values, k, min_size)
    assert len(parts) == k
    assert flat2d(range(start, end) for start, end in parts) == list(range(len(values)))
    assert all(end - start >= min_size for start, end in parts)


@given(lengths.filter(lambda values: len(values) > 1))
def test_two_parts_are_balanced_and_ties_go_to_the_later_cut(values):
    def difference(cut):
        return abs(sum(values[:cut]) - sum(values[cut:]))

    cut = min_abs_diff_partition(values, 2)[0][1]
    assert (difference(cut), -cut) == min((difference(c), -c) for c in range(1, len(values)))


@given(lengths, st.integers(50, 120), st.data())
def test_groups_respect_the_cap_and_contain_every_item_once(values, capacity, data):
    min_groups = data.draw(st.integers(1, len(values)))
    groups = ffd_allocate(values, capacity, min_groups)
    assert sorted(flat2d(groups)) == list(range(len(values)))
    assert all(sum(values[i] for i in group) <= capacity for group in groups)
    assert len(groups) >= min_groups
    assert all(groups)


def test_a_split_spec_takes_sizes_or_partitions():
    assert SequenceSplitSpec(sizes=[2, 3]).partitions == [(0, 2), (2, 5)]
    assert SequenceSplitSpec(partitions=[(0, 2), (2, 5)]).sizes == [2, 3]
    assert SequenceSplitSpec(partitions=[(0, 2)], sizes=[2]).sizes == [2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs partitions or sizes"),
        ({"sizes": []}, "at least one part"),
        ({"partitions": []}, "at least one part"),
        ({"sizes": [1, 0]}, "empty"),
        ({"partitions": [(0, 2), (2, 2)]}, "empty"),
        ({"partitions": [(0, 2), (3, 4)]}, "does not start at 2"),
        ({"partitions": [(1, 2)]}, "does not start at 0"),
        ({"partitions": [(0, 2)], "sizes": [1]}, "contradict"),
    ],
)
def test_an_invalid_split_spec_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SequenceSplitSpec(**fields)
