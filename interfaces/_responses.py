"""A role's responses to the prompts of a batch, packed together with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

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
    sampled = model.module.generate(data, model.tokenizer, settings, _seeds(model, data, settings))
    return _packed(data, sampled, settings)


def imitate_responses(
    model: Model, data: SequenceSample, settings: GenerationHyperparameters
) -> SequenceSample:
    """The same keys, with words of the prompts as responses; does not run the model. Raises
    NotImplementedError for `routing_replay`: only a model can tell its experts."""
    if settings.routing_replay:
        raise NotImplementedError(f"no mock data is defined for {ROUTED_EXPERTS}")
    sampled = mock_responses(
        _prompts(data), model.tokenizer, settings, _seeds(model, data, settings)
    )
    return _packed(data, sampled, settings)


def _seeds(model: Model, data: SequenceSample, settings: GenerationHyperparameters) -> list[int]:
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


def _prompts(data: SequenceSample) -> Sequence[torch.Tensor]:
    return data.data["packed_prompts"].split(data.flat_seqlens("packed_prompts"))


def _packed(
    data: SequenceSample, sampled: GeneratedResponses, settings: GenerationHyperparameters
) -> SequenceSample:
    """Prompts and responses concatenated, in groups; the log-probs of prompts are 0."""
    prompts, group = _prompts(data), settings.responses_per_prompt
    tokens, masks, logprobs = [], [], []
    for i, (response, scores) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
        prompt = prompts[i // group].to(response.device)
        tokens.append(torch.cat([prompt, response]))
        masks.append(torch.arange(len(tokens[-1]), device=response.device) < len(prompt))
        logprobs.append(torch.cat([scores.new_zeros(len(prompt) - 1), scores]))
    lengths = [len(sequence) for sequence in tokens]
    routes = {}
    if settings.routing_replay:
        routes[ROUTED_EXPERTS] = _joined(sampled.routed_experts)
    metadata = {}
    if sampled.versions is not None:
        metadata[WEIGHT_VERSIONS] = _in_groups(sampled.versions, group)
    return SequenceSample.from_default(
        ids=data.ids,
        seqlens=_in_groups(lengths, group),
        metadata=metadata,
        data={
            "packed_input_ids": _cat(tokens, torch.int64),
            "prompt_mask": _cat(masks, torch.bool),
            "packed_logprobs": _cat(logprobs, torch.float32),
            "seq_no_eos_mask": ~sampled.ended.to(torch.bool),
            **routes,
        },
    )


def _in_groups(items: Sequence[T], size: int) -> list[list[T]]:
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
