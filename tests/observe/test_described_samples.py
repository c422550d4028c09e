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
    assert described.keys() == {"text", "length", "advantage"}, "of these it has the keys"
    assert [text["response"] for text in described["text"]] == ["1 2 3", ""]
    assert described["length"] == [3, 0]
    assert described["advantage"] == [pytest.approx(3.0), None]
