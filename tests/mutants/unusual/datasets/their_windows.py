"""Long texts in windows that overlap: documents for continued pre-training with a short context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._jsonl import Row, text_field
from ._rendering import Overlong, OverlongRow, Tokens, encode_answers, encode_prompts
from ._samples import answered_sample
from ._text_rows import FileRows


@dataclass(frozen=True)
class Excerpt:
    """The origin of a window."""

    text: str
    """The whole text of its row."""
    title: str
    number: int
    """Which of the windows of its row it is, from 1."""
    count: int


@dataclass(frozen=True)
class Window:
    """The tokens of a window."""

    context: Tokens
    """Those that are not trained on: the start token and what the window before has trained on."""
    trained: Tokens

    @property
    def length(self) -> int:
        return len(self.context) + len(self.trained)


@register_dataset("their_windows")
@dataclass(kw_only=True)
class TheirWindows(FileRows):
    """Rows with a `text` of any length, and perhaps a `title`. A row becomes one sample for each
    window of its text, called `<id of the row>#1`, `#2`, ….

    Each window has `window` tokens of the text, the last one of a row perhaps fewer, and begins
    with the last `overlap` tokens of the one before. Every token is trained on exactly once, in the
    first window that has it. The text ends with the end-of-sequence token, which counts as one of
    its tokens; a start token, where the tokenizer has one, precedes each window and does not count.
    The metadata hold the `title`, the number of the window as `part` and how many the text has as
    `parts`.
    """

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "title": "Bread",
            "text": (
                "Weigh flour, water, salt and yeast. Mix them in a bowl until no flour is dry. "
                "Cover the bowl and wait for an hour. Fold the dough four times, and wait again. "
                "Then shape a loaf, let it rise overnight, and bake it in a hot oven until it "
                "sounds hollow. Do not cut it before it is cold."
            ),
        },
        {"title": "Käse", "text": "Ein Käse, zwei Käse.\nKein Käse."},
        {
            "text": (
                "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, "
                "23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40."
            )
        },
    )
    LIMITS: ClassVar[Limits] = {"window": {"ge": 2}, "overlap": {"ge": 0}}

    text_key: str = "text"
    """Field that holds the text."""

    title_key: str = "title"
    """Field that holds the title, if a row has one; it becomes metadata, and is not trained on."""

    window: int = 64
    """Tokens of the text in a window."""

    overlap: int = 8
    """Tokens at the start of a window that the one before has as well."""

    _rows: list[tuple[Row[Excerpt], Window]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.overlap >= self.window:
            raise ValueError(f"overlap is {self.overlap}; it must be below window, {self.window}")
        super().__post_init__()

    def rows_from(self, epoch: int, start: int) -> Iterator[SequenceSample]:
        # a row of the file is several samples, so those before are counted one by one
        return islice(super().rows_from(epoch, 0), start, None)

    def _encoded(self, rows: list[Row[tuple[str, str]]]) -> list[tuple[Row[Excerpt], Window]]:
        (start,) = encode_prompts(self.util.tokenizer, [""], chat=False)
        texts = encode_answers(self.util.tokenizer, [row.content[0] for row in rows])
        excerpts: list[Row[Excerpt]] = []
        windows: list[Window] = []
        for row, tokens in zip(rows, texts, strict=True):
            of_row = self._windows(start, tokens)
            windows += of_row
            excerpts += [
                replace(row, id=f"{row.id}#{number}", content=Excerpt(*row.content, number, count))
                for count in [len(of_row)]
                for number in range(1, count + 1)
            ]
        return self._within_limit(
            excerpts,
            windows,
            prompt=lambda row: "",
            length=lambda window: window.length,
            fit=_fit,
        )

    def _windows(self, start: Tokens, tokens: Tokens) -> list[Window]:
        """The windows of a text; the last one ends where the text does."""
        windows = [Window([*start], tokens[: self.window])]
        for end in range(self.window, len(tokens), self.window - self.overlap):
            new = tokens[end : end + self.window - self.overlap]
            windows.append(Window([*start, *tokens[end - self.overlap : end]], new))
        return windows

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        row, window = self._rows[index]
        excerpt = row.content
        return Preview(
            id=row.id,
            where=row.where,
            sequences=[[*window.context, *window.trained]],
            trained=[[False] * len(window.context) + [True] * len(window.trained)],
            prompt="",
            masked_by="windows that overlap",
            metadata={
                "title": excerpt.title,
                "part": excerpt.number,
                "parts": excerpt.count,
            },
        )

    def _read(self, fields: dict[str, Any]) -> tuple[str, str]:
        title = text_field(fields, self.title_key) if fields.get(self.title_key) else ""
        return text_field(fields, self.text_key), title


def _fit(window: Window, limit: int, overlong: Overlong) -> Window:
    """The last tokens of a window (truncate_left), or its first. Raises OverlongRow if none of
    these would be trained on."""
    if overlong == "truncate_left":
        trained = window.trained[-limit:]
        context = [] if len(trained) == limit else window.context[len(trained) - limit :]
        return Window(context, trained)
    if len(window.context) >= limit:
        raise OverlongRow(f"its first {len(window.context)} tokens are not trained on")
    return Window(window.context, window.trained[: limit - len(window.context)])
