"""The prompt of a row with preferred and rejected answers, wherever the row holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ._jsonl import BadRow, texts_field
from ._messages import Prompt, answered_field, as_prompt, is_conversation, prompt_field


@dataclass(frozen=True)
class PreferenceFields:
    """Names of the fields of a row."""

    prompt: str | None
    """None: the prompt is the common beginning of the answers."""
    positive: str
    negative: str
    setting: Callable[[str, str], str]
    """How the field of the prompt is named on the command line, for hints."""

    def read(self, fields: dict[str, Any]) -> tuple[Prompt, list[str], list[str]]:
        """The prompt, the preferred and the rejected answers. Raises BadRow."""
        if is_conversation(fields.get(self.positive)):
            return self._of_conversations(fields)
        positive, negative = (self._texts(fields, key) for key in (self.positive, self.negative))
        if self.prompt is not None:
            return prompt_field(fields, self.prompt), positive, negative
        self._refuse_other_texts(fields)
        return self._split(positive, negative)

    def _texts(self, fields: dict[str, Any], key: str) -> list[str]:
        """A row with one answer of a kind may give it without a list around it."""
        return texts_field(in_list(fields, key), key)

    def _of_conversations(self, fields: dict[str, Any]) -> tuple[Prompt, list[str], list[str]]:
        before, positive = answered_field(fields, self.positive)
        before_negative, negative = answered_field(fields, self.negative)
        if before != before_negative:
            raise BadRow(
                f"{self.positive} and {self.negative} differ before their last message, so they "
                "do not answer the same prompt"
            )
        if before:
            return as_prompt(before), [positive], [negative]
        if self.prompt is None:
            raise BadRow(f"{self.positive} has no message before the answer, and so no prompt")
        return prompt_field(fields, self.prompt), [positive], [negative]

    def _split(
        self, positive: list[str], negative: list[str]
    ) -> tuple[Prompt, list[str], list[str]]:
        """Texts without what all of them begin with, up to its last blank: that is the prompt."""
        texts = [*positive, *negative]
        end = _end_of_shared_words(texts)
        if not texts[0][:end].strip():
            raise BadRow(
                f"the row has no prompt: {self.positive} and {self.negative} do not begin with one",
                hint=f"name the field that holds it: {self.setting('prompt', 'FIELD')}",
            )
        for key, answers in ((self.positive, positive), (self.negative, negative)):
            if not all(text[end:].strip() for text in answers):
                raise BadRow(
                    f"{key} has no answer after the prompt, with which {self.positive} and "
                    f"{self.negative} begin"
                )
        after = [text[end:] for text in texts]
        return texts[0][:end], after[: len(positive)], after[len(positive) :]

    def _refuse_other_texts(self, fields: dict[str, Any]) -> None:
        """A row with other texts probably has its prompt among them."""
        others = [
            name
            for name, value in fields.items()
            if name not in (self.positive, self.negative, "id")
            and (isinstance(value, str) or is_conversation(value))
        ]
        if others:
            raise BadRow(
                f"which field is the prompt? The row also has {', '.join(others)}",
                hint=f"set {self.setting('prompt', others[0])}, or leave out the others",
            )


def in_list(fields: dict[str, Any], key: str) -> dict[str, Any]:
    """The row, with a list around a field that is a text or a number."""
    value = fields.get(key)
    return {**fields, key: [value]} if isinstance(value, str | float | int) else fields


def _end_of_shared_words(texts: list[str]) -> int:
    """Where the last blank is in what all texts begin with; 0 if there is none."""
    shared = min(texts, key=len)
    for text in texts:
        pairs = zip(shared, text, strict=False)
        differs = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        shared = shared[:differs]
    return max(0, *(shared.rfind(blank) for blank in " \n\t"))
