"""From texts to tokens: chat templates, end-of-sequence tokens,
and how over-long texts are treated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rlcli.api.chat_template import DAY, conversation_text, name_of, opens_reasoning
from rlcli.api.special_tokens import as_content, in_parts, tokens_of, unmarked
from rlcli.errors import DataError, ModelError

from ._jsonl import Row
from ._messages import (
    OTHER_ROLES,
    Message,
    Prompt,
    left_out,
    messages_of,
    shape_of,
    trial_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("rlcli.datasets")

T = TypeVar("T")
Tokens = list[int]

OTHER_TOKENIZER = "name a chat model's tokenizer as models.<role>.tokenizer"

Overlong = Literal["error", "drop", "truncate_left", "truncate_right"]
Chat = bool | Literal["auto"]


def uses_chat(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> bool:
    """Whether prompts go through the tokenizer's chat template."""
    has_template = bool(tokenizer.chat_template)
    if chat is True and not has_template:
        hint = f"set chat: auto, or {OTHER_TOKENIZER}"
        raise ModelError(
            "chat is true, but the tokenizer has no chat template", hint=hint, code="F32"
        )
    return has_template if chat == "auto" else chat


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    chat: Chat,
    system: str | None = None,
) -> list[Tokens]:
    """Tokens of prompts, ready for a response to follow.

    With a chat template each text is the user's message and the template writes all special tokens
    itself: a text that names one names it as text. Without a template the text is taken as it is,
    so that it may have been rendered before; the system prompt precedes it, and the tokenizer adds
    its usual tokens at its start; an end-of-sequence token added at the end is removed. Raises
    ModelError for a prompt of several messages without a template.
    """
    if not prompts:
        return []
    if uses_chat(tokenizer, chat):
        conversations = [messages_of(prompt, system) for prompt in prompts]
        rendered = [_render(tokenizer, prompt, system) for prompt in prompts]
        for messages in {shape_of(each): each for each in conversations}.values():
            _try(tokenizer, messages)
        return tokens_of(tokenizer, rendered)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        message = "prompts of several messages need a chat template"
        raise ModelError(
            message, hint="use a chat model's tokenizer, and set chat: auto", code="F32"
        )
    plain = [text if system is None else f"{system}\n\n{text}" for text in texts]
    shared_ids: dict[int, int] = {}  # equal ids are one object
    return [
        _open_ended(tokenizer, list(map(shared_ids.setdefault, ids, ids)))
        for some_texts in in_parts(plain)
        for ids in tokenizer(some_texts).input_ids
    ]


def encode_answers(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """Tokens of answers as a model would have to generate them:
    no special tokens except the end of sequence."""
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token, so no answer could ever end", code="F32"
        )
    if not texts:
        return []
    contents = [as_content(tokenizer, text) for text in texts]
    return [[*ids, tokenizer.eos_token_id] for ids in tokens_of(tokenizer, contents)]


def answer_opening(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, *, chat: Chat, system: str | None
) -> Tokens:
    """What the chat template writes between a prompt and its answer, if special tokens are part of
    it, such as gpt-oss's channel: a model would have to generate that too."""
    if not uses_chat(tokenizer, chat):
        return []
    answer_message: Message = {"role": "assistant", "content": "answer"}
    trial = trial_of([*messages_of(prompt, system), answer_message])
    try:
        before = _written(tokenizer, trial[:-1])
        text = conversation_text(tokenizer, trial, day=DAY)
    except ModelError:  # it may refuse other contents
        return []
    opening, answer, _ = text.removeprefix(before).partition(trial[-1]["content"])
    if not answer or not text.startswith(before):
        return []
    (ids,) = tokens_of(tokenizer, [opening])
    is_plain = tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)
    return [] if is_plain else ids


def warn_of_open_reasoning(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    answers: Sequence[str],
    *,
    chat: Chat,
    system: str | None,
) -> None:
    """Warn of answers that do not end the reasoning which the chat template begins for them.
    `prompt`: that of one of them."""
    without_end = sum("</think>" not in answer for answer in answers)
    if not without_end or not uses_chat(tokenizer, chat):
        return
    if opens_reasoning(_render(tokenizer, prompt, system)):
        logger.warning(
            "the chat template begins each answer with <think>, and %d of %d answers have no "
            "</think>: the model learns to answer within its reasoning",
            without_end,
            len(answers),
        )


def _render(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system: str | None) -> str:
    messages = messages_of(prompt, system)
    text = _written(tokenizer, messages)
    _demand_all(tokenizer, messages, text)
    return text


def _try(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> None:
    """Raise ModelError for a template that leaves out a message of conversations of this shape."""
    trial = trial_of(messages)
    try:
        text = _written(tokenizer, trial)
    except ModelError:  # it may refuse other contents
        return
    _demand_all(tokenizer, trial, text)


def _written(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    return conversation_text(tokenizer, messages, add_generation_prompt=True, day=DAY)


def _demand_all(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> None:
    if (message := left_out(messages, unmarked(text))) is not None:
        problem = f"the chat template of {name_of(tokenizer)} leaves out {message}, of a prompt"
        raise ModelError(problem, hint=OTHER_ROLES, code="F32")


def _open_ended(tokenizer: PreTrainedTokenizerBase, ids: Tokens) -> Tokens:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    return ids[:-1] if eos is not None and ids[-1:] == [eos] else ids


class OverlongRow(ValueError):
    """A text that no allowed truncation brings below the limit."""


def fit_prompt(prompt: Tokens, limit: int, overlong: Overlong) -> Tokens:
    """The prompt cut to `limit` tokens: the last ones (truncate_left) or the first ones
    (truncate_right)."""
    return prompt[-limit:] if overlong == "truncate_left" else prompt[:limit]


def fit_answers(
    prompt: Tokens, answers: Sequence[Tokens], limit: int, overlong: Overlong
) -> tuple[Tokens, list[Tokens]]:
    """Shorten prompt and answers so that the prompt with any of the answers has at most `limit`
    tokens.

    truncate_left shortens the prompt at its start and keeps the answers whole; truncate_right
    shortens the answers at their end, so that they lack the end-of-sequence token. Raises
    OverlongRow if nothing of the prompt, or of an answer, would be left.
    """
    longest = max(len(answer) for answer in answers)
    if overlong == "truncate_left":
        if longest >= limit:
            raise OverlongRow(f"an answer of {longest} tokens leaves no room for the prompt")
        return prompt[-(limit - longest) :], list(answers)
    if len(prompt) >= limit:
        raise OverlongRow(f"a prompt of {len(prompt)} tokens leaves no room for an answer")
    return prompt, [answer[: limit - len(prompt)] for answer in answers]


def within_limit(
    rows: Sequence[Row[Any]],
    encoded: Sequence[T],
    *,
    length: Callable[[T], int],
    fit: Callable[[T, int, Overlong], T],
    max_length: int,
    overlong: Overlong,
) -> list[tuple[Row[Any], T]]:
    """Rows with their tokens, none longer than `max_length`;
    `overlong` decides how to treat others, and may leave no rows at all."""
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1")
    within: list[tuple[Row[Any], T]] = []
    dropped: list[str] = []
    longer = [count for tokens in encoded if (count := length(tokens)) > max_length]
    for row, tokens in zip(rows, encoded, strict=True):
        count = length(tokens)
        if not count:
            raise DataError(
                "the tokenizer makes no tokens of this row", where=row.where, code="F31"
            )
        if count <= max_length:
            within.append((row, tokens))
        elif overlong == "drop":
            dropped.append(row.id)
        elif overlong == "error":
            raise _too_long(row, count, longer, len(rows), max_length)
        else:
            try:
                within.append((row, fit(tokens, max_length, overlong)))
            except OverlongRow as error:
                raise _cannot_fit(row, count, max_length, overlong, error) from None
    if dropped:
        logger.warning(
            "%d of %d rows dropped, longer than %d tokens", len(dropped), len(rows), max_length
        )
        logger.info("dropped: %s", ", ".join(dropped))
    return within


def _cannot_fit(
    row: Row[Any], count: int, max_length: int, overlong: Overlong, error: OverlongRow
) -> DataError:
    message = f"row {row.id} has {count} tokens, more than max_length = {max_length}, and {error}"
    return DataError(message, where=row.where, hint=f"{overlong} cannot help", code="F30")


def _too_long(
    row: Row[Any], count: int, longer: list[int], n_rows: int, max_length: int
) -> DataError:
    message = f"row {row.id} has {count} tokens, more than max_length = {max_length}"
    if len(longer) > 1:
        message += f"; so have {len(longer)} of {n_rows} rows, up to {max(longer)} tokens"
    hint = "raise max_length, or set overlong to drop, truncate_left or truncate_right"
    return DataError(message, where=row.where, hint=hint, code="F30")
