"""Samples for people to read: prompts and responses as text, how these ended, and how likely they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import NOT_ENDED, PROMPT_MASK, REWARDS, SAMPLED_LOGPROBS, SEQUENCES
from rlcli.runtime.sample_store import SampleStore


def describe_samples(
    store: SampleStore,
    tokenizer: Any,
    texts: Sequence[str],
    scores: Sequence[str],
    finishes: Sequence[str],
    likelihoods: Sequence[str],
) -> dict[str, Any]:
    """Prompts and responses of some samples as text, the rewards of some, how the responses of some ended and how
    likely they were: each by the sample's id."""
    return {
        "texts": {id_: _texts(store.sample(id_), tokenizer) for id_ in texts},
        "scores": {id_: _tensors(store.sample(id_))[REWARDS].double().tolist() for id_ in scores},
        "finishes": {id_: _finishes(store.sample(id_)) for id_ in finishes},
        "likelihoods": {id_: _likelihoods(store.sample(id_)) for id_ in likelihoods},
    }


def _texts(sample: SequenceSample, tokenizer: Any) -> dict[str, Any]:
    tensors, lengths = _tensors(sample), sample.flat_seqlens(SEQUENCES)
    prompts, responses = [], []
    packed = (tensors[key].cpu().split(lengths) for key in (SEQUENCES, PROMPT_MASK))
    for tokens, mask in zip(*packed, strict=True):
        prompts.append(tokenizer.decode(tokens[mask], skip_special_tokens=True))
        responses.append(tokenizer.decode(tokens[~mask], skip_special_tokens=True))
    answer = sample.metadata.get("answer", [None])[0]
    return {"prompts": prompts, "responses": responses, "answer": None if answer is None else str(answer)}


def _finishes(sample: SequenceSample) -> list[str]:
    return ["length" if cut else "stop" for cut in _tensors(sample)[NOT_ENDED].tolist()]


def _likelihoods(sample: SequenceSample) -> list[float]:
    """The log-prob of each response: the sum over its tokens."""
    tensors = _tensors(sample)
    per_action = tensors[SAMPLED_LOGPROBS].double().split(sample.flat_seqlens(SAMPLED_LOGPROBS))
    masks = tensors[PROMPT_MASK].split(sample.flat_seqlens(SEQUENCES))
    return [float(logprobs[~mask[1:]].sum()) for logprobs, mask in zip(per_action, masks, strict=True)]


def _tensors(sample: SequenceSample) -> Mapping[str, torch.Tensor]:
    return {key: tensor for key, tensor in (sample.data or {}).items() if tensor is not None}
