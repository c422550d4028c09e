"""The texts of a packed batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import FORKS, MESSAGES
from rlcli.errors import DataError, UsageError

if TYPE_CHECKING:
    import torch


def response_texts(tokenizer: Any, data: SequenceSample) -> list[str]:
    """The response of each sequence (its tokens outside `prompt_mask`), without special tokens.
    Each turn of an episode begins on a line of its own, as it did when it was sampled."""
    return ["\n".join(turns) for turns in turn_texts(tokenizer, data)]


def turn_texts(tokenizer: Any, data: SequenceSample) -> list[list[str]]:
    """The turns of each response, without special tokens."""
    turns = [_turns(ids, mask) for ids, mask in _masked(data)]
    texts = iter(_decode(tokenizer, list(chain.from_iterable(turns))))
    return [[next(texts) for _ in of_response] for of_response in turns]


def _turns(ids: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The tokens between those in the mask; no turn is empty."""
    places = (~mask).nonzero()[:, 0]
    sizes = ((places.diff() > 1).nonzero()[:, 0] + 1).tolist()
    turns = ids[places].tensor_split(sizes)
    return [turn.tolist() for turn in turns if len(turn)]


def prompt_texts(tokenizer: Any, data: SequenceSample) -> list[str]:
    """The prompt of each sequence (its tokens in `prompt_mask`), without special tokens; of its
    last row, if a template has rewritten it."""
    rows = zip(_masked(data), _last_rows(data), strict=True)
    return _decode(tokenizer, [ids[begin:][mask[begin:]].tolist() for (ids, mask), begin in rows])


def conversations(tokenizer: Any, data: SequenceSample) -> list[list[dict[str, Any]]]:
    """Each sequence as messages: those that its prompt was made of, or the prompt's text if no chat
    template has written it, and the response. Raises DataError for a response of several turns."""
    sizes = [len(group) for group in data.seqlens["packed_input_ids"]]
    prompts = data.metadata.get(MESSAGES, [None] * len(sizes))
    of_samples = [
        messages for messages, size in zip(prompts, sizes, strict=True) for _ in range(size)
    ]
    rows = zip(of_samples, prompt_texts(tokenizer, data), turn_texts(tokenizer, data), strict=True)
    return [
        [*(messages or [_message("user", prompt)]), _message("assistant", _only(turns))]
        for messages, prompt, turns in rows
    ]


def _only(turns: list[str]) -> str:
    if len(turns) > 1:
        raise DataError(
            f"a response has {len(turns)} turns; only one can be written as a message of a chat",
            hint="a reward of episodes may read the text instead: text: full",
            code="F30",
        )
    return "".join(turns)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def full_texts(tokenizer: Any, data: SequenceSample) -> list[str]:
    """Each sequence, prompt and response, without special tokens; only its last row, if a template
    has rewritten it."""
    tokens = data.data["packed_input_ids"].cpu().split(data.flat_seqlens("packed_input_ids"))
    rows = zip(tokens, _last_rows(data), strict=True)
    return _decode(tokenizer, [ids[begin:].tolist() for ids, begin in rows])


def _last_rows(data: SequenceSample) -> list[int]:
    """Where the last row of each sequence begins."""
    if FORKS not in data.keys:
        return [0] * len(data.flat_seqlens("packed_input_ids"))
    flags = data.data[FORKS].cpu().split(data.flat_seqlens(FORKS))
    return [max(of_sequence.nonzero()[:, 0].tolist(), default=0) for of_sequence in flags]


def _masked(data: SequenceSample) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens of each sequence, and a mask of those in its prompt."""
    lengths = data.flat_seqlens("packed_input_ids")
    packed = (data.data[key].cpu().split(lengths) for key in ("packed_input_ids", "prompt_mask"))
    return zip(*packed, strict=True)


def _decode(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    if tokenizer is None:
        hint = "give the reward's role a tokenizer: the actor's"
        raise UsageError("a reward that reads text needs a tokenizer", hint=hint, code="F32")
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in sequences]
