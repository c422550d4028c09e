"""The checks that conversations have the tokens which `transformers` gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import MESSAGES
from rlcli.testing.contract import Contract, Violation, skip_if, skip_unless
from rlcli.testing.dataset_checks.sequences import sequences_in, sequences_of, text_of
from rlcli.testing.dataset_checks.texts import SYSTEM
from rlcli.testing.dataset_checks.trial import Row, Rows, Trial, needs_template, read, with_values
from rlcli.testing.tokenizer import (
    CHAT_TEMPLATE,
    MARKED_TEMPLATE,
    as_transformers,
    byte_tokenizer,
)

Message = dict[str, Any]


@dataclass(frozen=True)
class RenderedConversation:
    """What a row holds, as transformers takes it."""

    messages: list[Message]
    tools: list[Any] | None

    @property
    def responses(self) -> list[int]:
        """The places of the assistant's messages."""
        places = enumerate(self.messages)
        return [place for place, message in places if message["role"] == "assistant"]


ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant"}
"""Names of roles in rows → those of chat templates."""
TAG = re.compile(r"</?\w+>")
"""Such as those around a thought."""
WORD = re.compile(r"\w+")


class RenderingChecks(Contract):
    """Compares tokens with `apply_chat_template` of transformers, which datasets do not call."""

    @pytest.mark.parametrize("system", [None, SYSTEM], ids=["as it is", "with a system prompt"])
    def test_prompts_are_rendered_as_by_transformers(
        self, trial: Trial, system: str | None
    ) -> None:
        """with a chat template, a prompt has the tokens that transformers gives its text"""
        skip_if(needs_template(trial.cls), "its rows are conversations")
        skip_if(system and not trial.takes("system"), "takes no system prompt")
        plain, chat = byte_tokenizer(), byte_tokenizer(chat=True)
        texts = sequences_in(_dataset_with(trial, plain, None))
        rendered = sequences_in(_dataset_with(trial, chat, system))
        for (index, usual), (_, sequence) in zip(texts, rendered, strict=True):
            text = text_of(plain, usual.prompt)
            expected = _prompt_by_transformers(chat, text, system)
            # documents have no prompt, and some datasets use no chat template
            if text and sequence.prompt not in (usual.prompt, expected):
                raise _unlike_transformers(
                    f"row {index}: the prompt is {_shown(chat, sequence.prompt)}",
                    _shown(chat, expected),
                    trial,
                )

    def test_conversations_are_rendered_as_by_transformers(self, trial: Trial) -> None:
        """a conversation has the tokens that transformers gives its messages"""
        chat = byte_tokenizer(chat=True)
        for index, conversation, sample in _conversations(trial, chat):
            expected = [chat.decode(tokens) for tokens in _renderings(chat, conversation)]
            texts = [chat.decode(sequence.tokens) for sequence in sequences_of(sample)]
            if texts and not set(texts) & set(expected):
                raise _unlike_transformers(
                    f"row {index} is {texts[0]!r:.90}", f"{expected[0]!r:.90}", trial
                )

    def test_only_responses_are_trained_on(self, trial: Trial) -> None:
        """of a conversation, messages of the assistant up to their EOS are trained on, and nothing
        else"""
        chat = byte_tokenizer(chat=True)
        for index, conversation, sample in _with_what_follows(trial, chat):
            responses = _spans_of_responses(chat, conversation)
            for sequence in sequences_of(sample):
                foreign = [span for span in _spans(sequence.trained) if span not in responses]
                if foreign:
                    text = _shown(chat, sequence.tokens[slice(*foreign[0])])
                    raise Violation(
                        f"row {index}: {text} is trained on, which is not a message of the "
                        "assistant with its EOS",
                        "begin where the template's generation prompt ends, and end with the EOS "
                        "of the message",
                        trial.reader,
                    )

    def test_messages_in_metadata_are_those_of_the_prompt(self, trial: Trial) -> None:
        """messages in the metadata of a row are those that its prompt was rendered from"""
        chat = byte_tokenizer(chat=True)
        samples = read(_dataset_with(trial, chat, SYSTEM))
        skip_unless(
            any(MESSAGES in sample.metadata for sample in samples),
            "has no messages in its metadata",
        )
        for index, sample in enumerate(samples):
            (messages,) = sample.metadata.get(MESSAGES, [None])
            prompts = [sequence.prompt for sequence in sequences_of(sample)]
            if messages and prompts:
                expected = rendered_by_transformers(chat, messages, add_generation_prompt=True)
                if expected not in prompts:
                    raise _unlike_transformers(
                        f"row {index}: the prompt is {_shown(chat, prompts[0])}",
                        _shown(chat, expected),
                        trial,
                    )

    def test_masks_do_not_depend_on_markers(self, trial: Trial) -> None:
        """the same texts are trained on whether a template marks them or not"""
        skip_unless(needs_template(trial.cls), "needs no chat template")
        texts = [_trained_texts(trial, template) for template in (CHAT_TEMPLATE, MARKED_TEMPLATE)]
        for (index, plain), (_, marked) in zip(*texts, strict=True):
            if plain != marked:
                raise Violation(
                    f"row {index}: {plain!r:.60} is trained on, and {marked!r:.60} with a template "
                    "that marks what the assistant wrote",
                    "select the turns to train on before looking for where they are",
                    trial.reader,
                )


NumberedConversation = tuple[int, RenderedConversation, SequenceSample]
"""The number of a row, what it holds, and its sample."""


def _with_what_follows(trial: Trial, tokenizer: Any) -> Iterator[NumberedConversation]:
    """The conversations as they are, and with a further message that no response follows, where
    that is accepted."""
    yield from _conversations(trial, tokenizer)
    variants = [_with_last(trial.rows, role) for role in ("user", "tool")]
    for rows in (*variants, _cut_after_tools(trial.rows)):
        if rows and trial.accepts(rows, tokenizer):
            yield from _conversations(trial, tokenizer, rows)


def _with_last(rows: Rows, role: str) -> list[Row]:
    """Rows with a further message at the end of their conversations."""
    message = {"role": role, "content": "And then?"}
    return with_values(rows, lambda value: [*value, message] if is_conversation(value) else value)


def _cut_after_tools(rows: Rows) -> list[Row]:
    """Rows whose conversations end with the last output of a tool; of others, none."""
    pairs = zip(rows, with_values(rows, _cut_after_last_tool), strict=True)
    return [changed for row, changed in pairs if changed != row]


def _cut_after_last_tool(value: Any) -> Any:
    """A conversation up to the last output of a tool; anything else as it is."""
    if not is_conversation(value):
        return value
    counts = (count for count, entry in enumerate(value, 1) if entry.get("role") == "tool")
    return value[: max(counts, default=len(value))]


def _conversations(
    trial: Trial, tokenizer: Any, rows: Rows | None = None
) -> Iterator[NumberedConversation]:
    """Those of the rows that hold one; skips the check if there are none."""
    rows = _without_markup(list(rows or trial.rows))
    conversations = [_conversation_of(row) for row in rows]
    skip_unless(any(conversations), "its rows are no conversations")
    dataset = trial.demand(rows, tokenizer=tokenizer)
    skip_if(len(dataset) != len(rows), "has no sample for each row")
    for index, (conversation, sample) in enumerate(zip(conversations, read(dataset), strict=False)):
        if conversation is not None:
            yield index, conversation, sample


def _without_markup(value: Any) -> Any:
    """Rows, or anything in them, in which texts with tags, which a dataset may act on, are replaced
    by their words."""
    if isinstance(value, dict):
        return {name: _without_markup(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_markup(entry) for entry in value]
    is_marked = isinstance(value, str) and TAG.search(value)
    return " ".join(WORD.findall(TAG.sub(" ", value))) if is_marked else value


def _unlike_transformers(fault: str, expected: str, trial: Trial) -> Violation:
    return Violation(
        f"{fault}, and {expected} by transformers' apply_chat_template",
        "give the template the texts and messages of the row as they are; it adds everything else, "
        "including what begins a response",
        trial.reader,
    )


def rendered_by_transformers(
    tokenizer: Any, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool
) -> list[int]:
    """The tokens of a conversation, by transformers alone."""
    text = as_transformers(tokenizer).apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    return list(tokenizer.backend.encode(text, add_special_tokens=False).ids)


def _prompt_by_transformers(tokenizer: Any, text: str, system: str | None) -> list[int]:
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return rendered_by_transformers(tokenizer, messages, add_generation_prompt=True)


def _renderings(tokenizer: Any, conversation: RenderedConversation) -> list[list[int]]:
    """The tokens that a sample of a conversation may have: those up to the last response, and those
    before a response that follows."""
    messages, tools = conversation.messages, conversation.tools
    last = conversation.responses[-1] if conversation.responses else len(messages)
    answered = rendered_by_transformers(
        tokenizer, messages[: last + 1], tools, add_generation_prompt=False
    )
    prompts = [
        rendered_by_transformers(tokenizer, prompt, tools, add_generation_prompt=True)
        for prompt in (messages, messages[:last])
    ]
    return [answered, [*answered, tokenizer.eos_token_id], *prompts]


def _spans_of_responses(
    tokenizer: Any, conversation: RenderedConversation
) -> list[tuple[int, int]]:
    """[start, end) in tokens of each message of the assistant, from behind the generation prompt to
    its EOS; once more, with another EOS behind it."""
    messages, tools, spans = conversation.messages, conversation.tools, []
    for before in conversation.responses:
        prompt, answered = (
            rendered_by_transformers(
                tokenizer, messages[:count], tools, add_generation_prompt=count == before
            )
            for count in (before, before + 1)
        )
        spans += [(len(prompt), len(answered)), (len(prompt), len(answered) + 1)]
    return spans


def _conversation_of(row: Row) -> RenderedConversation | None:
    """The messages in a row, if that is what it holds and nothing else changes them."""
    conversations = [value for value in row.values() if is_conversation(value)]
    if len(conversations) != 1 or row.get("system"):
        return None
    tools = row.get("tools")
    messages = [_message_of(entry) for entry in conversations[0]]
    return RenderedConversation(messages, json.loads(tools) if isinstance(tools, str) else tools)


def is_conversation(value: Any) -> bool:
    """Whether it is a list of messages, with texts or tool calls."""
    entries = value if isinstance(value, list) else []
    return bool(entries) and all(
        isinstance(entry, dict) and _is_message(entry) for entry in entries
    )


def _is_message(entry: Row) -> bool:
    has_content = isinstance(entry.get("content", entry.get("value")), str)
    has_role = isinstance(entry.get("role", entry.get("from")), str)
    return has_role and (has_content or bool(entry.get("tool_calls")))


def _message_of(entry: Any) -> Message:
    """A message in the form that templates expect: the arguments of a tool call are no text."""
    role = entry.get("role", entry.get("from"))
    message = {
        "role": ROLES.get(role, role),
        "content": entry.get("content", entry.get("value")),
        "tool_calls": [_call_of(call) for call in entry.get("tool_calls") or []],
    }
    return {name: value for name, value in message.items() if value not in (None, [])}


def _call_of(call: Row) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    return {
        **call,
        "function": {**function, "arguments": json.loads(arguments) if is_text else arguments},
    }


def _dataset_with(trial: Trial, tokenizer: Any, system: str | None) -> Any:
    """The dataset with this system prompt and not one of its own, where it takes one."""
    changes = {"system": system} if trial.takes("system") else {}
    return trial.demand(tokenizer=tokenizer, changes=changes)


def _spans(trained: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, end) of neighbouring tokens that are trained on."""
    groups = groupby(range(len(trained)), key=trained.__getitem__)
    spans = [[*places] for is_trained, places in groups if is_trained]
    return [(places[0], places[-1] + 1) for places in spans]


def _trained_texts(trial: Trial, template: str) -> list[tuple[int, str]]:
    """(the number of its row, what is trained on) of each sequence, with a chat template."""
    tokenizer = byte_tokenizer(chat=True, template=template)
    sequences = sequences_in(trial.demand(tokenizer=tokenizer))
    return [(index, text_of(tokenizer, sequence.answer)) for index, sequence in sequences]


def _shown(tokenizer: Any, tokens: Sequence[int]) -> str:
    return f"{tokenizer.decode(tokens)!r:.90}"
