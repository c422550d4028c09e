"""Problems of a recipe, each with the offending line, a caret,
and the layers that pulled the file in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcli.errors import Problem, RecipeError, escape_control
from rlcli.recipe.parsing.tree import (
    COMMAND_LINE,
    KeyPath,
    MappingNode,
    Mark,
    default_mark,
    dotted,
    is_within,
    key_mark,
    nodes,
)

MAX_SHOWN = 40
WIDTH = 90
"""Most characters of a quoted line."""


@dataclass(frozen=True)
class _Report:
    problem: Problem
    mark: Mark | None
    section: KeyPath
    """The key that it is about, for `withdraw`; empty if it stays."""


class Problems:
    """Collects problems. `sources` maps a file, as named in marks, to its lines."""

    def __init__(self) -> None:
        self._reports: list[_Report] = []
        self._known: set[tuple[str, str | None, str]] = set()
        self.sources: dict[str, list[str]] = {}
        self.pulled_in_by: dict[str, Mark] = {}
        """File → the `extends:` entry or the option that names it."""
        self.written = MappingNode({}, default_mark())
        """All layers merged, references as written."""
        self.layers: dict[str, bool] = {}
        """The files of the layers, lowest first, and whether each came with rlcli."""
        self.values = 0
        """Values read so far, from all layers and overrides."""
        self.unlisted = 0
        """Problems that were counted but not reported, because there were too many."""
        self.is_cut_off = False
        """Whether part of the recipe was not read at all, so that nothing can be said about missing
        keys."""

    @property
    def reported(self) -> list[Problem]:
        """The problems so far, in the order in which they were reported."""
        return [report.problem for report in self._reports]

    def add_source(self, file: str, text: str, pulled_in_by: Mark | None = None) -> None:
        self.sources[file] = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        if pulled_in_by is not None:
            self.pulled_in_by[file] = pulled_in_by

    def add(
        self,
        code: str,
        message: str,
        mark: Mark | None = None,
        hint: str | None = None,
        width: int = 0,
        same: str | None = None,
        about: str | None = None,
        section: KeyPath = (),
    ) -> None:
        """Report a problem. `width`: characters under the caret. Problems with the same `same`
        (default: the text) at one place are one problem,
        even if an interpolation carries it to many keys. `section`: the key that it is about, for
        `withdraw`."""
        where = str(mark) if mark else None
        identity = (code, repr(mark), same or message)
        if identity in self._known:
            return
        self._known.add(identity)
        excerpt = self._excerpt(mark, width) if mark else None
        problem = Problem(code, message, where, hint, excerpt, about)
        self._reports.append(_Report(problem, mark, section))

    def withdraw(self, section: KeyPath) -> None:
        """Take back the problems of a key and those below it: they follow from another problem."""
        self._reports = [
            report
            for report in self._reports
            if not report.section or not is_within(report.section, section)
        ]

    def name_at(self, mark: Mark, of_key: bool = False) -> str | None:
        """The key written at a place, from where a reference may have carried it elsewhere."""
        for path, node in nodes(self.written):
            if (key_mark(self.written, path) if of_key else node.mark) == mark:
                return dotted(path)
        return None

    def has_problem_at(self, mark: Mark) -> bool:
        """Whether a problem was reported at a place."""
        return any(report.mark == mark for report in self._reports)

    def is_below(self, mark: Mark, above: Mark) -> bool:
        """Whether a place is in a layer below that of `above`; the command line is on top."""
        order = [*self.layers, COMMAND_LINE]
        return {mark.file, above.file} <= {*order} and order.index(mark.file) < order.index(
            above.file
        )

    def is_built_in(self, mark: Mark) -> bool:
        """Whether a place is in a layer that came with rlcli."""
        return self.layers.get(mark.file, False)

    def raise_if_any(self) -> None:
        """Raise RecipeError with everything found, in the order of the files' lines."""
        if not self._reports:
            return
        files = list(dict.fromkeys(report.mark.file for report in self._reports if report.mark))

        def position(report: _Report) -> tuple[int, int, int]:
            mark = report.mark
            return (files.index(mark.file), mark.line, mark.column) if mark else (-1, 0, 0)

        ordered = [report.problem for report in sorted(self._reports, key=position)]
        shown = ordered[:MAX_SHOWN]
        if (unshown := len(ordered) - len(shown) + self.unlisted) > 0:
            shown.append(Problem("RECIPE", f"and {unshown} more problems"))
        raise RecipeError(shown)

    def chain(self, file: str) -> list[Mark]:
        """The `extends:` entries from a file up to the recipe itself,
        or to the option that adds it."""
        marks: list[Mark] = []
        while (mark := self.pulled_in_by.get(file)) is not None and mark not in marks:
            marks.append(mark)
            file = mark.file
        return marks

    def _excerpt(self, mark: Mark, width: int) -> str | None:
        lines = self.sources.get(mark.file)
        if mark.is_default or not lines or not 1 <= mark.line <= len(lines):
            return None
        rows = _with_caret(lines, mark, width)
        if chain := self.chain(mark.file):
            rows.append("pulled in by " + ", ".join(m.file_and_line for m in chain))
        return escape_control("\n".join("    " + row for row in rows))


def _with_caret(lines: Sequence[str], mark: Mark, width: int) -> list[str]:
    """The line of a mark and the carets below it; for a file, with its number and the line
    before."""
    line, column = _windowed(lines[mark.line - 1], mark.column)
    size = max(1, min(width or _word_length(line, column), len(line) - column + 1))
    carets = " " * (column - 1) + "^" * size
    if mark.file == COMMAND_LINE:
        return [line, carets]
    number = str(mark.line)
    rows = [f"{number} | {line}", " " * len(f"{number} | ") + carets]
    previous = lines[mark.line - 2] if mark.line >= 2 else ""
    if previous.strip():
        rows.insert(0, f"{mark.line - 1:>{len(number)}} | {_windowed(previous, 1)[0]}")
    return rows


def _windowed(line: str, column: int) -> tuple[str, int]:
    """At most `WIDTH` characters of a line around a column, and the column within them.
    Tabs become spaces."""
    line = line.replace("\t", " ")
    column = min(column, len(line) + 1)
    start = max(0, column - 1 - WIDTH // 2) if len(line) > WIDTH else 0
    return line[start : start + WIDTH], column - start


def _word_length(line: str, column: int) -> int:
    rest = line[column - 1 :]
    for end, character in enumerate(rest):
        if character in ":,]} \"'=" and end:
            return end
    return len(rest) or 1
