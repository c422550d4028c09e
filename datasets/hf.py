"""Any dataset of rows, local or on the Hub, whatever its columns are called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, ClassVar, Literal

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import Preview, SequenceSample, Survey, register_dataset
from rlcli.errors import DataError
from rlcli.registry import load, make_dataset

from ._jsonl import BadRow
from ._text_rows import TextRows

FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "chat": {"messages": ("messages", "conversations")},
    "paired": {
        "prompt": ("prompt",),
        "positive": ("pos_answers", "chosen"),
        "negative": ("neg_answers", "rejected"),
    },
    "prompt_answer": {
        "prompt": ("prompt", "instruction"),
        "answer": ("answer", "completion", "response", "output"),
    },
    "math_prompts": {"question": ("question", "problem"), "answer": ("answer", "solution")},
    "prompt_only": {"prompt": ("prompt", "question", "problem", "instruction")},
}
"""Kind of row → the fields it needs, and the columns that usually hold them. The first kind with
its columns wins."""

OPTIONAL = {"chat": ("tools",)}
"""Optional fields of some kinds, used if rows have them."""

LOOKED_AT = 20
"""Rows read to find the columns, in case the first is bad."""


@register_dataset("hf")
@dataclass(kw_only=True)
class HuggingFace(TextRows):
    """Rows of a file, a folder or the Hub, handled like those of `chat`, `paired`,
    `prompt_answer`, …."""

    KEYS_OF: ClassVar[str] = "kind"
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "completion": "4"},
        {"prompt": "Translate into German: good morning", "completion": "Guten Morgen!"},
        {"prompt": "Name two colours.\nOne on each line.", "completion": "red\nblue"},
    )

    kind: Literal["auto", "chat", "paired", "prompt_answer", "math_prompts", "prompt_only"] = "auto"
    """Which dataset handles the rows; auto: the first of these whose columns they have."""

    columns: dict[str, str] = field(default_factory=dict)
    """Field of a row (prompt, answer, question, messages, tools, positive, negative) → the column
    that holds it, if that has an unusual name."""

    _taken: Any = field(init=False, repr=False)
    """The dataset that handles the rows."""

    def __post_init__(self) -> None:
        columns = self._columns()
        kind = self._kind_of(columns) if self.kind == "auto" else self.kind
        unknown = set(self.columns) - {*FIELDS[kind], *OPTIONAL.get(kind, ())}
        if unknown:
            raise ValueError(
                f"columns has {', '.join(sorted(unknown))}; {kind} takes {', '.join(FIELDS[kind])}"
            )
        keys = {
            f"{name}_key": column for name, column in (_usual(kind, columns) | self.columns).items()
        }
        cls: Any = load("datasets", kind)
        accepted = {field.name for field in fields(cls) if field.init}
        common = [field.name for field in fields(TextRows) if field.init and field.name in accepted]
        args = {name: getattr(self, name) for name in common}
        del args["util"]
        args["scores"] = self.scores and asdict(self.scores)
        self._taken = make_dataset(DatasetAbstraction(kind, args | keys), self.util)
        self.notes = self._taken.notes

    @property
    def keys(self) -> tuple[str, ...]:
        return self._taken.keys

    @property
    def is_stream(self) -> bool:
        return self._taken.is_stream

    def rows_from(self, epoch: int, start: int) -> Iterator[SequenceSample]:
        return self._taken.rows_from(epoch, start)

    def __len__(self) -> int:
        return len(self._taken)

    def __getitem__(self, index: int) -> SequenceSample:
        return self._taken[index]

    def preview(self, index: int) -> Preview:
        return self._taken.preview(index)

    def survey(self) -> Survey:
        return self._taken.survey()

    def digest(self) -> str:
        return self._taken.digest()

    def _columns(self) -> list[str]:
        """Columns of the first readable row; none if there is no such row,
        which reading all rows will report."""
        first = islice(self._source().rows(), LOOKED_AT)
        return next((list(row) for _, _, row in first if not isinstance(row, BadRow)), [])

    def _kind_of(self, columns: list[str]) -> str:
        for kind, needed in FIELDS.items():
            if set(needed) == {*_usual(kind, columns), *(set(self.columns) & set(needed))}:
                return kind
        if not columns:
            return "prompt_only"
        raise DataError(
            (
                f"the columns of {self.path} are {', '.join(columns)}: what its rows are "
                "does not follow from them"
            ),
            hint=(
                "say which hold what, columns: {prompt: …, answer: …}, and "
                "kind if that is not enough"
            ),
            code="F31",
        )


def _usual(kind: str, columns: list[str]) -> dict[str, str]:
    """Field of this kind of row → the column that holds it under a usual name."""
    present = {
        name: [column for column in usual if column in columns]
        for name, usual in FIELDS[kind].items()
    }
    return {name: candidates[0] for name, candidates in present.items() if candidates}
