"""Mathematical questions with a known final answer, for rewards that check it. Reads GSM8K as it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from rlcli.api.data import DatasetUtility, SequenceSample, register_dataset

from ._jsonl import BadRow, Row, read_rows, text_field
from ._rendering import Tokens, encode_prompts, fit_prompt, within_limit


@register_dataset("math_prompts")
@dataclass(kw_only=True)
class MathPrompts:
    """Rows of a question and an answer; the metadata hold the `question` and the final `answer` alone."""

    KEYS: ClassVar[tuple[str, ...]] = ("packed_prompts",)

    util: DatasetUtility

    path: str
    """A .jsonl file, or a .json file with a list. A field `id`, if every row has one, names the rows."""

    question_key: str = "question"
    """Field that holds the question."""

    answer_key: str = "answer"
    """Field that holds the answer: a number or a text. What follows the last `####` of a text, if it has one,
    is the final answer."""

    template: str = "{question}"
    """The user's message; `{question}` stands for the question."""

    chat: bool | Literal["auto"] = "auto"
    """Put the message through the tokenizer's chat template; auto: if it has one."""

    system: str | None = None
    """System prompt."""

    max_length: int = 1024
    """Longest prompt, in tokens."""

    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """What to do with longer prompts; truncate_left keeps their end, truncate_right their start."""

    bad_rows: Literal["error", "skip"] = "error"
    """What to do with a malformed row."""

    max_bad_rows: int = 10
    """Skip no more malformed rows than this."""

    max_rows: int | None = None
    """Read only so many rows, from the start of the file."""

    _rows: list[tuple[Row[tuple[str, str]], Tokens]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if "{question}" not in self.template:
            raise ValueError(f"template is {self.template!r}; it must contain {{question}}")
        rows = read_rows(
            self.path,
            self._read,
            bad_rows=self.bad_rows,
            max_bad_rows=self.max_bad_rows,
            max_rows=self.max_rows,
        )
        messages = [self.template.replace("{question}", row.content[0]) for row in rows]
        prompts = encode_prompts(self.util.tokenizer, messages, chat=self.chat, system=self.system)
        self._rows = within_limit(
            rows, prompts, length=len, fit=fit_prompt, max_length=self.max_length, overlong=self.overlong
        )

    @property
    def keys(self) -> tuple[str, ...]:
        return self.KEYS

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> SequenceSample:
        row, prompt = self._rows[index]
        question, answer = row.content
        return SequenceSample.from_default(
            ids=[row.id],
            seqlens=[len(prompt)],
            data={"packed_prompts": torch.tensor(prompt)},
            metadata={"answer": [answer], "question": [question]},
        )

    def _read(self, fields: dict[str, Any]) -> tuple[str, str]:
        question, answer = text_field(fields, self.question_key), fields.get(self.answer_key)
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            return question, str(answer)
        return question, final_answer(text_field(fields, self.answer_key))


def final_answer(text: str) -> str:
    """`… #### 1,234` → `1234`; a text without `####` is the final answer itself."""
    answer = text.rpartition("####")[2].strip()
    if not answer:
        raise BadRow("nothing follows the last ####")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer) if "####" in text else answer
