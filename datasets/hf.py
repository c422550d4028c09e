"""Any dataset of rows, local or on the Hub, whatever its columns are called."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Any, ClassVar, Literal

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import Preview, SequenceSample, Survey, register_dataset
from rlcli.errors import DataError
from rlcli.registry import load, make_dataset

from ._jsonl import BadRow
from ._layouts import LAYOUTS, RowColumns, columns_of_row, completion, layout_of, remedy
from ._messages import is_conversation
from ._text_rows import TextRows

Kind = Literal[
    "chat", "paired", "prompt_answer", "math_prompts", "prompt_only", "plain_text", "unpaired"
]

COLUMN = "columns.{field}"
"""The argument that names the column of a field."""

LOOKED_AT = 20
"""Rows read to find the columns, in case the first is bad."""

SHOWN = 8
"""Columns without effect that are named."""


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

    kind: Literal["auto"] | Kind | list[Kind] = "auto"
    """Which dataset handles the rows. auto, or a list: the one among them whose columns they
    have."""

    columns: dict[str, str] = field(default_factory=dict)
    """Field of a row (prompt, answer, question, messages, tools, positive, negative, label), or
    another usual name of it (completion) → the column that holds it, if that has an unusual name;
    `reward_model.ground_truth` is the field of an object. All that are named must belong to the
    same kind of rows."""

    _taken: Any = field(init=False, repr=False)
    """The dataset that handles the rows."""

    def __post_init__(self) -> None:
        kinds = self._kinds
        if not kinds:
            raise ValueError("kind is an empty list; it must name at least one dataset")
        if len(kinds) == 1:
            self._refuse_unknown_fields(kinds[0])
        layout, keys, columns = self._layout(kinds)
        # Without a readable row any of them reports why; the last one needs no chat template.
        kind = layout.kind if layout is not None else kinds[-1]
        cls: Any = load("datasets", kind)
        accepted = {field.name for field in fields(cls) if field.init}
        common = [field.name for field in fields(TextRows) if field.init and field.name in accepted]
        args = {name: getattr(self, name) for name in common}
        del args["util"]
        args["scores"] = self.scores and asdict(self.scores)
        util = replace(self.util, column_argument=COLUMN)
        self._taken = make_dataset(DatasetAbstraction(kind, args | keys), util)
        named = ", ".join(f"{key}: {column or 'null'}" for key, column in keys.items())
        self.notes = [
            f"read as rows of {kind} ({named}){self._unread(columns)}",
            *dict.fromkeys([*self.notes, *self._taken.notes]),
        ]

    @property
    def _kinds(self) -> list[str]:
        if self.kind == "auto":
            return list(dict.fromkeys(layout.kind for layout in LAYOUTS))
        return [self.kind] if isinstance(self.kind, str) else list(self.kind)

    def _refuse_unknown_fields(self, kind: str) -> None:
        layouts = [layout for layout in LAYOUTS if layout.kind == kind]
        unknown = set(self.columns).difference(*(layout.names for layout in layouts))
        if unknown:
            takes = ", ".join(dict.fromkeys(name for layout in layouts for name in layout.usual))
            raise ValueError(f"columns has {', '.join(sorted(unknown))}; {kind} takes {takes}")

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

    def _unread(self, columns: list[str]) -> str:
        """Which columns of the rows have no effect, at the end of a note."""
        read = {"id", *(name.partition(".")[0] for name in self._taken.columns_read)}
        read.update(self._taken.columns_read)
        unread = [column or "one without a name" for column in columns if column not in read]
        shown = ", ".join(unread[:SHOWN]) + (", …" if unread[SHOWN:] else "")
        return f"; columns that are not read: {shown}" if unread else ""

    def _layout(
        self, kinds: list[str]
    ) -> tuple[RowColumns | None, dict[str, str | None], list[str]]:
        """The layout of the first row that has one, the arguments that name its columns, and all
        of its columns; none of a file without a readable row, which reading all rows will report.
        Raises DataError."""
        first = [
            (line, row)
            for _, line, row in islice(self._source().rows(), LOOKED_AT)
            if not isinstance(row, BadRow)
        ]
        for _, row in first:
            columns = columns_of_row(row)
            if (layout := layout_of(columns, kinds, self.columns)) is not None:
                return layout, layout.arguments(columns, self.columns), list(row)
        if first:
            raise self._unclear(*first[0])
        return None, {}, []

    def _unclear(self, line: int, row: dict[str, Any]) -> DataError:
        """The error for a row that none of the datasets can read."""
        kinds, columns = self._kinds, columns_of_row(row)
        nested = _lists_of_objects(row)
        util = replace(self.util, column_argument=COLUMN)
        hint = (
            completion(columns, kinds, self.columns, util.column_setting)
            if self.columns
            else remedy(columns, kinds, util.column_setting)
        )
        if hint is None and nested and len(row) == len(nested):
            hint = f"if {nested[0]!r} is a list of rows, write that list to the file"
        hint = hint or (
            f"name the columns: {util.column_setting('prompt', 'COLUMN')} and so on; set kind too "
            "if that is not enough"
        )
        message = f"the columns of {self.path} are {', '.join(columns) or 'none'}"
        if self.kind != "auto":
            message += f", not those of {' or '.join(kinds)}"
        return DataError(message, where=f"{self.path}:{line}", hint=hint, code="F31")


def _lists_of_objects(row: dict[str, Any]) -> list[str]:
    """The fields that could hold rows instead of messages."""
    return [
        name for name, value in row.items() if isinstance(value, list) and is_conversation(value)
    ]
