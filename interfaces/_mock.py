"""What mocks are made of: numbers that depend on a sample's id and the role's seed, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlcli.api.config import GenerationHyperparameters, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.model import GeneratedResponses, Model
from rlcli.ops.rewards import action_mask

ENDED = 0.75
"""Share of mock responses that end by themselves."""


def uniform(model: Model, data: SequenceSample, lengths: Sequence[Sequence[int]], purpose: str) -> torch.Tensor:
    """[sum of `lengths`] float32 in [0, 1); a sample's numbers are the same in any batch."""
    pieces = [
        torch.rand(sum(inner), generator=_stream(model.seed, str(id_), purpose))
        for id_, inner in zip(data.ids, lengths, strict=True)
    ]
    return torch.cat(pieces) if pieces else torch.zeros(0)


def mock_logprobs(model: Model, data: SequenceSample, key: str) -> SequenceSample:
    """A sample with `key`: [T - N] float32 log-probs between -2 and 0, 0 on prompts where `prompt_mask` tells them."""
    seqlens = [[length - 1 for length in lengths] for lengths in data.seqlens["packed_input_ids"]]
    scores = -2 * uniform(model, data, seqlens, key)
    if "prompt_mask" in data.keys:
        scores = scores * action_mask(data.data["prompt_mask"], data.flat_seqlens("packed_input_ids")).to(scores.device)
    return SequenceSample.from_default(ids=data.ids, seqlens={key: seqlens}, data={key: scores})


def mock_responses(
    prompts: Sequence[torch.Tensor], tokenizer: Any, settings: GenerationHyperparameters, seeds: Sequence[int]
) -> GeneratedResponses:
    """A response for each seed: words of its prompt in some order; most end by themselves, the others are cut off."""
    stops = {tokenizer.eos_token_id, *settings.stop_token_ids}
    tokens, logprobs, ended = [], [], []
    for number, seed in enumerate(seeds):
        stream = _stream(seed)
        words = [word for word in prompts[number // settings.responses_per_prompt].tolist() if word not in stops]
        ends = not words or float(torch.rand((), generator=stream)) < ENDED
        shortest, longest = max(settings.min_new_tokens, 1), settings.max_new_tokens
        length = int(torch.randint(shortest, longest + 1, (), generator=stream)) if ends else longest
        chosen = torch.randint(len(words), (length - ends,), generator=stream).tolist() if words else []
        response = [words[place] for place in chosen] + [tokenizer.eos_token_id] * ends
        tokens.append(torch.tensor(response, dtype=torch.int64))
        logprobs.append(-0.1 - 2 * torch.rand(len(response), generator=stream))
        ended.append(ends)
    return GeneratedResponses(tokens, logprobs, torch.tensor(ended, dtype=torch.bool))


def _stream(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(stable_seed("mock", *parts))
