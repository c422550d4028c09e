"""Rule-based reward: how much of a table is right?"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import Example, ModelInterface, register_interface
from rlcli.api.limits import Limits
from rlcli.errors import DataError

from .rewards._scores import one_each, places_of, rows_of
from .rewards._text import response_texts

if TYPE_CHECKING:
    from rlcli.api.model import Model

Record = dict[str, str]
"""Column → cell; both in the form in which they are compared."""

_RULE = re.compile(r":?-+:?")


@dataclass(frozen=True)
class Table:
    """A table, in the form in which it is compared."""

    columns: list[str]
    records: list[Record]


@dataclass(kw_only=True)
class TableReward(ModelInterface):
    """Compares the last Markdown table in each response with the `table` of its row, `{"columns":
    [names], "rows": [[cells]]}`.

    The cells of the first column name the rows, so that rows, like columns, may come in any order.
    Cells are compared as numbers if both are numbers, else as texts, without regard to case. The
    reward is from 0 to 1: `header_share` of it for having exactly the right columns, the rest in
    proportion to the cells that are right. Where a table has more rows than it should, its share is
    that of the cells of a table with as many rows.
    """

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    EXAMPLES: ClassVar[tuple[Example, ...]] = (
        {
            "row": {
                "table": {
                    "columns": ["City", "Country", "People"],
                    "rows": [["Lima", "Peru", 10000000], ["Oslo", "Norway", 700000]],
                }
            },
            "right": (
                "Here it is:\n\n"
                "| City | Country | People |\n"
                "|---|---|---|\n"
                "| Lima | Peru | 10,000,000 |\n"
                "| Oslo | Norway | 700,000 |\n"
            ),
            "wrong": (
                "| City | Country | People |\n"
                "|---|---|---|\n"
                "| Lima | Chile | 1 |\n"
                "| Rome | Italy | 2 |\n"
            ),
            "rewards": {
                "| people | city | country |\n"
                "|---:|:---|---|\n"
                "| 700000 | Oslo | norway |\n"
                "| 10000000 | Lima | Peru |": 1.0,
                "| City | People |\n|---|---|\n| Oslo | 700000 |\n| Lima | 1 |": 0.4,
                "| City | Country | People |\n"
                "|---|---|---|\n"
                "| Lima | Peru | 10000000 |\n"
                "| Oslo | Norway | 700000 |\n"
                "| Rome | Italy | 2800000 |": 0.7333333,
                "Lima is in Peru, Oslo in Norway.": 0.0,
            },
        },
        {
            "row": {"table": {"columns": ["Prime"], "rows": [["2"], ["3"], ["5"]]}},
            "right": "| Prime |\n|---|\n| 2 |\n| 3 |\n| 5 |",
            "wrong": "| Prime |\n|---|\n| 4 |\n| 6 |\n| 8 |",
        },
    )
    LIMITS: ClassVar[Limits] = {"header_share": {"ge": 0, "le": 1}}

    header_share: float = 0.2
    """Share of the reward that is for the names of the columns."""

    table_key: str = "table"
    """Field of the row that contains its table."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N]. Raises DataError for rows without a
        table."""
        import torch

        rows = zip(rows_of(data), places_of(data), strict=True)
        expected = [self._table_of(row, sample) for row, sample in rows]
        responses = response_texts(model.data_tokenizer, data)
        rewards = [
            self._share(table, _last_table(response))
            for table, response in zip(expected, responses, strict=True)
        ]
        return one_each(data, {"rewards": torch.tensor(rewards, dtype=torch.float32)}, {})

    def _table_of(self, row: Mapping[str, Any], sample: str) -> Table:
        match row.get(self.table_key):
            case {"columns": [_, *_] as columns, "rows": [_, *_] as rows}:
                return _table(columns, rows)
        hint = 'it must be {"columns": [names], "rows": [[cells]]}, neither of them empty'
        raise DataError(f"{sample} has no {self.table_key}", hint=hint, code="F31")

    def _share(self, expected: Table, stated: Table | None) -> float:
        if stated is None:
            return 0.0
        has_header = sorted(stated.columns) == sorted(expected.columns)
        key = expected.columns[0]
        by_name: dict[str | None, Record] = {}
        for record in stated.records:
            by_name.setdefault(record.get(key), record)
        right = sum(
            _are_same(record.get(column), cell)
            for asked in expected.records
            for record in [by_name.get(asked[key], {})]
            for column, cell in asked.items()
        )
        rows = max(len(expected.records), len(stated.records))
        cells = right / (rows * len(expected.columns))
        return self.header_share * has_header + (1 - self.header_share) * cells


def _table(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> Table:
    names = [_compared(name) for name in columns]
    records = [dict(zip(names, map(_compared, cells), strict=False)) for cells in rows]
    return Table(names, records)


def _last_table(response: str) -> Table | None:
    """The last lines of a response that are a table: a header, a rule, and rows."""
    lines = [_cells(line) for line in response.splitlines()]
    rules = [number for number, cells in enumerate(lines) if _is_rule(cells)]
    for number in reversed(rules):
        header = lines[number - 1] if number else None
        if header is None:
            continue
        rows = []
        for cells in lines[number + 1 :]:
            if cells is None:
                break
            rows.append(cells)
        return _table(header, rows)
    return None


def _cells(line: str) -> list[str] | None:
    """The cells of a line of a table; None if it is another line."""
    text = line.strip()
    if len(text) < 2 or not (text.startswith("|") and text.endswith("|")):
        return None
    return text[1:-1].split("|")


def _is_rule(cells: list[str] | None) -> bool:
    return cells is not None and all(_RULE.fullmatch(cell.strip()) for cell in cells)


def _compared(cell: Any) -> str:
    """A cell in the form in which it is compared."""
    return " ".join(str(cell).split()).casefold()


def _are_same(stated: str | None, expected: str) -> bool:
    if stated is None:
        return False
    number, expected_number = _number(stated), _number(expected)
    if number is not None and expected_number is not None:
        return math.isclose(number, expected_number)
    return stated == expected


def _number(cell: str) -> float | None:
    """The number in a cell, in which commas may separate thousands."""
    if not re.fullmatch(r"[-+]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?", cell, re.ASCII):
        return None
    return float(cell.replace(",", ""))


register_interface("their_table", TableReward)
