"""How a batch is split and reordered: contiguous parts, micro-batches under a cap, permutations."""

import pytest
import torch

from rlcli.api.data import MicroBatchSpec, SequenceSample, SequenceSplitSpec
from rlcli.errors import DataError


def batch(ids="abc", lengths=((3,), (2, 4), (1,))):
    """By default three samples of 3, 2 + 4 and 1 tokens."""
    tokens = torch.arange(sum(map(sum, lengths)))
    return SequenceSample.from_default(
        ids=list(ids), seqlens=lengths, data={"packed_input_ids": tokens, "values": tokens.float()}
    )


def test_split_into_contiguous_balanced_parts():
    sample = batch(ids="abcde", lengths=[(1,), (2,), (3,), (4,), (5,)])
    assert [part.ids for part in sample.split(2)] == [["a", "b", "c"], ["d", "e"]]
    assert sample.get_split_spec(2) == SequenceSplitSpec(sizes=[3, 2])
    assert [part.bs for part in sample.split(2, key="values", min_size=2)] == [3, 2]
    assert [part.bs for part in sample.split_with_spec(SequenceSplitSpec(sizes=[4, 1]))] == [4, 1]


def test_impossible_splits_are_refused():
    sample = batch()
    with pytest.raises(ValueError, match="3 items into 4 parts"):
        sample.split(4)
    with pytest.raises(ValueError, match="at least 2"):
        sample.split(2, min_size=2)
    with pytest.raises(ValueError, match="no key 'nothing'"):
        sample.split(2, key="nothing")
    with pytest.raises(ValueError, match="do not cover"):
        sample.split_with_spec(SequenceSplitSpec(sizes=[2]))


def test_micro_batches_respect_the_cap_and_the_minimum_number():
    sample = batch(ids="abcde", lengths=[(7,), (5,), (2, 1), (3,), (2,)])
    parts, groups = sample.split_to_micro_batches(MicroBatchSpec(max_tokens_per_mb=10))
    assert groups == [[0, 3], [1, 2, 4]]
    assert [part.ids for part in parts] == [["a", "d"], ["b", "c", "e"]]
    _, three = sample.split_to_micro_batches(MicroBatchSpec(n_mbs=3, max_tokens_per_mb=10))
    assert len(three) == 3
    _, clamped = sample.split_to_micro_batches(MicroBatchSpec(n_mbs=9))
    assert len(clamped) == 5


def test_the_error_names_a_sample_above_the_cap():
    with pytest.raises(DataError, match=r"error\[F30\].*sample b has 6 tokens.*: 5"):
        batch().split_to_micro_batches(MicroBatchSpec(max_tokens_per_mb=5))


def test_tokens_are_counted_by_the_longest_key_without_packed_input_ids():
    sample = batch().select(["values"])
    assert sample.split_to_micro_batches(MicroBatchSpec(max_tokens_per_mb=6))[1] == [[0, 2], [1]]


def test_an_empty_batch_has_no_micro_batches():
    assert batch().select_indices([]).split_to_micro_batches(MicroBatchSpec(n_mbs=2)) == ([], [])


@pytest.mark.parametrize("indices", [[0, 0], [3], [-1]])
def test_repeated_or_out_of_range_indices_are_refused(indices):
    with pytest.raises(ValueError, match="sample indices"):
        batch().select_indices(indices)


def test_reorder_accepts_only_permutations():
    assert batch().reorder([2, 0, 1]).ids == ["c", "a", "b"]
    for wrong in ([0, 1], [0, 1, 1], [0, 1, 3]):
        with pytest.raises(ValueError, match="not a permutation"):
            batch().reorder(wrong)


def test_reorder_output_refuses_wrong_inverses_and_row_counts():
    with pytest.raises(ValueError, match="inverse"):
        SequenceSample.reorder_output(torch.zeros(3), [[1], [2]], [1, 0], [0, 1])
    with pytest.raises(ValueError, match="has 4 rows"):
        SequenceSample.reorder_output(torch.zeros(4), [[1], [2]], [1, 0], [1, 0])
