"""What people see of responses: their texts, lengths and advantages."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.observe import token_details
from rlcli.observe.responses import describe_samples
from rlcli.observe.samples import SampleRecord


class Digits:
    """Decodes each token as its number."""

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(str(int(id_)) for id_ in ids)


@pytest.fixture
def sample():
    """Two responses to one prompt: of three tokens, and of none."""
    ids = torch.tensor([7, 8, 1, 2, 3, 7, 8])
    mask = torch.tensor([True, True, False, False, False, True, True])
    advantages = torch.tensor([9.0, 1.0, 2.0, 6.0, 9.0])  # the first of each is the prompt's
    tensors = {"packed_input_ids": ids, "prompt_mask": mask, "advantages": advantages}
    lengths = {
        "packed_input_ids": [[5, 2]],
        "prompt_mask": [[5, 2]],
        "advantages": [[4, 1]],
    }
    return SequenceSample(ids=["a"], seqlens=lengths, data=tensors)


def test_lengths_and_advantages_are_those_of_the_response_alone(sample):
    described = describe_samples([sample], Digits())["a"]
    of_tokens = {"tokens", "token_advantages", "versions"}
    assert described.keys() == {"text", "length", "advantage", "turns"} | of_tokens
    assert described["turns"] == [None, None], "there are no several turns"
    assert [text["response"] for text in described["text"]] == ["1 2 3", ""]
    assert described["length"] == [3, 0]
    assert described["advantage"] == [pytest.approx(3.0), None]


def test_an_episode_is_described_turn_by_turn():
    mask = torch.tensor([True, False, False, True, True, False])
    rewards = torch.tensor([9.0, 9.0, 0.5, 9.0, 9.0, float("nan")])
    tensors = {
        "packed_input_ids": torch.tensor([7, 1, 2, 3, 4, 5]),
        "prompt_mask": mask,
        "dense_rewards": rewards,
    }
    lengths = {key: [[6]] for key in tensors}
    episode = SequenceSample(ids=["a"], seqlens=lengths, data=tensors)
    described = describe_samples([episode], Digits())["a"]
    assert described["text"][0]["prompt"] == "7"
    assert described["text"][0]["response"] == "1 2⟨3 4⟩5"
    assert described["turns"] == [
        [
            {"sampled": True, "text": "1 2", "tokens": 2},
            {"sampled": False, "text": "3 4", "tokens": 2},
            {"sampled": True, "text": "5", "tokens": 1},
        ]
    ]
    assert described["turn_rewards"] == [[0.5, None]], "those of its turns' last tokens"


def test_what_a_template_rewrote_is_described_from_where_it_differs():
    ids = torch.tensor([7, 8, 1, 2, 7, 8, 3, 4, 5])
    tensors = {
        "packed_input_ids": ids,
        "prompt_mask": torch.tensor([True, True, False, False, True, True, True, True, False]),
        "forks": torch.arange(9) == 4,
    }
    episode = SequenceSample(ids=["a"], seqlens={key: [[9]] for key in tensors}, data=tensors)
    described = describe_samples([episode], Digits())["a"]
    assert described["text"][0]["response"] == "1 2⟨3 4⟩5"
    (turns,) = described["turns"]
    assert turns[1] == {"sampled": False, "text": "3 4", "tokens": 4, "repeated": 2}
    record = SampleRecord(step=1, id="a", **described["text"][0], turns=turns)
    assert record.parts() == [("turn 1", "1 2"), ("rewritten", "3 4"), ("turn 2", "5")]


def test_tokens_of_the_first_response_are_described_one_by_one(sample):
    described = describe_samples([sample], Digits())["a"]
    assert described["tokens"] == [["1", " 2", " 3"], None]
    assert described["token_advantages"] == [[1.0, 2.0, 6.0], None]
    assert described["versions"] == [None, None]


def test_observed_tokens_and_numbers_that_are_not_finite_have_none():
    mask = torch.tensor([True, False, True, False])
    tensors = {
        "packed_input_ids": torch.tensor([7, 1, 3, 4]),
        "prompt_mask": mask,
        "packed_logprobs": torch.tensor([-0.123456, 0.0, float("nan")]),
    }
    lengths = {"packed_input_ids": [[4]], "prompt_mask": [[4]], "packed_logprobs": [[3]]}
    episode = SequenceSample(
        ids=["a"], seqlens=lengths, data=tensors, metadata={"weight_versions": [[[(2, 1), (3, 1)]]]}
    )
    described = describe_samples([episode], Digits())["a"]
    assert described["tokens"] == [["1", " 3", " 4"]]
    assert described["token_logprobs"] == [[-0.1235, None, None]]
    assert described["versions"] == [[[2, 1], [3, 1]]]


def test_tokens_of_long_responses_are_not_described(monkeypatch, sample):
    monkeypatch.setattr(token_details, "MOST", 2)
    described = describe_samples([sample], Digits())["a"]
    assert described["tokens"] == [None, None]
    assert described["token_advantages"] == [None, None]
