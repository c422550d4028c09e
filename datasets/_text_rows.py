"""Shared by all datasets that are read from a file of rows."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from typing import Any, ClassVar, Literal, TypeVar

from rlcli.api.data import DatasetUtility, SequenceSample, Survey
from rlcli.api.declared_keys import declared_keys
from rlcli.api.key_meaning import MESSAGES
from rlcli.api.limits import Limits, check_arguments
from rlcli.errors import DataError

from ._jsonl import BadRow, MissingField, Parsed, Row, read_rows
from ._layouts import closest_nested, remedy, with_nested
from ._messages import Prompt, messages_of, text_of
from ._rendering import (
    Overlong,
    Tokens,
    answer_opening,
    encode_answers,
    encode_prompts,
    fit_answers,
    uses_chat,
    warn_of_open_reasoning,
    within_limit,
)
from ._scores import Scores
from ._sources import RowSource

Content = TypeVar("Content")
T = TypeVar("T")

Answered = tuple[Tokens, list[Tokens]]
"""The tokens of a prompt, and of each of its answers."""

CHUNK = 256
"""Rows of a stream held in memory at once."""

MEDIA = ("image", "audio", "video")
"""What a text says in angle brackets where its row has one in a field of this name, or several."""


@dataclass(kw_only=True)
class FileRows:
    """The file, and how to treat rows that are malformed or too long."""

    KEYS: ClassVar[tuple[str, ...]]
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]]

    util: DatasetUtility

    path: str
    """A file (.jsonl, .json with a list, .csv, .tsv, .parquet, .arrow), a folder of such files or
    one saved by `datasets`, or `hf:NAME` for a dataset on the Hub. If every row has a field `id`,
    it identifies the row."""

    split: str = "train"
    """Which split of a folder or of a Hub dataset; a single file has only this one."""

    config: str | None = None
    """Which configuration of a Hub dataset, if it has several."""

    streaming: bool = False
    """Read rows as they are needed, in the order of the file or the Hub dataset, and keep none of
    them: for data too large to download or keep in memory. A resumed run rereads the rows before
    its position. With `max_rows`: read only that many rows, without downloading the others, and
    keep them, so that they can be shuffled."""

    max_length: int = 1024
    """Maximum length of a row in tokens: of the prompt, including the answer if there is one, or of
    the conversation."""

    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """What to do with longer rows; truncate_left cuts the start of the prompt,
    truncate_right cuts from the end."""

    bad_rows: Literal["error", "skip"] = "error"
    """What to do with a malformed row."""

    max_bad_rows: int = 10
    """Maximum number of malformed rows to skip."""

    max_rows: int | None = None
    """Read at most this many rows, from the start of the file."""

    scores: Scores | None = None
    """Leave out rows that were always or never solved in an earlier run,
    or order them by difficulty."""

    NO_EFFECT_ON_NUMBERS: ClassVar[tuple[str, ...]] = ("streaming",)
    LIMITS: ClassVar[Limits] = {
        "max_length": {"ge": 1},
        "max_bad_rows": {"ge": 0},
        "max_rows": {"ge": 1},
    }

    _rows: list[tuple[Row[Any], Any]] = field(init=False, repr=False)
    """Every row with its tokens, within the limit."""
    _bad_rows: list[str] = field(default_factory=list, init=False, repr=False)
    notes: list[str] = field(default_factory=list, init=False, repr=False)
    """Notes on rows that were left out because of their scores, and on files that are not read."""
    _make_survey: Callable[[], Survey] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_arguments(self)
        if self.is_stream and self.scores is not None:
            raise ValueError(
                "scores choose among all rows, which streaming does not read: set max_rows as well"
            )
        self._rows = [] if self.is_stream else self._all_encoded()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> SequenceSample:
        raise NotImplementedError

    @property
    def is_stream(self) -> bool:
        """Whether rows can only be read forward, by `rows_from`."""
        return self.streaming and self.max_rows is None

    def rows_from(self, epoch: int, start: int) -> Iterator[SequenceSample]:
        """The rows from number `start` on, in storage order, in every epoch. Raises DataError if
        all rows were dropped."""
        position = count = 0
        for rows in self._chunks():
            count += len(rows)
            if not rows or (self.overlong != "drop" and position + len(rows) <= start):
                position += len(rows)  # none of these rows, nor their tokens, is needed
                continue
            chunk = copy.copy(self)
            chunk._rows = self._encoded(rows)
            for index in range(max(0, start - position), len(chunk._rows)):
                yield chunk[index]
            position += len(chunk._rows)
        self._demand_rows(position, count)

    @property
    def columns_read(self) -> list[str]:
        """The columns that arguments such as `prompt_key` name."""
        names = (getattr(self, field.name) for field in fields(self) if field.name.endswith("_key"))
        return [name for name in names if isinstance(name, str)]

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of every sample."""
        return declared_keys(self.KEYS, lambda name: getattr(self, name)).needed

    def digest(self) -> str:
        """Fingerprint of the rows as they are trained on; for a stream, of the first ones."""
        content = hashlib.sha256()
        for row, tokens in self._first_encoded() if self.is_stream else self._rows:
            content.update(repr((row.id, row.content, tokens)).encode())
        return content.hexdigest()

    def survey(self) -> Survey:
        """Lengths and prompts of all rows, including those left out."""
        return self._make_survey()

    def _read(self, fields: dict[str, Any]) -> Any:
        """Parse the content of a row. Raises BadRow."""
        raise NotImplementedError

    def _encoded(self, rows: list[Row[Any]]) -> list[tuple[Row[Any], Any]]:
        """Rows with their tokens, within the limit."""
        raise NotImplementedError

    def _all_encoded(self) -> list[tuple[Row[Any], Any]]:
        """All rows with their tokens, within the limit. Raises DataError if all were dropped."""
        rows = self._chosen_rows()
        encoded = self._encoded(rows)
        self._demand_rows(len(encoded), len(rows))
        return encoded

    def _first_encoded(self) -> list[tuple[Row[Any], Any]]:
        """The rows of the first chunk of a stream of which not all rows are dropped."""
        return next(filter(None, map(self._encoded, filter(None, self._chunks()))), [])

    def _demand_rows(self, remaining: int, count: int) -> None:
        """Raises DataError if none of `count` rows remain because all were too long."""
        if not remaining and self.overlong == "drop":
            message = f"no rows are left: all {count} are longer than max_length = "
            raise DataError(
                f"{message}{self.max_length}",
                where=self.path,
                hint="overlong: drop removed them; raise max_length",
                code="F80",
            )

    def _chosen_rows(self) -> list[Row[Any]]:
        rows = self._read_rows(self._source().rows(), self._bad_rows)
        if self.scores is not None:
            rows, says = self.scores.choose(rows, self.path)
            self.notes.append(says)
        return rows

    def _chunks(self) -> Iterator[list[Row[Any]]]:
        """The rows of a stream, in chunks; at least one chunk. Raises DataError."""
        parsed, bad_rows, number = self._source().rows(), list[str](), 0
        while (chunk := list(islice(parsed, CHUNK))) or number == 0:
            yield self._read_rows(chunk, bad_rows, may_be_empty=number > 0)
            number += 1

    def _read_rows(
        self, parsed: Iterable[Parsed], bad_rows: list[str], may_be_empty: bool = False
    ) -> list[Row[Any]]:
        """The good rows; the faults of the others are appended to `bad_rows`."""
        return read_rows(
            self.path,
            self._read_row,
            bad_rows=self.bad_rows,
            max_bad_rows=self.max_bad_rows,
            skipped=len(bad_rows),
            max_rows=self.max_rows,
            note=bad_rows.append,
            parsed_rows=parsed,
            may_be_empty=may_be_empty,
        )

    def _read_row(self, fields: dict[str, Any]) -> Any:
        """The content of a row. A missing field comes with what to do about it. Raises BadRow."""
        _refuse_media(fields)
        try:
            return self._read(with_nested(fields, self.columns_read))
        except MissingField as missing:
            kind = type(self).__module__.rpartition(".")[2]  # a component has the name of its file
            hint = closest_nested(missing.key, missing.columns) or remedy(
                missing.columns, (kind,), self.util.column_setting
            )
            raise BadRow(str(missing), missing.code, hint) from None

    def _source(self) -> RowSource:
        return RowSource(
            self.path, self.split, self.config, self.streaming, self.util.setting, self.notes.append
        )

    def _within_limit(
        self,
        rows: Sequence[Row[Content]],
        encoded: Sequence[T],
        *,
        prompt: Callable[[Row[Content]], Prompt],
        length: Callable[[T], int],
        fit: Callable[[T, int, Overlong], T],
    ) -> list[tuple[Row[Content], T]]:
        """Rows with their tokens, none longer than `max_length`;
        `prompt` returns a row's prompt."""
        lengths = [length(tokens) for tokens in encoded]  # so that no row is kept as it was before
        self._make_survey = lambda: Survey(
            lengths=lengths,
            prompts=[(row.where, text_of(prompt(row))) for row in rows],
            max_length=self.max_length,
            overlong=self.overlong,
            bad_rows=self._bad_rows,
        )
        return within_limit(
            rows,
            encoded,
            length=length,
            fit=fit,
            max_length=self.max_length,
            overlong=self.overlong,
        )


def _refuse_media(fields: dict[str, Any]) -> None:
    """Raises BadRow for a row whose text refers to an image or the like in another field: without
    that, a model would learn to make things up."""
    for name, value in fields.items():
        medium = name.removesuffix("s")
        if medium not in MEDIA or not value:
            continue
        if any(f"<{medium}>" in str(content) for key, content in fields.items() if key != name):
            raise BadRow(
                f"the text says <{medium}>, and field {name!r} has what is meant; only texts can "
                "be read"
            )


@dataclass(kw_only=True)
class TextRows(FileRows):
    """Rows whose prompt is a text, which the chat template puts into a user message, or a list of
    messages."""

    chat: bool | Literal["auto"] = "auto"
    """Apply the tokenizer's chat template to the prompt; auto: if there is one."""

    system: str | None = None
    """System prompt."""

    def _encode_prompts(self, prompts: list[Prompt]) -> list[Tokens]:
        return encode_prompts(self.util.tokenizer, prompts, chat=self.chat, system=self.system)

    def _encode_answers(self, rows: list[Row[Any]], answers: Sequence[str]) -> list[Tokens]:
        """The tokens of answers to these rows, whose content begins with a prompt."""
        tokenizer = self.util.tokenizer
        if not rows:
            return []
        prompt, chat, system = rows[0].content[0], self.chat, self.system
        warn_of_open_reasoning(tokenizer, prompt, answers, chat=chat, system=system)
        opening = answer_opening(tokenizer, prompt, chat=chat, system=system)
        return [[*opening, *ids] for ids in encode_answers(tokenizer, answers)]

    def _answered(
        self, rows: list[Row[Any]], answers: Sequence[Sequence[str]]
    ) -> list[tuple[Row[Any], Answered]]:
        """Rows whose content begins with a prompt, with the tokens of the prompt and of each of
        these answers to it, within the limit."""
        texts = list(chain.from_iterable(answers))
        tokens = iter(self._encode_answers(rows, texts))
        tokens_of_answers = [[next(tokens) for _ in group] for group in answers]
        prompts = self._encode_prompts([row.content[0] for row in rows])
        return self._within_limit(
            rows,
            list(zip(prompts, tokens_of_answers, strict=True)),
            prompt=lambda row: row.content[0],
            length=lambda encoded: len(encoded[0]) + max(map(len, encoded[1])),
            fit=lambda encoded, limit, overlong: fit_answers(*encoded, limit, overlong),
        )

    def _about(self, row: Row[Any], prompt: Prompt) -> dict[str, Any]:
        """The fields that every `Preview` of a row has in addition to its tokens."""
        return {
            "id": row.id,
            "where": row.where,
            "prompt": text_of(prompt),
            "messages": messages_of(prompt, self.system),
            "system": self.system,
            "chat": uses_chat(self.util.tokenizer, self.chat),
        }

    def _conversation(self, prompt: Prompt) -> dict[str, Any]:
        """The metadata with which a sample's prompt can be rendered again."""
        is_chat = uses_chat(self.util.tokenizer, self.chat)
        return {MESSAGES: messages_of(prompt, self.system)} if is_chat else {}
