"""Texts with the label of their class, as prompts to name it and answers with its name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset

from ._jsonl import BadRow, MissingField, Row, text_field
from ._samples import answered_sample
from ._text_rows import Answered, TextRows

Texts = tuple[str, str]
"""A prompt and the name of the label."""


@register_dataset("our_labelled")
@dataclass(kw_only=True)
class Labelled(TextRows):
    """Rows of a text and its label: the number of a name in `names`, from 0, or the name itself, in
    any case. The answer is the name as it is in `names`."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"text": "What a day!", "label": 2},
        {"text": "Der Käse war alt.\nNie wieder.", "label": 0},
        {"text": "It is a film.", "label": " Neutral"},
    )

    text_key: str = "text"
    """Field with the text."""

    label_key: str = "label"
    """Field with the label."""

    names: list[str] = field(default_factory=lambda: ["negative", "neutral", "positive"])
    """Names of the labels, in the order of their numbers."""

    _rows: list[tuple[Row[Texts], Answered]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.names) < 2 or len({_plain(name) for name in self.names}) < len(self.names):
            raise ValueError(f"names is {self.names}; it must have two or more different names")
        super().__post_init__()

    def _encoded(self, rows: list[Row[Texts]]) -> list[tuple[Row[Texts], Answered]]:
        return self._answered(rows, [[row.content[1]] for row in rows])

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, (prompt, (answer,)) = self._rows[index]
        text, name = row.content
        about = self._about(row, text)
        return Preview.answered(prompt, [answer], answers=[name], **about)

    def _read(self, fields: dict[str, Any]) -> Texts:
        text = text_field(fields, self.text_key)
        if self.label_key not in fields:
            raise MissingField(self.label_key, fields)
        name = self._name(fields[self.label_key])
        return f"{text}\n\nWhich fits best: {', '.join(self.names)}?", name

    def _name(self, label: Any) -> str:
        """The name of a label. Raises BadRow."""
        for name in self.names:
            if isinstance(label, str) and _plain(label) == _plain(name):
                return name
        is_number = isinstance(label, int) and not isinstance(label, bool)
        number = int(label) if is_number or str(label).strip().isdecimal() else None
        if number is None or not 0 <= number < len(self.names):
            raise BadRow(f"field {self.label_key!r} is {label!r:.40}, not a label")
        return self.names[number]


def _plain(name: str) -> str:
    return name.strip().casefold()
