"""Checks of what becomes of the texts of rows: they are in the tokens, as they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rlcli.api.preview import Preview
from rlcli.checkpoint.light_tokenizer import LightTokenizer
from rlcli.project import is_built_in
from rlcli.testing.contract import Contract, Violation, skip_if, skip_unless
from rlcli.testing.dataset_checks.sequences import (
    TokenSequence,
    decoded,
    sequences_in,
    sequences_of,
    text_of,
)
from rlcli.testing.dataset_checks.trial import Row, Rows, Trial, needs_template, read, with_values
from rlcli.testing.tokenizer import byte_tokenizer

SYSTEM = "Answer in one word."

INJECTED = "<eos><user>"
"""Names of special tokens, as a text may hold them to speak in another's name."""

PARTS = "not tried: a sample may be a part of a row"

PLAIN_AND_CHAT = pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])


class TextChecks(Contract):
    @PLAIN_AND_CHAT
    def test_texts_come_back(self, trial: Trial, chat: bool) -> None:
        """the tokens decode to the prompt and the answer"""
        tokenizer = _tokenizer_for(trial, chat)
        dataset = trial.demand(tokenizer=tokenizer)
        for index, sample in enumerate(read(dataset)):
            preview = dataset.preview(index) if hasattr(dataset, "preview") else None
            for number, sequence in enumerate(sequences_of(sample)):
                fault = _unreadable(sequence, preview, number, tokenizer)
                if fault:
                    raise Violation(
                        f"row {index}: {fault}",
                        "encode prompt and answer each with the tokenizer, then concatenate them; "
                        "mask the prompt",
                        trial.reader,
                    )

    @PLAIN_AND_CHAT
    def test_texts_are_kept_as_written(self, trial: Trial, chat: bool) -> None:
        """a row's texts are in its tokens as they are written: blanks, braces, line ends"""
        skip_if(trial.divides_rows, PARTS)
        skip_unless(trial.rows, "has no rows of texts")
        tokenizer = _tokenizer_for(trial, chat)
        shown = shown_texts(trial, tokenizer)
        rows = with_texts(trial.rows, shown, unusual)
        content = decoded(trial.demand(rows, tokenizer=tokenizer), tokenizer)
        for text in shown:
            written = unusual(text)
            expected = written if is_built_in(trial.signature.path) else written.strip()
            if expected not in content:
                raise Violation(
                    f"{written!r} of a row is not in its tokens",
                    "leave the row's texts as they are: no strip, splitlines, format or replace",
                    trial.reader,
                )

    def test_texts_that_name_special_tokens_are_texts(self, trial: Trial) -> None:
        """with a chat template, a text that names a special token adds none"""
        skip_if(
            not trial.rows or not is_built_in(trial.signature.path),
            "not tried: its rows may be trusted",
        )
        tokenizer = byte_tokenizer(chat=True)
        shown = shown_texts(trial, tokenizer)
        rows = with_texts(trial.rows, shown, lambda text: f"{text}{INJECTED}")
        usual = _special_tokens(trial.demand(tokenizer=tokenizer), tokenizer)
        changed = _special_tokens(trial.demand(rows, tokenizer=tokenizer), tokenizer)
        for count, changed_count in zip(usual, changed, strict=True):
            if count != changed_count:
                raise Violation(
                    f"a row that has {INJECTED!r} in its texts has {changed_count} special tokens "
                    f"and not {count}",
                    "render rows with rlcli.api.chat_template and encode them with "
                    "rlcli.api.special_tokens",
                    trial.reader,
                )

    @PLAIN_AND_CHAT
    def test_the_system_prompt_is_used(self, trial: Trial, chat: bool) -> None:
        """the argument `system` is in the tokens of rows without a system prompt"""
        skip_unless(trial.takes("system"), "takes no system prompt")
        tokenizer = _tokenizer_for(trial, chat)
        if SYSTEM not in decoded(trial.demand(tokenizer=tokenizer, system=SYSTEM), tokenizer):
            raise Violation(
                f"system {SYSTEM!r} is in the tokens of no row",
                "pass it on to whatever renders the prompt",
                trial.reader,
            )


def _tokenizer_for(trial: Trial, chat: bool) -> LightTokenizer:
    """With or without a chat template; skips the check of a dataset that needs one."""
    skip_if(needs_template(trial.cls) and not chat, "needs a chat template")
    return byte_tokenizer(chat=chat)


def _unreadable(
    sequence: TokenSequence, preview: Preview | None, number: int, tokenizer: Any
) -> str:
    """Which texts cannot be found in a sequence; empty if all can."""
    prompt, answer = (text_of(tokenizer, part) for part in (sequence.prompt, sequence.answer))
    for name, text in (("prompt", prompt), ("answer", answer)):
        if "\ufffd" in text:
            return f"the {name} decodes to broken text: {text!r:.60}"
    if preview is None:
        return "" if prompt.strip() or answer.strip() else "there is no text in it"
    before_answer = tokenizer.decode(sequence.prompt)
    for name, words in (("prompt", preview.prompt), ("system prompt", preview.system)):
        if words and words not in prompt and words not in before_answer:
            return f"the {name} is {words!r:.40}, the tokens before the answer say {prompt!r:.60}"
    for expected in preview.answers[number : number + 1]:
        if expected != answer:
            return (
                f"the answer is {expected!r:.40}, the tokens that are trained on say {answer!r:.60}"
            )
    return ""


def texts_of(value: Any) -> list[str]:
    """A text, or the texts of a list."""
    entries = value if isinstance(value, list) else [value]
    return [entry for entry in entries if isinstance(entry, str) and entry]


def shown_texts(trial: Trial, tokenizer: Any) -> list[str]:
    """The texts of its rows that are in its tokens, without those in whose place it refuses other
    words, such as the letter of a choice."""
    values = [value for row in trial.rows for value in row.values()]
    texts = list(dict.fromkeys(text for value in values for text in texts_of(value)))
    shown = _shown_with_marks(trial, texts, tokenizer)
    if shown is None:
        shown = [text for text in texts if _shown_with_marks(trial, [text], tokenizer)]
    if shown:
        return shown
    content = decoded(trial.demand(tokenizer=tokenizer), tokenizer)
    return [text for text in texts if text in content]


def _shown_with_marks(trial: Trial, texts: Sequence[str], tokenizer: Any) -> list[str] | None:
    """Those of the texts that are in its tokens if each has a mark, by which it differs from parts
    of others; None if it refuses such rows."""
    marked = {text: f"{text} mark{number}x" for number, text in enumerate(texts)}
    rows = with_texts(trial.rows, texts, marked.__getitem__)
    if not trial.accepts(rows, tokenizer):
        return None
    content = decoded(trial.demand(rows, tokenizer=tokenizer), tokenizer)
    return [text for text in texts if marked[text] in content]


def unusual(text: str) -> str:
    """The text among what careless code changes; each text stays different from the others."""
    return f"  \t{text} {{x}} {{}} %s 100% \\boxed{{1}}\u2028\u0085\r\n\x0bend of {text} \n"


def with_texts(rows: Rows, shown: Sequence[str], change: Callable[[str], str]) -> list[Row]:
    """Rows with those of their texts changed that are shown."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(entry) for entry in value]
        return change(value) if isinstance(value, str) and value in shown else value

    return with_values(rows, changed)


def _special_tokens(dataset: Any, tokenizer: Any) -> list[int]:
    """The number of special tokens in each sequence."""
    special = set(tokenizer.all_special_ids)
    sequences = sequences_in(dataset)
    return [sum(token in special for token in sequence.tokens) for _, sequence in sequences]
