"""What all datasets read from a file of rows have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from rlcli.api.data import DatasetUtility

from ._jsonl import Row, read_rows
from ._rendering import Tokens, encode_prompts

Content = TypeVar("Content")


@dataclass(kw_only=True)
class TextRows:
    """The file, the chat template, and what to do with rows that are malformed or too long."""

    KEYS: ClassVar[tuple[str, ...]]

    util: DatasetUtility

    path: str
    """A .jsonl file, or a .json file with a list. A field `id`, if every row has one, names the rows."""

    chat: bool | Literal["auto"] = "auto"
    """Put the prompt through the tokenizer's chat template; auto: if it has one."""

    system: str | None = None
    """System prompt."""

    max_length: int = 1024
    """Longest prompt, with its answer if the row has one, in tokens."""

    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """What to do with longer rows; truncate_left shortens the prompt from its start, truncate_right what comes last."""

    bad_rows: Literal["error", "skip"] = "error"
    """What to do with a malformed row."""

    max_bad_rows: int = 10
    """Skip no more malformed rows than this."""

    max_rows: int | None = None
    """Read only so many rows, from the start of the file."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of every sample."""
        return self.KEYS

    def _read_rows(self, parse: Callable[[dict[str, Any]], Content]) -> list[Row[Content]]:
        return read_rows(
            self.path, parse, bad_rows=self.bad_rows, max_bad_rows=self.max_bad_rows, max_rows=self.max_rows
        )

    def _encode_prompts(self, prompts: list[str]) -> list[Tokens]:
        return encode_prompts(self.util.tokenizer, prompts, chat=self.chat, system=self.system)
