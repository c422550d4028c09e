"""Who holds what, and what must move."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.recipe.graph import train_graph
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.buffer import Buffer, Transfer


def described(ids, key="x", rows=2, dtype=torch.int64, metadata=None):
    data = {key: torch.zeros(rows * len(ids), dtype=dtype)}
    return SequenceSample(
        ids=list(ids), seqlens={key: [rows] * len(ids)}, data=data, metadata=metadata or {}
    ).meta()


@pytest.fixture
def buffer():
    """Samples a, b on rank 0 and c, d on rank 1, each with key x."""
    buffer = Buffer()
    buffer.expect(list("abcd"))
    buffer.add(0, described("ab", metadata={"answer": ["1", "2"]}))
    buffer.add(1, described("cd", metadata={"answer": ["3", "4"]}))
    return buffer


def test_no_transfer_is_planned_for_ranks_that_hold_the_key(buffer):
    assert buffer.transfers({0: ["a", "b"], 1: ["c", "d"]}, ["x"]) == []


def test_a_missing_key_is_one_transfer_from_each_rank_that_holds_it(buffer):
    plan = buffer.transfers({1: ["a", "b", "c", "d"]}, ["x"])
    assert [(t.source, t.target, t.key, t.ids) for t in plan] == [(0, 1, "x", ["a", "b"])]
    assert plan[0].description.metadata == {"answer": ["1", "2"]}
    assert plan[0].description.dtypes == {"x": torch.int64}


def test_keys_that_a_call_does_not_read_are_not_transferred(buffer):
    """Advantages without a KL penalty do not bring the reference's log-probs."""
    for key in ("packed_input_ids", "packed_ref_logprobs"):
        buffer.add(0, described("a", key=key))
    moved = {}
    for weight in ("0.0", "0.1"):
        graph = train_graph(load_recipe("ppo_math", [f"ppo.kl_ctl={weight}"]).recipe)
        (trained,) = (mfc for mfc in graph if mfc.name == "advantages")
        held = [key for key in trained.input_keys if buffer.holders("a", [key])]
        moved[weight] = [transfer.key for transfer in buffer.transfers({1: ["a"]}, held)]
    assert moved == {
        "0.0": ["packed_input_ids"],
        "0.1": ["packed_input_ids", "packed_ref_logprobs"],
    }


def test_a_key_that_was_transferred_is_not_transferred_again(buffer):
    plan = buffer.transfers({1: ["a"]}, ["x"])
    buffer.count_transfers(plan)
    assert buffer.holders("a", ["x"]) == {0, 1}
    assert buffer.transfers({1: ["a"]}, ["x"]) == []


def test_the_least_busy_holder_sends(buffer):
    """Ranks 0 and 1 hold what ranks 2 and 3 lack: each sends once."""
    buffer.count_transfers(buffer.transfers({0: list("abcd"), 1: list("abcd")}, ["x"]))
    plan = buffer.transfers({2: ["a", "b"], 3: ["c", "d"]}, ["x"])
    assert [(t.source, t.target) for t in plan] == [(0, 2), (1, 3)]
    later = [buffer.transfers({rank: ["a"]}, ["x"])[0].source for rank in (4, 5, 6, 7)]
    assert later == [0, 1, 0, 1]  # what was sent before counts


def test_metadata_are_sent_to_a_rank_once(buffer):
    buffer.add(0, described("ab", key="y", rows=1, dtype=torch.bool))
    first, second = buffer.transfers({1: ["a", "b"]}, ["x", "y"])
    assert first.description.metadata == {"answer": ["1", "2"]}
    assert second.description.metadata == {}


def test_outputs_of_a_call_without_metadata_still_carry_those_of_the_samples(buffer):
    """A reward on a rank of its own gets what was generated elsewhere,
    and the answers to compare with."""
    buffer.add(0, described("ab", key="y"))
    (transfer,) = buffer.transfers({1: ["a"]}, ["y"])
    assert transfer.description.metadata == {"answer": ["1"]}


def test_transfers_are_equal_after_a_round_trip_through_json(buffer):
    (transfer,) = buffer.transfers({1: ["a"]}, ["x"])
    again = Transfer.from_json(transfer.as_json())
    assert (again.source, again.target, again.key, again.ids) == (0, 1, "x", ["a"])
    assert again.description.seqlens == {"x": [[2]]}


def test_a_forgotten_sample_may_be_added_again(buffer):
    buffer.forget(list("abc"))
    assert len(buffer) == 1
    buffer.expect(["a"])
    assert buffer.holders("a", ["x"]) == set()
    assert buffer.metadata(["a"], "answer") == []


def test_a_sample_that_is_in_use_cannot_be_expected_again(buffer):
    with pytest.raises(ValueError, match="already in use"):
        buffer.expect(["d"])
    with pytest.raises(ValueError, match="already in use"):
        buffer.expect(["e", "e"])


def test_holders_of_several_keys_are_the_ranks_that_hold_all_of_them(buffer):
    buffer.add(1, described("a", key="y"))
    assert buffer.holders("a", ["x"]) == {0}
    assert buffer.holders("a", ["x", "y"]) == set()


def test_sequence_lengths_list_all_sequences_of_all_samples(buffer):
    assert buffer.sequence_lengths(list("abc"), "x") == [2, 2, 2]
    assert buffer.sequence_lengths(list("abc"), "z") == []


def test_only_ranks_that_hold_keys_of_a_sample_are_asked_to_clear_it(buffer):
    buffer.count_transfers(buffer.transfers({2: ["a"]}, ["x"]))
    assert buffer.forget(["a", "c"]) == {0: ["a"], 2: ["a"], 1: ["c"]}
    assert len(buffer) == 2


def test_samples_with_different_dtypes_or_shapes_of_a_key_are_refused():
    buffer = Buffer()
    buffer.expect(list("ab"))
    buffer.add(0, described("a"))
    buffer.add(1, described("b", dtype=torch.float32))
    with pytest.raises(ValueError, match=r"different settings: x: .*float32.*int64"):
        buffer.description(["a", "b"], ["x"])


def test_the_cache_of_shared_values_is_bounded(monkeypatch):
    monkeypatch.setattr("rlcli.runtime.buffer.MOST_SHARED", 8)
    buffer = Buffer()
    for rank in range(50):
        buffer.expect([f"a{rank}"])
        buffer.add(rank, described([f"a{rank}"]))
        (plan,) = buffer.transfers({rank + 50: [f"a{rank}"]}, ["x"])
        buffer.count_transfers([plan])
        assert buffer.holders(f"a{rank}", ["x"]) == {rank, rank + 50}
        assert len(buffer._shared) <= 8
