"""The part of a conversation to train on: the assistant's turns, each with the token that ends it.

Templates that mark what the assistant wrote (`{% generation %}`) identify it themselves. For others
the conversation is rendered up to each turn, ready for an answer, and up to its end: where both are
prefixes of the whole text, the turn is the text between them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from rlcli.api.chat_template import (
    DAY,
    TemplateError,
    TooMuch,
    marks_generation,
    name_of,
    render_marked,
    shared_length,
    template_of,
)
from rlcli.api.special_tokens import as_content, tokens_with_offsets, unmarked
from rlcli.errors import ModelError

from ._jsonl import BadRow, Row
from ._messages import (
    OTHER_ROLES,
    Message,
    StoredConversation,
    called_tools,
    left_out,
    reasoning_of,
    shape_of,
    tool_names,
    trial_of,
    with_arguments_as_text,
)
from ._rendering import OTHER_TOKENIZER, Overlong, OverlongRow, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Literal["all", "last"]
Span = tuple[int, int]
"""[start, end) in characters of a text."""

FOR_OTHERS = "it may be one for other messages, such as images with text"
WITHOUT_TOOLS = "use a template that writes tool calls, or write the call into the content"
NO_TOOLS = "use a template that writes tools, or set tools_key to a field that no row has"
WITHOUT_REASONING = (
    "use a template that writes reasoning, write it into the content, or leave it out of the rows"
)


@dataclass(frozen=True)
class Spoken:
    """A conversation as rendered by the template."""

    conversation: StoredConversation
    text: str
    """With marks in special tokens that a message names."""
    spans: Sequence[Span]
    """The text to train on: turns of the assistant, in order, none empty."""


@dataclass(frozen=True)
class Masked:
    """The tokens of a conversation."""

    tokens: Tokens
    trained: list[bool]


class Speaker:
    """Renders conversations with a tokenizer's chat template.
    Raises ModelError F32 if it has none."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        turns: Turns,
        mask: Literal["auto", "markers", "prefix"],
    ):
        template = template_of(tokenizer)
        if not template:
            hint = f"{OTHER_TOKENIZER}, or use prompt_answer for rows with one answer"
            raise ModelError(f"{name_of(tokenizer)} has no chat template", hint=hint, code="F32")
        has_markers = marks_generation(template)
        if mask == "markers" and not has_markers:
            message = f"the chat template of {name_of(tokenizer)} has no {{% generation %}} markers"
            raise ModelError(message, hint="set mask: prefix", code="F32")
        self._tokenizer = tokenizer
        self._turns = turns
        self._by_markers = has_markers and mask != "prefix"
        self._complete: set[Hashable] = set()  # shapes of conversations

    @property
    def method(self) -> str:
        """How the trained text is identified."""
        turns = "all turns" if self._turns == "all" else "the last turn"
        how = (
            "the template's generation markers"
            if self._by_markers
            else "prefixes of the conversation"
        )
        return f"{turns} of the assistant, by {how}"

    def speak(self, conversation: StoredConversation) -> Spoken:
        """The text of a conversation, and the spans to train on. Raises BadRow; ModelError for a
        template that exceeds a limit."""
        self._refuse_weights(conversation)
        spoken = self._spoken(conversation)
        self._demand_all(spoken)
        shape = shape_of(conversation.messages), bool(conversation.tools)
        if shape not in self._complete:
            self._try(replace(conversation, messages=trial_of(conversation.messages)))
            self._complete.add(shape)
        return spoken

    def _try(self, trial: StoredConversation) -> None:
        """Raise BadRow for a template that leaves something out of conversations of this shape."""
        try:
            spoken = self._spoken(trial)
        except BadRow:  # it may refuse other contents
            return
        self._demand_all(spoken)

    def _spoken(self, conversation: StoredConversation) -> Spoken:
        text, spans = (self._marked if self._by_markers else self._between_prefixes)(conversation)
        spans = _trimmed(text, spans)
        if not spans:
            how = (
                "its markers enclose nothing"
                if self._by_markers
                else "it writes nothing for the assistant"
            )
            raise BadRow(
                f"{self._of_template} leaves nothing to train on: {how}", "F32", "set mask: prefix"
            )
        return Spoken(conversation, text, spans)

    def _demand_all(self, spoken: Spoken) -> None:
        """Raise BadRow for what the template has left out."""
        trained = "".join(spoken.text[start:end] for start, end in spoken.spans)
        self._demand_answers(spoken.conversation, unmarked(trained))
        self._demand_context(spoken.conversation, unmarked(spoken.text))

    def _refuse_weights(self, conversation: StoredConversation) -> None:
        """In OpenAI's format, turns of weight 0 are not to be trained on."""
        for turn in self._trained_turns(conversation):
            if conversation.messages[turn].get("weight") == 0:
                hint = "set train_on: last, or divide the conversation so that others come last"
                raise BadRow(f"message {turn + 1} has weight 0, but is trained on", hint=hint)

    def _demand_answers(self, conversation: StoredConversation, trained: str) -> None:
        """A template may trim an answer, move its reasoning, or drop that of earlier turns, but the
        last words and the names of the tools that it calls have to be there."""
        for turn in self._trained_turns(conversation):
            message = conversation.messages[turn]
            reasoning = "" if turn < conversation.turns[-1] else reasoning_of(message)
            for subject, words, hint in (
                ("the answer", message["content"].split()[-1:], FOR_OTHERS),
                ("a tool call", called_tools(message), WITHOUT_TOOLS),
                ("the reasoning", reasoning.split()[-1:], WITHOUT_REASONING),
            ):
                if not all(word in trained for word in words):
                    problem = f"{self._of_template} leaves out {subject} in message {turn + 1}"
                    raise BadRow(problem, "F32", hint)

    def _demand_context(self, conversation: StoredConversation, text: str) -> None:
        """What the answers follow from has to be there, too: other messages, and the tools."""
        if (message := left_out(conversation.messages, text)) is not None:
            raise BadRow(f"{self._of_template} leaves out {message}", "F32", OTHER_ROLES)
        if not all(name in text for name in tool_names(conversation.tools or [])):
            raise BadRow(f"{self._of_template} leaves out the tools", "F32", NO_TOOLS)

    def _trained_turns(self, conversation: StoredConversation) -> list[int]:
        return conversation.turns if self._turns == "all" else conversation.turns[-1:]

    def _marked(self, conversation: StoredConversation) -> tuple[str, Sequence[Span]]:
        """A marker may enclose a turn without the text that ends it; the end of the whole text
        shows what that is."""
        rendered = self._render(conversation)
        spans, text, last = rendered.spans, rendered.text, conversation.turns[-1]
        if self._turns == "last" and last:
            spans = spans[len(self._render(conversation, last).spans) :]
        ending = text[spans[-1][1] :].rstrip() if spans else ""
        return text, [
            (start, end + len(ending) * text.startswith(ending, end)) for start, end in spans
        ]

    def _between_prefixes(self, conversation: StoredConversation) -> tuple[str, Sequence[Span]]:
        text = self._render(conversation).text
        turns = self._trained_turns(conversation)
        if not turns[0]:
            raise BadRow(
                (
                    "the conversation begins with the assistant, and its template cannot "
                    "be rendered before that"
                ),
                "F32",
                "set train_on: last, or put a message before it",
            )
        spans = []
        for turn in turns:
            is_last = turn == conversation.turns[-1]
            prompt = self._render(conversation, turn, add_generation_prompt=True).text
            closed = text if is_last else self._render(conversation, turn + 1).text.rstrip()
            for beginning, subject in (
                (prompt, f"the conversation before message {turn + 1}"),
                (closed, f"the conversation up to message {turn + 1}"),
            ):
                if not text.startswith(beginning):
                    raise self._rewriting(conversation, text, beginning, subject)
            spans.append((len(prompt), len(closed)))
        return text, spans

    def _rewriting(
        self, conversation: StoredConversation, text: str, beginning: str, subject: str
    ) -> BadRow:
        """The error for a text that does not begin as a part of the conversation does alone."""
        differs = shared_length(beginning, text)
        around = slice(max(differs - 10, 0), differs + 30)
        last = conversation.turns[-1]
        before_last = self._render(conversation, last, add_generation_prompt=True).text
        return BadRow(
            f"{self._of_template} is not prefix-preserving: {subject} reads {beginning[around]!r} "
            f"alone, and {text[around]!r} in the whole conversation",
            "F32",
            "set train_on: last"
            if text.startswith(before_last)
            else "use a template with {% generation %} markers",
        )

    def _render(
        self, conversation: StoredConversation, messages: int | None = None, **how: Any
    ) -> Any:
        """Render the first `messages` messages, by default all."""
        special = self._tokenizer.special_tokens_map
        some: list[Message] = as_content(self._tokenizer, conversation.messages[:messages])
        tools = as_content(self._tokenizer, conversation.tools)
        try:
            return self._rendered(some, tools=tools, day=DAY, **how, **special)
        except TooMuch as error:
            raise ModelError(f"{self._of_template} fails: {error}", code="F32") from error
        except TemplateError as error:
            raise BadRow(f"{self._of_template} refuses the conversation: {error}", "F32") from error

    def _rendered(self, messages: Sequence[Message], **how: Any) -> Any:
        """Render messages, the arguments of whose tool calls some templates expect as JSON text.
        Raises TemplateError."""
        template = template_of(self._tokenizer, how["tools"]) or ""
        try:
            return render_marked(template, messages, **how)
        except TemplateError:
            with suppress(TemplateError):
                return render_marked(template, with_arguments_as_text(messages), **how)
            raise

    @property
    def _of_template(self) -> str:
        return f"the chat template of {name_of(self._tokenizer)}"


def _trimmed(text: str, spans: Sequence[Span]) -> list[Span]:
    """Merge adjacent spans and drop blank ones. Line breaks after the last token of a turn belong
    to the template; no model has to generate them."""
    joined: list[Span] = []
    for start, end in spans:
        joined.append((joined.pop()[0] if joined and joined[-1][1] == start else start, end))
    ends = ((start, len(text[:end].rstrip())) for start, end in joined)
    return [(start, end) for start, end in ends if start < end]


def encode_turns(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row[Spoken]]) -> list[Masked]:
    """The tokens of conversations, tokenized as whole texts; a token partly within a span is
    trained on. Raises ModelError F32 where a turn does not end with a special token."""
    if not rows:
        return []
    texts = [row.content.text for row in rows]
    try:
        return [
            _masked(tokenizer, row, ids, offsets)
            for row, (ids, offsets) in zip(rows, tokens_with_offsets(tokenizer, texts), strict=True)
        ]
    except NotImplementedError:
        message = (
            f"{name_of(tokenizer)} cannot say which token covers which characters: "
            "it has no tokenizer.json"
        )
        raise ModelError(message, hint="save it with a fast tokenizer class", code="F32") from None


def _masked(
    tokenizer: PreTrainedTokenizerBase, row: Row[Spoken], ids: Tokens, offsets: Sequence[Span]
) -> Masked:
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    trained = [False] * len(ids)
    for start, end in row.content.spans:
        first, behind = bisect_right(ends, start), bisect_left(starts, end)
        trained[first:behind] = [True] * (behind - first)
        last = ids[behind - 1] if behind > first else None
        if last is None or (
            last != tokenizer.eos_token_id and tokenizer.decode([last], skip_special_tokens=True)
        ):
            shown = unmarked(row.content.text[max(end - 20, start) : end])
            finding = (
                f"the chat template of {name_of(tokenizer)} ends a turn of the "
                f"assistant with {shown!r}"
            )
            raise ModelError(
                (
                    f"{finding}, not with a special token: a model trained on it "
                    "would not learn to stop"
                ),
                where=row.where,
                hint="let the template write {{ eos_token }} after each answer",
                code="F32",
            )
    return Masked(ids, trained)


def fit_turns(masked: Masked, limit: int, overlong: Overlong) -> Masked:
    """Keep the first or the last `limit` tokens. Raises OverlongRow if no token to train on, or no
    context, is left."""
    span = slice(-limit, None) if overlong == "truncate_left" else slice(limit)
    cut = Masked(masked.tokens[span], masked.trained[span])
    if not any(cut.trained) or all(cut.trained):
        lack = (
            "no token that is trained on" if not any(cut.trained) else "nothing but the last answer"
        )
        raise OverlongRow(f"{lack} would be left")
    return cut
