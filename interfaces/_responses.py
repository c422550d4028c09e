"""A role's responses to the prompts of a batch, packed together with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from rlcli.api.config import GenerationHyperparameters, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import ATTEMPT, ROUTED_EXPERTS, WEIGHT_VERSIONS
from rlcli.api.mocks import mock_responses
from rlcli.api.model import GeneratedResponses, Model
from rlcli.errors import ModelError

T = TypeVar("T")


def as_generation(
    settings: GenerationHyperparameters | Mapping[str, Any],
) -> GenerationHyperparameters:
    """Settings of sampling, which may come as a mapping."""
    return GenerationHyperparameters(**settings) if isinstance(settings, Mapping) else settings


def sample_responses(
    model: Model, data: SequenceSample, settings: GenerationHyperparameters
) -> SequenceSample:
    """`packed_prompts` → `packed_input_ids`, `prompt_mask`, `packed_logprobs`, `seq_no_eos_mask`,
    and `routed_experts` with `settings.routing_replay`; `settings.responses_per_prompt` sequences
    for each prompt."""
    sampled = model.module.generate(
        data, model.tokenizer, settings, seeds_of(model, data, settings)
    )
    return _packed(data, sampled, settings)


def imitate_responses(
    model: Model, data: SequenceSample, settings: GenerationHyperparameters
) -> SequenceSample:
    """The same keys, with words of the prompts as responses; does not run the model. Raises
    NotImplementedError for `routing_replay`: only a model can tell its experts."""
    if settings.routing_replay:
        raise NotImplementedError(f"no mock data is defined for {ROUTED_EXPERTS}")
    sampled = mock_responses(
        prompts_in(data), model.tokenizer, settings, seeds_of(model, data, settings)
    )
    return _packed(data, sampled, settings)


def sample_seeds(model: Model, data: SequenceSample) -> list[int]:
    """One seed per sample, for what its responses share."""
    attempts = data.metadata.get(ATTEMPT) or [0] * data.bs
    return [
        stable_seed(model.seed, str(id_), attempt)
        for id_, attempt in zip(data.ids, attempts, strict=True)
    ]


def seeds_of(model: Model, data: SequenceSample, settings: GenerationHyperparameters) -> list[int]:
    """One seed per response, from its sample (whose id includes the epoch), the attempt and its
    number in the group. Neither step nor weight version enters, so a response does not depend on
    when it is sampled."""
    attempts, numbers = (
        data.metadata.get(ATTEMPT) or [0] * data.bs,
        range(settings.responses_per_prompt),
    )
    begun = zip(data.ids, attempts, strict=True)
    return [
        stable_seed(model.seed, str(id_), attempt, number)
        for id_, attempt in begun
        for number in numbers
    ]


def prompts_in(data: SequenceSample) -> Sequence[torch.Tensor]:
    return data.data["packed_prompts"].split(data.flat_seqlens("packed_prompts"))


@dataclass(frozen=True)
class Written:
    """A finished sequence of L tokens: a prompt, and what was sampled after it."""

    tokens: torch.Tensor
    """[L] int64."""
    sampled: torch.Tensor
    """[L] bool: the tokens that the policy sampled; the others are the prompt's, or were observed
    between turns."""
    logprobs: torch.Tensor
    """[L - 1] float32: those of all tokens but the first; 0 where they were not sampled."""

    @classmethod
    def response(cls, prompt: torch.Tensor, response: torch.Tensor, scores: torch.Tensor) -> Self:
        """A prompt with one response, whose tokens have these log-probs."""
        tokens = torch.cat([prompt, response])
        sampled = torch.arange(len(tokens), device=tokens.device) >= len(prompt)
        return cls(tokens, sampled, torch.cat([scores.new_zeros(len(prompt) - 1), scores]))


def packed_sequences(
    data: SequenceSample,
    sequences: Sequence[Written],
    group: int,
    metadata: Mapping[str, list[Any]],
    further: Mapping[str, torch.Tensor],
) -> SequenceSample:
    """`packed_input_ids`, `prompt_mask`, `packed_logprobs` of `group` sequences for each sample,
    and `further` keys."""
    return SequenceSample.from_default(
        ids=data.ids,
        seqlens=in_groups([len(sequence.tokens) for sequence in sequences], group),
        metadata=metadata,
        data={
            "packed_input_ids": _cat([each.tokens for each in sequences], torch.int64),
            "prompt_mask": _cat([~each.sampled for each in sequences], torch.bool),
            "packed_logprobs": _cat([each.logprobs for each in sequences], torch.float32),
            **further,
        },
    )


def _packed(
    data: SequenceSample, sampled: GeneratedResponses, settings: GenerationHyperparameters
) -> SequenceSample:
    """Prompts and responses concatenated, in groups; the log-probs of prompts are 0."""
    prompts, group = prompts_in(data), settings.responses_per_prompt
    sequences = [
        Written.response(prompts[i // group].to(response.device), response, scores)
        for i, (response, scores) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True))
    ]
    further = {"seq_no_eos_mask": ~sampled.ended.to(torch.bool)}
    if settings.routing_replay:
        further[ROUTED_EXPERTS] = _joined(sampled.routed_experts)
    metadata = {}
    if sampled.versions is not None:
        metadata[WEIGHT_VERSIONS] = in_groups(sampled.versions, group)
    return packed_sequences(data, sequences, group, metadata, further)


def in_groups(items: Sequence[T], size: int) -> list[list[T]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _joined(experts: list[torch.Tensor] | None) -> torch.Tensor:
    if experts is None:
        raise ModelError(
            "the engine that samples does not report the experts of tokens",
            hint="set generation.routing_replay=false, or use another backend",
        )
    return _cat(experts, experts[0].dtype if experts else torch.uint8)


def _cat(pieces: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(pieces).to(dtype) if pieces else torch.zeros(0, dtype=dtype)
