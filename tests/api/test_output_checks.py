"""Whatever a component hands back: what can be used is returned as it is,
the rest is one error that names it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.data import SequenceSample
from rlcli.api.output_checks import (
    RowOrigin,
    checked_output,
    checked_row,
    read_reasons,
    read_stats,
    versions,
    warn_of_changes,
)
from rlcli.errors import DataError, NumericError, ProjectError, RlcliError
from rlcli.observe.responses import Moments
from rlcli.registry.faults import CallOrigin
from rlcli.runtime.call_outputs import read_counts, read_sums
from rlcli.runtime.data_order import digest_rows

CPU = torch.device("cpu")
LENGTHS = [[3, 2], [4]]
MINE = CallOrigin("score", "interface mine", "inference", "mine.py:7", False, lambda id_: f"{id_}!")
ASKED = SequenceSample(
    ids=["a", "b"],
    seqlens={"packed_input_ids": LENGTHS},
    data={"packed_input_ids": torch.arange(9)},
    metadata={"answer": ["1", "2"]},
)
ROWS = {
    "rewards": [[1, 1], [1]],
    "values": LENGTHS,
    "packed_logprobs": [[2, 1], [3]],
    "prompt_mask": LENGTHS,
    "own": [[5], [2]],
}


def output(**tensors):
    return SequenceSample(ids=["a", "b"], seqlens={key: ROWS[key] for key in tensors}, data=tensors)


def check(returned, *keys, origin=MINE, **renamed):
    promised = {key: key for key in keys or ("rewards",)} | renamed
    return checked_output(returned, ASKED, promised, origin, CPU)


def refused(returned, words, *keys, error=ProjectError, origin=MINE, **renamed):
    with pytest.raises(RlcliError, match=words) as raised:
        check(returned, *keys, origin=origin, **renamed)
    assert type(raised.value) is error
    assert raised.value.code == "F54"
    assert raised.value.what.startswith("call score: inference of interface mine ")
    return raised.value


def test_a_usable_output_is_returned_unchanged():
    rewards = torch.tensor([1.0, -2.0, 0.5])
    checked = check(output(rewards=rewards, own=torch.zeros(7, 2)), "rewards", "own")
    assert torch.equal(checked.data["rewards"], rewards)
    assert checked.data["rewards"].data_ptr() == rewards.data_ptr()
    assert checked.trailing_shapes["own"] == (2,)


def test_keys_that_the_call_does_not_write_are_dropped():
    assert check(
        output(rewards=torch.zeros(3), own=torch.full((7,), math.nan)), "rewards"
    ).keys == {"rewards"}


def test_a_call_may_return_none():
    assert check(None).keys == set()


def test_a_rank_without_samples_may_give_any_dtype():
    """`torch.tensor([...])` of no samples is float32, whatever it would have held."""
    none = ASKED.select_indices([])
    returned = SequenceSample(
        ids=[], seqlens={"prompt_mask": []}, data={"prompt_mask": torch.tensor([])}
    )
    assert checked_output(returned, none, {"prompt_mask": "prompt_mask"}, MINE, CPU).bs == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
)
def test_a_reward_is_a_number_of_any_kind(dtype):
    assert check(output(rewards=torch.ones(3, dtype=dtype))).dtypes["rewards"] == dtype


def test_outputs_are_detached_from_their_graph():
    rewards = torch.ones(3, requires_grad=True) * 2
    checked = check(output(rewards=rewards))
    assert not checked.data["rewards"].requires_grad
    assert checked.data["rewards"].grad_fn is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "gave rewards nan for sample a!, sequence 2 of 2, which is not finite"),
        (math.inf, "rewards inf for sample a!, sequence 2 of 2, which is not finite"),
        (-math.inf, "rewards -inf for"),
        (1e300, "rewards 1e.300 for .* which does not fit into a float32"),
        (-3.5e38, "rewards -3.5e.38 for .* which does not fit into a float32"),
    ],
)
def test_a_number_that_is_not_finite_is_named_with_its_sample(value, words):
    error = refused(output(rewards=torch.tensor([1.0, value, 2.0], dtype=torch.float64)), words)
    assert error.exit_code == 2
    assert error.where == "mine.py:7"
    assert "rlcli test interface mine" in error.hint


@given(st.lists(st.floats(), min_size=3, max_size=3))
def test_every_reward_that_float32_holds_is_accepted_and_no_other(numbers):
    fits = bool(np.isfinite(np.array(numbers).astype(np.float32)).all())
    returned = output(rewards=torch.tensor(numbers, dtype=torch.float64))
    if fits:
        assert check(returned).data["rewards"].tolist() == numbers
    else:
        with pytest.raises(ProjectError, match="gave rewards"):
            check(returned)


def test_the_largest_of_float32_is_a_reward():
    check(output(rewards=torch.full((3,), torch.finfo(torch.float32).max)))


def test_a_reward_whose_square_overflows_is_warned_about(caplog):
    check(output(rewards=torch.tensor([1.0, 1e18, -1.0])))
    assert not caplog.records
    check(output(rewards=torch.tensor([1.0, -1e30, 2.0])))
    assert "rewards has -1e+30 for sample a!, sequence 2 of 2" in caplog.text


def test_a_component_that_overwrites_its_input_is_warned_about(caplog):
    data = ASKED.select_indices([0, 1])
    before = versions(data)
    warn_of_changes("score", data, before)
    assert not caplog.records
    data.data["packed_input_ids"][0] = 7
    warn_of_changes("score", data, before)
    assert "score overwrites packed_input_ids of its input" in caplog.text


def test_the_error_counts_the_numbers_that_are_not_finite():
    refused(
        output(values=torch.full((9,), math.nan)), r"position 1 of 3.*\(9 of 9 numbers\)", "values"
    )


@pytest.mark.parametrize(
    "origin",
    [
        CallOrigin("score", "interface mine", "inference", "mine.py:7", True, str),
        CallOrigin("score", "interface mine", "inference", None, False, str),
        CallOrigin("score", "interface mine", "inference", None, True, str),
    ],
    ids=["own with a model", "built in", "built in with a model"],
)
def test_numbers_that_weights_may_have_caused_are_a_numeric_error(origin):
    error = refused(
        output(rewards=torch.full((3,), math.nan)), "rewards nan", error=NumericError, origin=origin
    )
    assert error.exit_code == 9
    assert "nothing was trained on it" in error.what


def test_malformed_output_of_a_built_in_component_is_reported_as_a_bug_of_rlcli():
    origin = CallOrigin("score", "interface mine", "inference", None, False, str)
    assert (
        "report"
        in refused({}, "returned a value of type dict", error=RlcliError, origin=origin).hint
    )


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"rewards": torch.zeros(3)}, "a value of type dict, not a SequenceSample"),
        (torch.zeros(3), r"a value of type Tensor of shape \(3,\), not a SequenceSample"),
        ([0.0, 1.0], "a value of type list, not"),
        ("text", r"a value of type str \('text'\), not"),
        (output(rewards=torch.zeros(3)).meta(), "a description without data"),
    ],
)
def test_a_value_that_is_not_a_batch_is_refused(returned, words):
    refused(returned, words)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("data", {"rewards": ["1", "2", "3"]}, "data of 'rewards' is a list, not a tensor"),
        (
            "data",
            {"rewards": np.array([1.0, None, 2.0])},
            "data of 'rewards' is a ndarray, not a tensor",
        ),
        ("data", {"rewards": torch.zeros(2)}, r"has shape \(2,\), expected \(3,\)"),
        ("data", {"rewards": torch.tensor(1.0)}, "does not fit together"),
        ("data", {"rewards": None}, "gave no tensor for rewards"),
        ("data", {}, "missing \\['rewards'\\]"),
        ("seqlens", {"rewards": [[1, 1]]}, "for 1 samples, not for 2"),
        ("seqlens", {"rewards": [[1, -1], [3]]}, "length -1 is negative"),
        ("seqlens", {"rewards": "11"}, "not a list of lengths"),
        ("ids", ["a", "a"], "occur more than once"),
        ("ids", ["a"], "does not fit together"),
        ("ids", [["a"], "b"], "does not fit together"),
        ("metadata", {"errors": [1]}, "metadata 'errors' has 1 entries for 2 samples"),
        ("metadata", {"errors": 1}, "must be a list"),
        ("keys", {"rewards", "more"}, "missing \\['more'\\]"),
    ],
)
def test_a_batch_whose_fields_were_changed_is_validated_again(field, value, words):
    returned = output(rewards=torch.zeros(3))
    setattr(returned, field, value)
    refused(returned, words)


def test_other_samples_than_those_requested_are_refused():
    returned = output(rewards=torch.zeros(3))
    returned.ids = ["a", "c"]
    refused(returned, "returned nothing for sample b! and something for 'c', not requested")
    returned.ids = ["b", "a"]
    refused(returned, "in another order, b where sample a! was requested; return ids=data.ids")
    refused(returned.select_indices([0]), "returned nothing for sample a!; return ids=data.ids")


@pytest.mark.parametrize(
    ("key", "tensor", "words"),
    [
        ("rewards", torch.zeros(3, dtype=torch.complex64), "as complex64, which cannot be sent"),
        ("rewards", torch.zeros(3, device="meta"), "gave rewards as a meta tensor"),
        ("rewards", torch.zeros(3).to_sparse(), "gave rewards as a sparse_coo tensor"),
        (
            "rewards",
            torch.zeros(3, 2),
            r"gave rewards of shape \(3, 2\); it must have one dimension",
        ),
        (
            "values",
            torch.zeros(9, dtype=torch.int64),
            "gave values as int64; it must be floating-point",
        ),
        (
            "prompt_mask",
            torch.zeros(9, dtype=torch.int64),
            "gave prompt_mask as int64; it must be bool",
        ),
        ("prompt_mask", torch.zeros(9), "gave prompt_mask as float32; it must be bool"),
        ("packed_logprobs", torch.full((6,), 0.5), "gave packed_logprobs 0.5 for .*never above 0"),
    ],
)
def test_a_key_of_the_wrong_dtype_shape_or_range_is_refused(key, tensor, words):
    refused(output(**{key: tensor}), words, key)


@pytest.mark.parametrize(
    ("key", "lengths", "words"),
    [
        (
            "rewards",
            LENGTHS,
            r"of lengths \[3, 2\] for sample a!; it must be one per sequence: \[1, 1\]",
        ),
        (
            "rewards",
            [[1], [2]],
            r"lengths \[1\] for sample a!; .* \[1, 1\] for sequences of \[3, 2\] tokens",
        ),
        ("values", [[2, 3], [4]], "must be one per token"),
        ("packed_logprobs", LENGTHS, "one per token except the first"),
    ],
)
def test_lengths_that_do_not_fit_the_sequences_are_refused(key, lengths, words):
    tensor = torch.zeros(sum(map(sum, lengths)))
    refused(SequenceSample(ids=["a", "b"], seqlens={key: lengths}, data={key: tensor}), words, key)


def test_a_renamed_key_is_checked_by_the_name_that_the_graph_gives_it():
    returned = SequenceSample(
        ids=["a", "b"], seqlens={"score": LENGTHS}, data={"score": torch.zeros(9)}
    )
    refused(returned, "gave score of lengths", score="rewards")
    assert check(returned, score="bonus").keys == {"score"}


def test_responses_are_measured_by_the_sequences_that_came_with_them():
    lengths = {
        "packed_input_ids": [[2], [2, 3]],
        "prompt_mask": [[2], [2, 3]],
        "seq_no_eos_mask": [[1], [1, 1]],
    }
    data = {
        "packed_input_ids": torch.arange(7),
        "prompt_mask": torch.ones(7, dtype=torch.bool),
        "seq_no_eos_mask": torch.zeros(3, dtype=torch.bool),
    }
    returned = SequenceSample(ids=["a", "b"], seqlens=lengths, data=data)
    assert check(returned, *lengths).keys == set(lengths)
    returned.data["packed_input_ids"] = returned.data["packed_input_ids"] - 3
    refused(returned, "gave packed_input_ids the token -3 for sample a!, position 1 of 2", *lengths)
    returned.data["packed_input_ids"] = torch.rand(7)
    refused(returned, "packed_input_ids as float32; it must be whole numbers", *lengths)
    empty = SequenceSample(
        ids=["a", "b"],
        seqlens={"packed_input_ids": [[2], [0]]},
        data={"packed_input_ids": torch.arange(2)},
    )
    refused(empty, "without a token for sequence 1 of 1 of sample b!", "packed_input_ids")


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        (None, "returned None, not a dict of numbers"),
        ([("loss", 1.0)], "returned a value of type list"),
        ({"loss": None}, "reported loss as None, which is not a number"),
        ({"loss": "1.0"}, r"reported loss as a value of type str \('1.0'\)"),
        ({"loss": torch.zeros(2)}, r"reported loss as a value of type Tensor of shape \(2,\)"),
        ({"loss": 1j}, "reported loss as a value of type complex"),
        ({"loss": [1.0]}, "reported loss as a value of type list"),
        ({"loss": 10**400}, "reported loss as a value of type int"),
        ({1: 1.0}, "reported a number under 1, which is not a string"),
    ],
)
def test_stats_that_are_not_numbers_are_refused(stats, words):
    with pytest.raises(ProjectError, match=words):
        read_stats(stats, MINE)


def test_stats_of_any_number_type_become_floats():
    given_ = {
        "a": 1,
        "b": torch.tensor(2.5),
        "c": np.float32(3),
        "d": True,
        "e": torch.tensor([4]),
        "f": math.nan,
    }
    read = read_stats(given_, MINE)
    assert [type(value) for value in read.values()] == [float] * 6
    assert list(read.values())[:5] == [1.0, 2.5, 3.0, 1.0, 4.0]
    assert math.isnan(read["f"])


def test_numbers_in_metadata_are_counted():
    assert read_counts(
        {"errors": [1, 2], "note": ["a", "b"], "some": [1, None], "none": []}, MINE
    ) == {"errors": Moments(total=3.0, squares=5.0, size=2)}
    with pytest.raises(ProjectError, match="counted errors as a value of type int"):
        read_counts({"errors": [10**400]}, MINE)


def test_sums_in_metadata_are_pairs_of_a_sum_and_a_count():
    metadata = {
        "shaped_reward": [(1.5, 2), (-0.5, 1), (0.0, 0)],
        "nothing": [],
        "note": [("a", 1), ("b", 2)],
        "counts": [1, 2],
        "some": [(1.0, 1), None],
        "triples": [(1.0, 1, 1)],
        "lists": [[1.0, 1]],
    }
    ((name, shaped),) = read_sums(metadata).items()
    assert (name, shaped.total, shaped.size) == ("shaped_reward", 1.0, 3)
    assert math.isnan(shaped.standard_error)  # the spread of the sequences is not known
    assert read_counts(metadata, MINE).keys() == {"counts"}
    assert math.isnan(read_sums({"nobody": [(0.0, 0)]})["nobody"].mean)


def with_reasons(reasons):
    scored = output(rewards=torch.ones(3))
    scored.metadata = {"reward_reasons": reasons, "errors": [0, 1]}
    return scored


def test_reasons_of_rewards_are_read_for_each_sample():
    reasons = [["no answer found", None], [None]]
    assert read_reasons(with_reasons(reasons), MINE) == {"a": reasons[0], "b": reasons[1]}
    assert read_reasons(output(rewards=torch.ones(3)), MINE) == {}


@pytest.mark.parametrize("reasons", [[["a"], [None]], ["a", "b"], [[1, None], [None]]], ids=str)
def test_reasons_that_are_not_a_text_or_none_for_each_response_are_refused(reasons):
    with pytest.raises(ProjectError, match="reward_reasons that are not one list per sample"):
        read_reasons(with_reasons(reasons), MINE)


def test_sums_of_ranks_add_up_to_the_mean_over_all():
    first, second = (
        read_sums({"reward": pairs})["reward"] for pairs in ([(3.0, 1)], [(1.0, 2), (0.0, 1)])
    )
    assert (first + second).mean == 1.0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"packed_input_ids": torch.arange(3), "prompt_mask": torch.ones(3)},
            "prompt_mask as float32; it must be bool",
        ),
        ({"packed_prompts": torch.rand(3)}, "packed_prompts as float32; it must be whole numbers"),
        (
            {"packed_prompts": torch.arange(3), "weights": torch.full((3,), math.nan)},
            "weights nan for sample r",
        ),
    ],
)
def test_a_row_of_a_dataset_is_checked_like_an_output(data, words):
    row = SequenceSample(ids=["r"], seqlens={key: [[3]] for key in data}, data=data)
    with pytest.raises(DataError, match=f"row 5 of dataset mine gave {words}") as raised:
        checked_row(row, RowOrigin("mine", 4))
    assert raised.value.exit_code == 4


def test_a_row_shares_no_list_with_its_dataset():
    row = SequenceSample(
        ids=["r"], seqlens={"packed_prompts": [[3]]}, data={"packed_prompts": torch.arange(3)}
    )
    read = checked_row(row, RowOrigin("mine", 4))
    read.ids[0], read.seqlens["packed_prompts"] = "e0r4", []
    assert (row.ids, row.seqlens) == (["r"], {"packed_prompts": [[3]]})
    for unusable, words in (
        (None, "returned None"),
        (SequenceSample(ids=["a", "b"], seqlens={}, data={}), "batch of 2"),
    ):
        with pytest.raises(DataError, match=f"row 5 of dataset mine .*{words}"):
            checked_row(unusable, RowOrigin("mine", 4))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [({1, 2}, "Object of type set"), ([{"rows": {1: "a"}}], "the key 1 is not a text")],
)
def test_a_row_whose_metadata_is_not_json_is_refused(answer, problem):
    row = SequenceSample(ids=["r"], seqlens={}, data={}, metadata={"answer": [answer]})
    finding = "row 5 of dataset mine has metadata that cannot be written as JSON"
    with pytest.raises(DataError, match=f"{finding}: {problem}"):
        checked_row(row, RowOrigin("mine", 4))


def test_rows_are_checked_when_their_dataset_is_digested():
    with pytest.raises(DataError, match="row 2 of dataset held_out returned a value of type dict"):
        digest_rows(
            [checked_row(ASKED.select_indices([0]), RowOrigin("held_out", 0)), {}], "held_out"
        )
