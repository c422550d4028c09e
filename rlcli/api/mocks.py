"""Plausible outputs of a call, made without running a model.

Numbers depend only on a sample's id and the role's seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rlcli.api.config import GenerationHyperparameters, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.generation import GeneratedResponses
from rlcli.api.key_meaning import (
    FLAGS,
    LOGPROBS,
    MEANINGS,
    NUMBERED,
    PROMPT_MASK,
    REALS,
    SCORES,
    SEQUENCES,
    SOLVED,
)
from rlcli.api.model import Model

ENDED = 0.75
"""Share of mock responses that end by themselves."""


def uniform(
    model: Model, data: SequenceSample, lengths: Sequence[Sequence[int]], purpose: str
) -> torch.Tensor:
    """[sum of `lengths`] float32 in [0, 1); a sample's numbers are the same in any batch."""
    pieces = [
        torch.rand(sum(inner), generator=_stream(model.role_seed, str(id_), purpose))
        for id_, inner in zip(data.ids, lengths, strict=True)
    ]
    return torch.cat(pieces) if pieces else torch.zeros(0)


def mock_keys(model: Model, data: SequenceSample, keys: Iterable[str]) -> SequenceSample:
    """A sample with `keys`, each drawn as `rlcli.api.key_meaning` describes it.

    Log-probs are between -2 and 0 (0 on prompts), other reals between -1 and 1, scores are 0 or 1
    (whether a response is right: bool), and numbers of classes are 0 or, for none, -1.

    Raises NotImplementedError for a key that holds something else, or that is not in the table.
    """
    tokens = data.seqlens[SEQUENCES]
    seqlens, tensors = {}, {}
    for key in keys:
        meaning = MEANINGS.get(key)
        if meaning is None or meaning.numbers not in (LOGPROBS, REALS, SCORES, FLAGS, NUMBERED):
            raise NotImplementedError(f"no mock data is defined for {key}")
        seqlens[key] = [[meaning.rows(length) for length in lengths] for lengths in tokens]
        drawn = uniform(model, data, seqlens[key], key)
        if meaning.numbers is LOGPROBS:
            tensors[key] = -2 * drawn * _on_responses(data, drawn)
        elif meaning.numbers is REALS:
            tensors[key] = 2 * drawn - 1
        elif meaning.numbers is NUMBERED:
            tensors[key] = -(drawn < 0.5).to(torch.int64)
        else:
            is_flag = meaning.numbers is FLAGS or key == SOLVED
            tensors[key] = (drawn < 0.5).to(torch.bool if is_flag else torch.float32)
    return SequenceSample.from_default(ids=data.ids, seqlens=seqlens, data=tensors)


def _on_responses(data: SequenceSample, like: torch.Tensor) -> torch.Tensor:
    """[T - N] 1 where an action chose a token of a response,
    0 on prompts if the data marks them."""
    mask = (data.data or {}).get(PROMPT_MASK)
    if mask is None:
        return torch.ones_like(like)
    pieces = mask.to(like.device).split(data.flat_seqlens(SEQUENCES))
    return torch.cat([~piece[1:] for piece in pieces]).to(like) if pieces else like


def mock_responses(
    prompts: Sequence[torch.Tensor],
    tokenizer: Any,
    settings: GenerationHyperparameters,
    seeds: Sequence[int],
) -> GeneratedResponses:
    """A response for each seed: words of its prompt in some order; most end by themselves, the
    others are cut off."""
    stops = {tokenizer.eos_token_id, *settings.stop_token_ids}
    tokens, logprobs, ended = [], [], []
    for number, seed in enumerate(seeds):
        stream = _stream(seed)
        words = [
            word
            for word in prompts[number // settings.responses_per_prompt].tolist()
            if word not in stops
        ]
        ends = not words or float(torch.rand((), generator=stream)) < ENDED
        shortest, longest = max(settings.min_new_tokens, 1), settings.max_new_tokens
        length = (
            int(torch.randint(shortest, longest + 1, (), generator=stream)) if ends else longest
        )
        chosen = (
            torch.randint(len(words), (length - ends,), generator=stream).tolist() if words else []
        )
        response = [words[index] for index in chosen] + [tokenizer.eos_token_id] * ends
        tokens.append(torch.tensor(response, dtype=torch.int64))
        logprobs.append(-0.1 - 2 * torch.rand(len(response), generator=stream))
        ended.append(ends)
    return GeneratedResponses(tokens, logprobs, torch.tensor(ended, dtype=torch.bool))


def _stream(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(stable_seed("mock", *parts))
