"""Prompts with answers that are each judged alone, for KTO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, MissingField, Row, kind_of
from ._messages import Prompt, answered_field, as_prompt, prompt_field
from ._preferences import PreferenceFields
from ._samples import unpaired_sample
from ._text_rows import Answered, TextRows

Judged = tuple[str, bool]
"""An answer, and whether it is desirable."""
Texts = tuple[Prompt, list[Judged]]

LABELS = {"true": True, "1": True, "false": False, "0": False}
"""How files write a label, as JSON or as text."""


@register_dataset("unpaired")
@dataclass(kw_only=True)
class Unpaired(TextRows):
    """Rows of a prompt, an answer, and whether it is a good one. Rows with preferred and rejected
    answers can be read as well: each of their answers is then judged alone.

    A sample holds the prompt with its answer, which ends with the end-of-sequence token;
    `desirable` says whether the answer is a good one.
    """

    ELSEWHERE: ClassVar[str] = "kto unpaired_preference binary_feedback"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "desirable")
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "answer": "4", "label": True},
        {"prompt": "What is 2+2?", "answer": "It is five.", "label": False},
        {"prompt": "Name two colours.\nOne on each line.", "answer": "rot\ngrün", "label": True},
    )
    SAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "answers": ["4"], "desirable": [True]},
        {"prompt": "What is 2+2?", "answers": ["It is five."], "desirable": [False]},
    )

    prompt_key: str | None = "prompt"
    """Field that holds the prompt: a text, or a list of messages. null: the messages before the
    answer or, of preferred and rejected answers, what they begin with."""

    answer_key: str | None = "answer"
    """Field that holds the answer: a text, or messages that end with it."""

    label_key: str | None = "label"
    """Field that says whether the answer is a good one: true or false, or 1 or 0."""

    positive_key: str | None = None
    """Field that holds the list of preferred answers, or a single one, in place of `answer_key` and
    `label_key`; then `negative_key` is needed as well."""

    negative_key: str | None = None
    """Field that holds the list of rejected answers, or a single one."""

    _rows: list[tuple[Row[Texts], Answered]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        named = [
            (self.answer_key is None) == (self.label_key is None),
            (self.positive_key is None) == (self.negative_key is None),
            self.answer_key is not None or self.positive_key is not None,
        ]
        if not all(named):
            raise ValueError(
                "rows have an answer and its label (answer_key, label_key), or preferred and "
                "rejected answers (positive_key, negative_key)"
            )
        super().__post_init__()

    def _encoded(self, rows: list[Row[Texts]]) -> list[tuple[Row[Texts], Answered]]:
        return self._answered(rows, [[answer for answer, _ in row.content[1]] for row in rows])

    def __getitem__(self, index: int) -> SequenceSample:
        _, judged = self._rows[index][0].content
        return unpaired_sample(self.preview(index), [is_desirable for _, is_desirable in judged])

    def preview(self, index: int) -> Preview:
        row, (prompt, tokens) = self._rows[index]
        answers = [answer for answer, _ in row.content[1]]
        about = self._about(row, row.content[0])
        return Preview.answered(prompt, tokens, answers=answers, **about)

    def _read(self, fields: dict[str, Any]) -> Texts:
        if self.positive_key is None or self.negative_key is None:
            return self._judged(fields)
        names = PreferenceFields(
            self.prompt_key, self.positive_key, self.negative_key, self.util.column_setting
        )
        prompt, positive, negative = names.read(fields)
        desirable = [(answer, True) for answer in positive]
        return prompt, desirable + [(answer, False) for answer in negative]

    def _judged(self, fields: dict[str, Any]) -> Texts:
        assert self.answer_key is not None
        before, answer = answered_field(fields, self.answer_key)
        judged = [(answer, self._label(fields))]
        if self.prompt_key is not None:
            if before:
                raise BadRow(f"field {self.answer_key!r} has messages before the answer")
            return prompt_field(fields, self.prompt_key), judged
        if not before:
            raise BadRow(f"{self.answer_key} has no message before the answer, and so no prompt")
        return as_prompt(before), judged

    def _label(self, fields: dict[str, Any]) -> bool:
        assert self.label_key is not None
        if self.label_key not in fields:
            raise MissingField(self.label_key, fields)
        label = fields[self.label_key]
        written = str(label).strip().lower() if isinstance(label, bool | int | str) else None
        if written not in LABELS:
            shown = repr(label) if isinstance(label, int | float | str) else kind_of(label)
            raise BadRow(f"field {self.label_key!r} is {shown:.40}, not true or false")
        return LABELS[written]
