"""The texts of a packed batch."""

from __future__ import annotations

from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.errors import UsageError


def response_texts(tokenizer: Any, data: SequenceSample) -> list[str]:
    """The response of each sequence (the tokens that `prompt_mask` leaves), without special tokens."""
    lengths = data.flat_seqlens("packed_input_ids")
    tokens = data.data["packed_input_ids"].cpu().split(lengths)
    masks = data.data["prompt_mask"].cpu().split(lengths)
    return _decode(tokenizer, [ids[~mask].tolist() for ids, mask in zip(tokens, masks, strict=True)])


def full_texts(tokenizer: Any, data: SequenceSample) -> list[str]:
    """Each sequence, prompt and response, without special tokens."""
    tokens = data.data["packed_input_ids"].cpu().split(data.flat_seqlens("packed_input_ids"))
    return _decode(tokenizer, [ids.tolist() for ids in tokens])


def _decode(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    if tokenizer is None:
        hint = "give the reward's role a tokenizer: the actor's"
        raise UsageError("a reward that reads text needs a tokenizer", hint=hint, code="F32")
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in sequences]
