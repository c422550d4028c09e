"""The tokens of a response, one by one: their texts, log-probs and advantages.

They take as much room as several responses, so only those of the first response to a prompt are
recorded, and none of a long one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcli.api.key_meaning import PROMPT_MASK, SEQUENCES, WEIGHT_VERSIONS
from rlcli.api.token_texts import token_texts

if TYPE_CHECKING:
    import torch

    from rlcli.api.data import SequenceSample

MOST = 1024
"""Tokens after the prompt above which nothing is recorded."""
DIGITS = 4

Details = list[list[Any] | None]
"""A list for the first response, None for the others."""


def texts(sample: SequenceSample, tokenizer: Any) -> Details:
    """The texts of the tokens after the prompt, those that were observed included."""
    ids = _after_prompt(sample, SEQUENCES, begins_at=0)
    return _of_first(sample, None if ids is None else token_texts(ids.tolist(), tokenizer))


def numbers(sample: SequenceSample, key: str) -> Details:
    """What a key with a number for each token but the first has for these tokens; None for those
    that were observed, and where it is not finite."""
    values, masks = _after_prompt(sample, key, 1), _after_prompt(sample, PROMPT_MASK, 0)
    if values is None or masks is None:
        return _of_first(sample, None)
    is_shown = ~masks & values.isfinite()
    pairs = zip(values.double().tolist(), is_shown.tolist(), strict=True)
    return _of_first(sample, [round(value, DIGITS) if shown else None for value, shown in pairs])


def versions(sample: SequenceSample) -> Details:
    """[version of the weights, tokens] of each segment, where weights change meanwhile."""
    spans = sample.metadata.get(WEIGHT_VERSIONS, [None])[0]
    return _of_first(sample, None if spans is None else [list(span) for span in spans[0]])


def _of_first(sample: SequenceSample, details: list[Any] | None) -> Details:
    count = len(sample.flat_seqlens(PROMPT_MASK))
    return [details, *[None] * (count - 1)] if count else []


def _after_prompt(sample: SequenceSample, key: str, begins_at: int) -> torch.Tensor | None:
    """The values of a key for the tokens after the prompt of the first sequence; None if there are
    none, or too many. `begins_at`: the token that the key's first value belongs to."""
    lengths = sample.flat_seqlens(PROMPT_MASK)
    if not lengths:
        return None
    mask = sample.data[PROMPT_MASK][: lengths[0]].cpu()
    sampled = (~mask).nonzero()[:, 0]
    if not len(sampled) or lengths[0] - int(sampled[0]) > MOST or int(sampled[0]) < begins_at:
        return None
    values = sample.data[key][: sample.flat_seqlens(key)[0]].cpu()
    return values[int(sampled[0]) - begins_at :]
