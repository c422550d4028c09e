"""A dataset under test: built again and again, from various sets of rows."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility, SequenceSample
from rlcli.api.declared_keys import declared_keys
from rlcli.api.preview import preview_of
from rlcli.checkpoint.light_tokenizer import LightTokenizer
from rlcli.errors import RlcliError
from rlcli.recipe.synonyms import SYNONYMS
from rlcli.registry import load, make_dataset, signature
from rlcli.testing.contract import Violation, place_of, skip_if, skip_unless
from rlcli.testing.dataset_checks.first_rows import by_number, reader
from rlcli.testing.dataset_checks.records import Record, first_difference, ids_of, records
from rlcli.testing.failures import line_in
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

MOST_ROWS = 32
"""Rows that the checks use; from a longer file they are spread evenly over it."""

UNLIMITED = 1 << 20
"""For `max_length`: the tests' tokens are bytes, so a limit intended for words would be too
small."""

CHOSEN_BY_CHECKS = ("max_rows", "bad_rows", "max_bad_rows", "overlong")
"""Arguments that checks set to what they examine; only the check of the given file leaves them as
given."""

Line = str | bytes
Row = dict[str, Any]
Rows = Sequence[Row]


@dataclass
class Trial:
    """A dataset by name, with the rows to test it on."""

    name: str
    args: Mapping[str, Any]
    folder: Path
    """For files written by the checks."""
    tokenizer: Any
    given_rows: Rows = ()
    """Rows supplied by the test."""
    rows: list[Row] = field(init=False)
    """The content of the dataset's file; empty if it reads none,
    or one in a format that we do not write."""

    def __post_init__(self) -> None:
        self.cls: Any = load("datasets", self.name)
        self.signature = signature("datasets", self.name)
        self.location = place_of(self.cls)
        tried_on = self.signature.constants.get("TRIED_ON", {})
        self.args = {**tried_on.get("args", {}), **self.args}
        self.datasets = {
            name: DatasetAbstraction(settings["type"], settings.get("args", {}))
            for name, settings in tried_on.get("datasets", {}).items()
        }
        self.file = self.folder / "rows.jsonl"
        self.file_argument = self._file_argument()
        self.reads_file = self.file_argument is not None
        self.rows = self._find_rows() if self.reads_file else []
        if self.given_file and not self.given_rows and not self.accepts(self.rows):
            self.rows = [row for row in self.rows if self.accepts([row])]

    def _file_argument(self) -> str | None:
        """The argument that names its file: `path`, or what other frameworks call it."""
        if self.takes("path"):
            return "path"
        names = self.argument_names
        return next((n for n in names if SYNONYMS.get(n) == "datasets.<name>.args.path"), None)

    @property
    def argument_names(self) -> list[str]:
        """What a recipe may set under its `args:`."""
        return [argument.name for argument in self.signature.arguments]

    @property
    def given_file(self) -> str | None:
        """The file that `args` name."""
        file = self.args.get(self.file_argument or "path")
        return None if file is None else str(file)

    @cached_property
    def keys(self) -> set[str]:
        """The keys its class declares for every sample, with these arguments."""
        defaults = {argument.name: argument.default for argument in self.signature.arguments}
        declared = self.signature.constants.get("KEYS", ())
        return set(declared_keys(declared, {**defaults, **self.args}.__getitem__).needed)

    @cached_property
    def named_rows(self) -> list[Row]:
        """The same rows with ids of their own, if the dataset uses them; otherwise unchanged."""
        named = [{"id": f"own-{number}", **row} for number, row in enumerate(self.rows)]
        expected = [row["id"] for row in named]
        return self._if_ids(named, lambda ids: [*map(str, ids)] == [*map(str, expected)])

    def _if_ids(self, rows: list[Row], fit: Callable[[list[Any]], bool]) -> list[Row]:
        """These rows if the dataset accepts them and the ids of their samples fit; else its
        own."""
        samples = self.accepted(rows)
        return rows if samples is not None and fit(ids_of(samples)) else self.rows

    @cached_property
    def divides_rows(self) -> bool:
        """Whether a row may become several samples."""
        return bool(self.rows) and len(read(self.make())) > len(self.rows)

    @property
    def goes_by_ids(self) -> bool:
        """Whether the samples of `named_rows` have the ids of their rows."""
        return self.named_rows is not self.rows

    @cached_property
    def reader(self) -> str:
        """`file:line` of the method that returns its rows."""
        return place_of(reader(self.demand()))

    def demand_same(
        self,
        expected: Iterable[SequenceSample],
        samples: Iterable[SequenceSample],
        occasion: str,
        cause: str,
        where: str = "",
        by: Callable[[Iterable[SequenceSample]], list[Record]] = records,
    ) -> None:
        """Raise Violation if these samples are not those that were expected; `by`: what of them is
        compared."""
        if mismatch := first_difference(by(expected), by(samples)):
            raise Violation(f"{occasion}, {mismatch}", cause, where or self.location)

    def at_least(self, count: int) -> list[Row]:
        """At least this many rows, with copies if necessary; `rows` if it refuses copies or gives
        them the same ids."""
        if not self.rows or len(self.rows) >= count:
            return self.rows
        copies = _copies((self.rows * count)[:count], "id" in self.rows[0])
        return self._if_ids(copies, lambda ids: len(set(ids)) == len(ids))

    def copies(self, count: int) -> list[Row]:
        """All rows several times, each with an id of its own if samples have the ids of rows."""
        return _copies(self.rows * count, self.goes_by_ids)

    def rows_or_skip(self) -> list[Row]:
        """The rows of its file; skips the check if there are none."""
        reason = "not tried: its file has no JSON lines" if self.reads_file else "reads no file"
        skip_unless(self.rows, reason)
        return self.rows

    def named_rows_or_skip(self) -> list[Row]:
        """Two or more `named_rows`; skips the check if there are fewer."""
        skip_if(len(self.rows_or_skip()) < 2, "not tried: its file has no two JSON lines")
        return self.named_rows

    def takes(self, argument: str) -> bool:
        return argument in self.argument_names

    def demand(self, rows: Rows | None = None, **how: Any) -> Any:
        """The dataset, see `make`; raises Violation if it refuses its input,
        which is then its own fault."""
        try:
            return self.make(rows, **how)
        except RlcliError as error:  # the file it names will be gone when the report is read
            raise Violation(refusal(error), error.hint or "", self.place_in(error)) from error

    def samples(self, rows: Rows | None = None, **how: Any) -> list[SequenceSample]:
        """The first rows of the dataset, in order; raises as `demand`."""
        return read(self.demand(rows, **how))

    def make(
        self,
        rows: Rows | None = None,
        *,
        lines: Sequence[Line] | None = None,
        file: Path | None = None,
        seed: int = 1,
        rank: int = 0,
        ranks: int = 1,
        tokenizer: Any = None,
        changes: Mapping[str, Any] = MappingProxyType({}),
        **args: Any,
    ) -> Any:
        """Build the dataset, from other rows, another file's lines or another file if given.
        `changes`: further arguments, whatever their names. Raises whatever it raises."""
        util = DatasetUtility(
            seed, rank, ranks, suited(tokenizer or self.tokenizer, self.cls), self.datasets
        )
        merged = {**self.args_for(rows, lines=lines, file=file, **args), **changes}
        return by_number(make_dataset(DatasetAbstraction(self.name, merged), util))

    def accepted(self, rows: Rows | None = None, **how: Any) -> list[SequenceSample] | None:
        """The first rows of the dataset, in order; None if it refuses them."""
        try:
            return read(self.make(rows, **how))
        except RlcliError:
            return None

    def accepts(self, rows: Rows, tokenizer: Any = None) -> bool:
        """Whether the dataset can be built from these rows."""
        try:
            self.make(rows, tokenizer=tokenizer)
        except RlcliError:
            return False
        return True

    def make_of_whole_file(self) -> Any:
        """The dataset of all rows in the file that `args` name."""
        return self.make(changes={**self.args, **self._unlimited()})

    def args_for(
        self,
        rows: Rows | None = None,
        *,
        lines: Sequence[Line] | None = None,
        file: Path | None = None,
        **args: Any,
    ) -> dict[str, Any]:
        """The arguments a recipe would give for such a dataset."""
        merged = {key: value for key, value in self.args.items() if key not in CHOSEN_BY_CHECKS}
        merged |= self._unlimited() | args
        if self.rows:
            assert self.file_argument is not None
            file = file or self.write(lines or [as_line(row) for row in rows or self.rows])
            merged[self.file_argument] = str(file)
        return merged

    def _unlimited(self) -> dict[str, int]:
        return {"max_length": UNLIMITED} if self.takes("max_length") else {}

    def write(self, lines: Sequence[Line]) -> Path:
        """Write a file of these lines. Its name is always the same, because ids may contain it."""
        self.file.write_bytes(
            b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
        )
        return self.file

    def place_in(self, error: BaseException) -> str:
        """The last `file:line` in the component that an error passed through."""
        file = Path(str(inspect.getsourcefile(self.cls)))
        return line_in(error, [file.parent]) or self.location

    def _find_rows(self) -> list[Row]:
        if self.given_rows:
            return [dict(row) for row in self.given_rows]
        if self.given_file:
            return rows_in(Path(self.given_file).expanduser())
        examples = self.signature.constants.get("EXAMPLES") or getattr(self.cls, "EXAMPLES", ())
        if not examples:
            raise Violation(
                "it reads a file, but there are no rows to write into one",
                "show two or three rows in the class, EXAMPLES = ({…}, {…}), or give "
                f"{self.file_argument}=FILE",
                self.location,
            )
        return [dict(row) for row in examples]


def suited(tokenizer: Any, cls: type) -> Any:
    """A tokenizer as a run would supply it: transformers',
    unless the dataset declares that it needs less."""
    return tokenizer if hasattr(cls, "preview") else as_transformers(tokenizer)


def needs_template(cls: type) -> bool:
    """Whether its rows are conversations, which only a chat template can render."""
    return bool(getattr(cls, "NEEDS_TEMPLATE", False))


def usual_tokenizer(cls: type) -> LightTokenizer:
    """The one that it is tested with."""
    return byte_tokenizer(chat=needs_template(cls))


def with_values(rows: Rows, change: Callable[[Any], Any]) -> list[Row]:
    """The rows with each of their values changed."""
    return [{name: change(value) for name, value in row.items()} for row in rows]


def _copies(rows: list[Row], have_ids: bool) -> list[Row]:
    numbered = [{**row, "id": f"copy-{number}"} for number, row in enumerate(rows)]
    return numbered if have_ids else rows


def without(row: Row, field: str) -> Row:
    return {name: value for name, value in row.items() if name != field}


def as_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False)


def rows_in(file: Path) -> list[Row]:
    """At most MOST_ROWS rows from a file of JSON lines or with a JSON list;
    none from any other file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        values = json.loads(text) if text.lstrip().startswith("[") else _parsed(text)
    except (OSError, ValueError):
        return []
    rows = [row for row in values if isinstance(row, dict)]
    count = min(len(rows), MOST_ROWS)
    return [rows[number * len(rows) // count] for number in range(count)]


def _parsed(text: str) -> list[Any]:
    values = []
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            values.append(json.loads(line))
    return values


def read(dataset: Any) -> list[SequenceSample]:
    """Its first rows, in order."""
    return [dataset[index] for index in range(shown_rows(dataset))]


def shown_rows(dataset: Any) -> int:
    """Number of rows that the checks use."""
    return min(len(dataset), MOST_ROWS)


def longest_sequence(sample: SequenceSample) -> int:
    """Tokens of its longest sequence; of a sample without tokens, the entries of a key."""
    if not {"packed_prompts", "packed_input_ids"} & sample.keys:
        return max(max(sample.flat_seqlens(key)) for key in sample.keys)
    return max(map(len, preview_of(sample).sequences))


def refusal(error: Exception) -> str:
    """The message with which a dataset refused something."""
    return error.what if isinstance(error, RlcliError) else f"{type(error).__name__}: {error}"
