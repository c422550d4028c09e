"""From the outputs of an evaluation's calls to numbers with standard errors."""

import math

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.observe.responses import Moments, measures, scores_of


def scored(solved, **others):
    """`solved`: for each prompt whether each of its responses is right; others: further keys,
    one number each."""
    ones = [[1] * len(group) for group in solved]
    tensors = {
        "solved": torch.tensor([right for group in solved for right in group], dtype=torch.bool)
    }
    tensors |= {key: torch.tensor(values) for key, values in others.items()}
    return SequenceSample.from_default(
        ids=[f"q{i}" for i in range(len(solved))],
        seqlens=dict.fromkeys(tensors, ones),
        data=tensors,
    )


def test_one_response_each_gives_accuracy_alone():
    assert measures(scored([[True], [False]])) == {"accuracy": [1, 0]}


def test_several_responses_give_pass_at_k_and_majority():
    batch = scored(
        [[True, False, False, True], [False] * 4], answer_classes=[0, 1, 1, 0, 0, 0, 0, -1]
    )
    assert measures(batch) == {
        "accuracy": [0.5, 0],
        "pass@2": [pytest.approx(5 / 6), 0],
        "pass@4": [1, 0],
        "majority@4": [1, 0],  # two votes each: the answer that was given first is right
    }


def test_pass_at_all_of_an_odd_number():
    assert list(measures(scored([[True, False, True]]))) == ["accuracy", "pass@2", "pass@3"]


def test_groups_of_unlike_sizes_have_no_pass_at_k():
    assert measures(scored([[True, False], [True]])) == {"accuracy": [0.5, 1]}


def test_a_rank_without_prompts_adds_nothing():
    assert {name: values for name, values in measures(scored([])).items() if values} == {}


def test_a_score_of_one_half_does_not_count_as_solved():
    batch = SequenceSample.from_default(
        ids=["q0"], seqlens={"solved": [[1, 1]]}, data={"solved": torch.tensor([0.5, 0.5])}
    )
    assert measures(batch) == {"accuracy": [0.5], "pass@2": [0]}


def test_response_length_and_share_of_cut_off_responses_are_measured():
    batch = SequenceSample.from_default(
        ids=["a"],
        seqlens={"prompt_mask": [[3, 4]], "seq_no_eos_mask": [[1, 1]]},
        data={
            "prompt_mask": torch.tensor([True, False, False, True, True, True, False]),
            "seq_no_eos_mask": torch.tensor([True, False]),
        },
    )
    assert measures(batch) == {"response_length": [1.5], "no_eos_fraction": [0.5]}


def test_scores_of_training_are_one_number_per_response():
    output = scored([[True, False], [True]], rewards=[2.0, 0.0, 1.0])
    assert scores_of(output, {}, evaluates=False) == {"reward": [2, 0, 1], "accuracy": [1, 0, 1]}


def test_every_score_that_a_reward_call_writes_is_reported_under_its_key():
    batch = scored([[True, False]], brevity=[0.5, 0.25], votes=[1, 2])
    of_tokens = {"seqlens": {"tokens": [[2, 1]]}, "data": {"tokens": torch.zeros(3)}}
    batch.update_(SequenceSample.from_default(ids=batch.ids, **of_tokens))
    named = {"rewards": "brevity", "votes": "votes", "tokens": "tokens"}
    assert scores_of(batch, named, evaluates=False) == {
        "brevity": [0.5, 0.25],
        "votes": [1, 2],
        "accuracy": [1, 0],
    }
    assert scores_of(batch, named, evaluates=True)["brevity"] == [0.375]
    # nobody's reward
    assert "brevity" not in scores_of(batch, {"brevity": "brevity"}, evaluates=False)


def test_moments_of_ranks_add_up():
    complete = Moments.of([1.0, 2.0, 4.0, 1.0])
    assert Moments.of([1.0, 2.0]) + Moments.of([]) + Moments.of([4.0, 1.0]) == complete
    assert complete.mean == 2
    assert complete.standard_error == pytest.approx(math.sqrt(6 / 3 / 4))


def test_one_number_has_no_standard_error():
    assert math.isnan(Moments.of([3.0]).standard_error)
    assert math.isnan(Moments.of([]).mean)
    assert Moments.of([0.1] * 7).standard_error == pytest.approx(0, abs=1e-8)
