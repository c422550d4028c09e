"""What people see of responses: their texts, lengths and advantages."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.observe.responses import describe_samples


class Digits:
    """Decodes each token as its number."""

    def decode(self, ids, skip_special_tokens):
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
    assert described.keys() == {"text", "length", "advantage", "turns"}, "it has these keys"
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
