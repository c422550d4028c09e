"""The accepted forms of sequence lengths, and how the lengths of a key follow from its name or its
rows."""

import numpy as np
import pytest
import torch

from rlcli.api.data import SequenceSample


@pytest.mark.parametrize(
    "lengths",
    [
        [3, 2],
        (3, 2),
        [[3], [2]],
        [(3,), np.int64(2)],
        torch.tensor([3, 2]),
        np.array([3, 2], dtype=np.int32),
        [torch.tensor([3]), np.array([2])],
        [torch.tensor(3), torch.tensor(2)],
        torch.tensor([[3], [2]]),
    ],
    ids=str,
)
def test_lengths_in_many_forms_become_lists_of_ints(lengths):
    sample = SequenceSample(ids=["a", "b"], seqlens={"x": lengths}, data={"x": torch.zeros(5)})
    assert sample.seqlens == {"x": [[3], [2]]}
    assert all(type(length) is int for length in sample.flat_seqlens("x"))


@pytest.mark.parametrize(
    "lengths",
    [
        [True],
        ["3"],
        "3",
        [3.0],
        [-1],
        [None],
        [[[3]]],
        3,
        torch.tensor([True]),
        torch.tensor([3.0]),
        np.array([True]),
        np.array(["3"]),
        [torch.tensor(True)],
        [np.bool_(True)],
    ],
    ids=repr,
)
def test_invalid_lengths_are_refused_and_not_converted(lengths):
    with pytest.raises(ValueError, match="seqlens of 'x'"):
        SequenceSample(ids=["a"], seqlens={"x": lengths}, data={"x": torch.zeros(3)})


def test_lengths_of_known_keys_follow_from_their_names():
    sample = SequenceSample.from_default(
        ids=["a", "b"],
        seqlens=[[2, 1], 3],
        data={
            "packed_input_ids": torch.arange(6),
            "prompt_mask": torch.zeros(6, dtype=torch.bool),
            "packed_logprobs": torch.zeros(3),
            "packed_ref_logprobs": torch.zeros(3),
            "values": torch.zeros(6),
            "rewards": torch.zeros(3),
            "solved": torch.zeros(3, dtype=torch.bool),
            "seq_no_eos_mask": torch.zeros(3, dtype=torch.bool),
        },
        metadata={"answer": ["1", "2"]},
    )
    assert sample.seqlens["packed_input_ids"] == [[2, 1], [3]]
    assert sample.seqlens["packed_logprobs"] == [[1, 0], [2]]
    assert sample.seqlens["rewards"] == [[1, 1], [1]]


def test_lengths_of_unknown_keys_follow_from_their_number_of_rows():
    def lengths(rows, tokens):
        return SequenceSample.from_default(
            ids=["a", "b"], seqlens=tokens, data={"mine": torch.zeros(rows, 3)}
        ).seqlens["mine"]

    assert lengths(7, [3, 4]) == [[3], [4]]
    assert lengths(5, [3, 4]) == [[2], [3]]
    assert lengths(2, [3, 4]) == [[1], [1]]
    assert lengths(2, [1, 1]) == [[1], [1]]
    with pytest.raises(ValueError, match="'mine' has 2 rows, which fits more than one reading"):
        lengths(2, [1, 3])
    with pytest.raises(ValueError, match="'mine' has 6 rows, which should have 7 or 5 or 2"):
        lengths(6, [3, 4])


def test_a_known_key_with_a_wrong_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="'packed_logprobs' has 3 rows, which should have 2"):
        SequenceSample.from_default(
            ids=["a"], seqlens=[3], data={"packed_logprobs": torch.zeros(3)}
        )
    with pytest.raises(ValueError, match="without its tensor"):
        SequenceSample.from_default(ids=["a"], seqlens=[3], data={"mine": None})


def test_explicit_lengths_of_every_key_are_used_unchanged():
    sample = SequenceSample.from_default(
        ids=["a"],
        seqlens={"values": [2], "mine": [[1, 2]]},
        data={"values": torch.ones(2), "mine": torch.ones(3)},
    )
    assert sample.seqlens == {"mine": [[1, 2]], "values": [[2]]}
    with pytest.raises(ValueError, match="data and keys differ"):
        SequenceSample.from_default(
            ids=["a"], seqlens={"values": [2]}, data={"mine": torch.ones(2)}
        )
