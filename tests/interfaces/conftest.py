"""A rollout over the tiny engine's vocabulary, with everything that PPO needs and no model behind it."""

from __future__ import annotations

import pytest
import torch

from rlcli.api.data import SequenceSample

VOCAB = 11
EOS = 1


class TinyTokenizer:
    """Token 2 + d is the digit d; 0 pads, 1 ends."""

    eos_token_id = EOS
    pad_token_id = 0

    def decode(self, ids, skip_special_tokens=False):
        return "".join(str(i - 2) for i in ids if i >= 2 or not skip_special_tokens)


def make_rollout(groups, seed=0):
    """`groups`: for each sample, the (prompt length, response length) of its sequences."""
    generator = torch.Generator().manual_seed(seed)
    flat = [pair for group in groups for pair in group]
    lengths = [[p + r for p, r in group] for group in groups]
    actions = [[n - 1 for n in group] for group in lengths]
    ones = [[1] * len(group) for group in groups]
    n_tokens, n_actions = sum(map(sum, lengths)), sum(map(sum, actions))
    prompt = torch.cat([torch.arange(p + r) < p for p, r in flat])
    seqlens = {"packed_input_ids": lengths, "prompt_mask": lengths, "values": lengths}
    seqlens |= {"packed_logprobs": actions, "packed_ref_logprobs": actions}
    seqlens |= {"rewards": ones, "solved": ones, "seq_no_eos_mask": ones}
    rewards = torch.randint(0, 2, (len(flat),), generator=generator).float()
    data = {
        "packed_input_ids": torch.randint(2, VOCAB, (n_tokens,), generator=generator),
        "prompt_mask": prompt,
        "values": torch.randn(n_tokens, generator=generator) * 0.3,
        "packed_logprobs": -torch.rand(n_actions, generator=generator) - 1.5,
        "packed_ref_logprobs": -torch.rand(n_actions, generator=generator) - 1.5,
        "rewards": rewards,
        "solved": rewards > 0,
        "seq_no_eos_mask": torch.rand(len(flat), generator=generator) < 0.3,
    }
    ids = [f"s{i}" for i in range(len(groups))]
    metadata = {"batch_index": list(range(len(groups)))}
    return SequenceSample.from_default(ids=ids, seqlens=seqlens, data=data, metadata=metadata)


@pytest.fixture
def rollout():
    """Eight samples of two responses each, of different lengths."""
    return make_rollout([[(2 + i % 3, 3 + i % 5), (2 + i % 3, 1 + (3 * i) % 7)] for i in range(8)])


@pytest.fixture
def tokenizer():
    return TinyTokenizer()
