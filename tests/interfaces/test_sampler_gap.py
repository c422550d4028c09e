"""How far the trainer's log-probs are from the sampler's: by hand,
and only where both are known."""

import math

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.interfaces._policy_distances import distances_before
from rlcli.ops.reduce import identity


def batch(**metadata):
    """Two responses: of two tokens behind a prompt of two,
    and of one token behind a prompt of one."""
    mask = torch.tensor([True, True, False, False, True, False])
    behaviour = torch.tensor([-9.0, -1.0, -2.0, -3.0])
    return SequenceSample.from_default(
        ids=["a", "b"],
        seqlens=[[4], [2]],
        data={
            "packed_input_ids": torch.arange(6),
            "prompt_mask": mask,
            "packed_logprobs": behaviour,
            "proximal_logprobs": behaviour + torch.tensor([100.0, 0.5, -0.25, 0.0]),
        },
        metadata=metadata,
    )


def distances(data):
    return distances_before(data, identity)


def test_gap_is_the_mean_over_the_actions_of_responses():
    assert distances(batch()) == {"sampler_gap": 0.25}


def test_samples_of_older_weights_count_as_drift():
    """Only those of the same weights show how the engines differ."""
    assert distances(batch(age=[1, 3])) == {"policy_drift": 0.25}
    assert distances(batch(age=[1, 0])) == {"policy_drift": 0.375, "sampler_gap": 0.0}


def test_no_gap_is_computed_without_log_probs_of_the_trainer():
    data = batch()
    assert distances(data.select(data.keys - {"proximal_logprobs"})) == {}


def test_kl_is_that_of_the_trainers_log_probs():
    """By hand, with a reference that equals the sampler: exp(d) · (exp(-d) - 1 + d) for distances d
    of 1/2, -1/4, 0."""
    data = batch()
    data.update_(reference_like_sampler(data))
    expected = (
        1 - math.exp(0.5) + 0.5 * math.exp(0.5) + 1 - math.exp(-0.25) - 0.25 * math.exp(-0.25)
    ) / 3
    for metadata in ({}, {"age": [2, 0]}):
        data.metadata = metadata
        assert distances(data)["kl"] == pytest.approx(expected, rel=1e-6)


def test_kl_is_known_before_the_step_unless_samples_are_older():
    """On any rank: the others must not report a mean without it."""
    data = batch()
    data.update_(reference_like_sampler(data))
    data = data.select(data.keys - {"proximal_logprobs"})
    assert distances(data) == {"kl": 0.0}
    data.metadata = {"age": [0, 1]}
    assert distances(data) == {}
    data.metadata = {"age": [0, 0]}
    assert distances_before(data, lambda sums: sums + 1) == {}, "another rank has an older sample"


def reference_like_sampler(data):
    copy = data.select(["packed_logprobs"])
    copy.remap_keys_({"packed_logprobs": "packed_ref_logprobs"})
    return copy
