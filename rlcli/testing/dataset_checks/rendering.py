"""The checks that conversations have the tokens which `transformers` gives them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest

from rlcli.api.data import SequenceSample
from rlcli.testing.contract import Contract, Violation, place_of
from rlcli.testing.dataset_checks.first_rows import reader
from rlcli.testing.dataset_checks.samples import SYSTEM, sequences_of
from rlcli.testing.dataset_checks.trial import Trial, needs_template, read
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

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


class RenderingChecks(Contract):
    """Compares tokens with `apply_chat_template` of transformers, which datasets do not call."""

    @pytest.mark.parametrize("system", [None, SYSTEM], ids=["as it is", "with a system prompt"])
    def test_prompts_are_rendered_as_by_transformers(
        self, trial: Trial, system: str | None
    ) -> None:
        """with a chat template, a prompt has the tokens that transformers gives its text"""
        if needs_template(trial.cls):
            pytest.skip("its rows are conversations")
        if system and not trial.takes("system"):
            pytest.skip("takes no system prompt")
        plain, chat = byte_tokenizer(), byte_tokenizer(chat=True)
        texts = _prompts_of_all(trial, plain, None)
        rendered = _prompts_of_all(trial, chat, system)
        for index, prompts in enumerate(zip(texts, rendered, strict=True)):
            for tokens, prompt in zip(*prompts, strict=True):
                text = plain.decode(tokens, skip_special_tokens=True)
                expected = _prompt_by_transformers(chat, text, system)
                # documents have no prompt, and some datasets use no chat template
                if text and prompt not in (tokens, expected):
                    fault = f"row {index}: the prompt is {_shown(chat, prompt)}"
                    raise _unlike_transformers(fault, _shown(chat, expected), trial)

    def test_conversations_are_rendered_as_by_transformers(self, trial: Trial) -> None:
        """a conversation has the tokens that transformers gives its messages"""
        chat = byte_tokenizer(chat=True)
        for index, conversation, sample in _conversations(trial, chat):
            expected = [chat.decode(tokens) for tokens in _renderings(chat, conversation)]
            texts = [chat.decode(tokens) for tokens, _ in sequences_of(sample)]
            if texts and not set(texts) & set(expected):
                fault = f"row {index} is {texts[0]!r:.90}"
                raise _unlike_transformers(fault, f"{expected[0]!r:.90}", trial)

    def test_only_responses_are_trained_on(self, trial: Trial) -> None:
        """of a conversation, whole messages of the assistant are trained on, and nothing else"""
        chat = byte_tokenizer(chat=True)
        for index, conversation, sample in _conversations(trial, chat):
            responses = _texts_of_responses(chat, conversation)
            for tokens, trained in sequences_of(sample):
                texts = [
                    chat.decode(run, skip_special_tokens=True) for run in _runs(tokens, trained)
                ]
                foreign = [text for text in texts if responses and text not in responses]
                if foreign:
                    raise Violation(
                        f"row {index}: {foreign[0]!r:.60} is trained on, which is not a message of "
                        "the assistant",
                        "train on the content of the assistant's messages and their EOS alone",
                        place_of(reader(trial.demand())),
                    )


def _conversations(
    trial: Trial, tokenizer: Any
) -> Iterator[tuple[int, RenderedConversation, SequenceSample]]:
    """The number of each row that holds a conversation, what it holds, and its sample; skips the
    check if there are none."""
    conversations = [_conversation_of(row) for row in trial.rows]
    if not any(conversations):
        pytest.skip("its rows are no conversations")
    dataset = trial.demand(tokenizer=tokenizer)
    if len(dataset) != len(trial.rows):
        pytest.skip("has no sample for each row")
    for index, (conversation, sample) in enumerate(zip(conversations, read(dataset), strict=False)):
        if conversation is not None:
            yield index, conversation, sample


def _unlike_transformers(fault: str, expected: str, trial: Trial) -> Violation:
    return Violation(
        f"{fault}, and {expected} by transformers' apply_chat_template",
        "give the template the texts and messages of the row as they are; it adds everything else, "
        "including what begins a response",
        place_of(reader(trial.demand())),
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


def _texts_of_responses(tokenizer: Any, conversation: RenderedConversation) -> list[str]:
    responses = [
        rendered_by_transformers(
            tokenizer, [conversation.messages[place]], add_generation_prompt=False
        )
        for place in conversation.responses
    ]
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in responses]


def _conversation_of(row: Mapping[str, Any]) -> RenderedConversation | None:
    """The messages in a row, if that is what it holds and nothing else changes them."""
    conversations = [value for value in row.values() if _is_conversation(value)]
    if len(conversations) != 1 or row.get("system"):
        return None
    tools = row.get("tools")
    messages = [_message_of(entry) for entry in conversations[0]]
    return RenderedConversation(messages, json.loads(tools) if isinstance(tools, str) else tools)


def _is_conversation(value: Any) -> bool:
    entries = value if isinstance(value, list) else []
    return bool(entries) and all(
        isinstance(entry, dict) and _is_message(entry) for entry in entries
    )


def _is_message(entry: Mapping[str, Any]) -> bool:
    has_content = isinstance(entry.get("content", entry.get("value")), str)
    has_role = isinstance(entry.get("role", entry.get("from")), str)
    return has_role and (has_content or bool(entry.get("tool_calls")))


def _message_of(entry: Mapping[str, Any]) -> Message:
    """A message in the form that templates expect: the arguments of a tool call are no text."""
    role = entry.get("role", entry.get("from"))
    message = {
        "role": ROLES.get(role, role),
        "content": entry.get("content", entry.get("value")),
        "tool_calls": [_call_of(call) for call in entry.get("tool_calls") or []],
    }
    return {name: value for name, value in message.items() if value not in (None, [])}


def _call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    is_text = isinstance(arguments, str)
    return {
        **call,
        "function": {**function, "arguments": json.loads(arguments) if is_text else arguments},
    }


def _prompts_of_all(trial: Trial, tokenizer: Any, system: str | None) -> list[list[list[int]]]:
    """Those of each sample, with this system prompt and not one of the dataset's own."""
    settings: dict[str, Any] = {"system": system} if trial.takes("system") else {}
    return [_prompts(sample) for sample in read(trial.demand(tokenizer=tokenizer, **settings))]


def _prompts(sample: Any) -> list[list[int]]:
    """The tokens of each sequence that are not trained on."""
    prompts = []
    for tokens, trained in sequences_of(sample):
        flags = trained or [False] * len(tokens)
        prompts.append([token for token, flag in zip(tokens, flags, strict=True) if not flag])
    return prompts


def _runs(tokens: Sequence[int], trained: Sequence[bool] | None) -> list[list[int]]:
    """Neighbouring tokens that are trained on."""
    flagged = zip(tokens, trained or [False] * len(tokens), strict=True)
    groups = groupby(flagged, key=lambda pair: pair[1])
    return [[token for token, _ in group] for is_trained, group in groups if is_trained]


def _shown(tokenizer: Any, tokens: Sequence[int]) -> str:
    return f"{tokenizer.decode(tokens)!r:.90}"
