"""The reference policy; `InterfaceContract` compares its log-probs with the model's."""

import pytest
import torch

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.model import MicroBatchSpec
from rlcli.errors import DataError, UsageError
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.registry import make_interface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyRanks, tiny_model


class TestContract(InterfaceContract):
    name = "reference"
    args = {"temperature": 0.7}


def make(**args):
    return make_interface(ModelInterfaceAbstraction("reference", args))


def test_actor_and_reference_log_probs_are_bit_equal():
    """actor and reference agree to the last bit"""
    actor = PPOActorInterface(generation={"temperature": 0.8})
    for keys in (["packed_input_ids"], ["packed_input_ids", "prompt_mask"]):
        batch = make_batch(keys)
        mine = actor.inference(tiny_model(), batch, MicroBatchSpec(n_mbs=3)).data["packed_logprobs"]
        its = (
            make(temperature=0.8)
            .inference(tiny_model(), batch, MicroBatchSpec())
            .data["packed_ref_logprobs"]
        )
        assert torch.equal(mine, its)


@pytest.fixture
def batch():
    return make_batch(["packed_input_ids", "prompt_mask"])


def stored(folder, model, batch):
    """(log-probs, forward passes) of a new interface with that store."""
    logprobs = (
        make(store=str(folder))
        .inference(model, batch, MicroBatchSpec(n_mbs=2))
        .data["packed_ref_logprobs"]
    )
    return logprobs, model.module.micro_batches if model.module else 0


def test_stored_log_probs_are_reused_and_bit_equal(batch, tmp_path):
    """what is stored is not computed again, and the same to the bit"""
    expected = make().inference(tiny_model(), batch, MicroBatchSpec()).data["packed_ref_logprobs"]
    first, passes = stored(tmp_path / "store", tiny_model(), batch)
    assert torch.equal(first, expected)
    assert passes == 2
    others = batch.reorder([3, 1, 0, 2, 7, 6, 5, 4])
    again, passes = stored(tmp_path / "store", tiny_model(seed=5), others)
    assert torch.equal(
        again, make().inference(tiny_model(), others, MicroBatchSpec()).data["packed_ref_logprobs"]
    )
    assert passes == 0
    weightless = tiny_model()
    weightless.module = None
    assert torch.equal(stored(tmp_path / "store", weightless, batch)[0], expected)
    assert stored(tmp_path / "store", weightless, batch.select_indices([]))[0].shape == (0,)


def test_missing_log_probs_are_computed_and_stored(batch, tmp_path):
    """sequences that are not stored are computed, and stored"""
    stored(tmp_path, tiny_model(), batch.select_indices([0, 5]))
    logprobs, passes = stored(tmp_path, tiny_model(), batch)
    assert torch.equal(
        logprobs,
        make().inference(tiny_model(), batch, MicroBatchSpec()).data["packed_ref_logprobs"],
    )
    assert passes == 2
    assert stored(tmp_path, tiny_model(), batch)[1] == 0


def test_what_another_rank_has_stored_is_not_computed_again(batch, tmp_path):
    """else a run that is resumed, which finds all of it, would differ from one that is not"""
    ranks, halves = TinyRanks(2), [[0, 1, 2, 3], [4, 5, 6, 7]]

    def passes_of_two_epochs(rank):
        model, reference = tiny_model(ranks=ranks, rank=rank), make(store=str(tmp_path))
        passes = []
        for half in (halves[rank], halves[1 - rank]):
            reference.inference(model, batch.select_indices(half), MicroBatchSpec())
            passes.append(model.module.micro_batches)
        return passes

    assert ranks.run(passes_of_two_epochs) == [[1, 1], [1, 1]]
    assert stored(tmp_path, tiny_model(), batch)[1] == 0


def test_the_prompt_mask_is_that_of_the_batch(batch, tmp_path):
    """the store holds whole sequences; the mask is that of the batch"""
    stored(tmp_path, tiny_model(), batch)
    without_mask = batch.select(["packed_input_ids"])
    expected = (
        make().inference(tiny_model(), without_mask, MicroBatchSpec()).data["packed_ref_logprobs"]
    )
    assert torch.equal(stored(tmp_path, tiny_model(), without_mask)[0], expected)


def test_a_role_without_weights_reports_missing_log_probs(batch, tmp_path):
    """without weights every sequence must be stored"""
    model = tiny_model()
    stored(tmp_path, model, batch.select_indices([0, 5]))
    model.module = None
    with pytest.raises(
        DataError,
        match=r"has no log-probs of 12 of 16 sequences.*give the reference weights again",
    ):
        stored(tmp_path, model, batch)


def test_a_damaged_file_of_the_store_is_reported(batch, tmp_path):
    """a damaged part of the store is named"""
    stored(tmp_path, tiny_model(), batch)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match=f"{file} holds no log-probs.*it is computed again"):
        stored(tmp_path, tiny_model(), batch)


def test_a_temperature_of_0_is_refused():
    """a temperature of 0 is refused"""
    with pytest.raises(UsageError, match=r"temperature is 0\.0; it must be above 0"):
        make(temperature=0.0)
