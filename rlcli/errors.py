"""Every error a user can meet: one tree, each class with its exit code.

RlcliError                 1  a bug in rlcli unless a subclass says otherwise
├── UsageError             2  the command line
│   ├── RecipeError        2  the recipe, with file:line:col; holds every problem found
│   ├── ProjectError       2  the folders that hold components
│   └── UnknownComponent   2  a name nobody registered
├── DataError              4  a dataset is missing, empty, malformed
├── ModelError             5  a model, tokenizer or checkpoint is missing or does not fit
│   └── NoWholeCheckpoint  5  a run has made progress that it cannot continue from
├── ResourceError          6  lock, disk, port, permission, too few devices, a missing library
├── WorkerError            7  a rank or a server died
├── HangError              8  a deadline passed
├── NumericError           9  a non-finite value stopped the run
└── Stopped               75  asked to stop; stopped at a step boundary with everything committed
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class RlcliError(Exception):
    """Base of every error that reaches a user; renders as one line.

    `code` is the stable id that tests and search engines rely on; `where` is `file:line:col` for
    recipes, `file:line` for datasets, `rank N pid P` for workers.
    """

    exit_code = 1
    code = "BUG"

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        code: str | None = None,
    ):
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return render(self.code, self.what, self.where, self.hint)


LONGEST = 4_000
"""Maximum characters of one error."""


def render(code: str, message: str, where: str | None, hint: str | None) -> str:
    """`error[<ID>] <where>: <what>. hint: <next action>`, control characters escaped."""
    location = f" {where}" if where else ""
    message = message.rstrip(".")
    if len(message) > LONGEST:  # a value of a hostile file may be megabytes long
        message = f"{message[: LONGEST // 2]} … {message[-LONGEST // 2 :]}"
    advice = f"{' ' if message.endswith('?') else '. '}hint: {hint}" if hint else ""
    return escape_control(f"error[{code}]{location}: {message}{advice}")


def escape_control(text: str) -> str:
    """Make text from files, models and peers safe to print:
    no control character reaches a terminal."""
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode()


class PrintableRecord(logging.LogRecord):
    """A record of a log whose message is safe to print, whatever names it contains: those of
    tensors and rows are chosen by whoever has published them."""

    def getMessage(self) -> str:
        return escape_control(super().getMessage())


def log_printably() -> None:
    """From now on all that this process logs, libraries included, is safe to print."""
    logging.setLogRecordFactory(PrintableRecord)


def printable_traceback(error: BaseException) -> str:
    """The traceback of an error, safe to print."""
    return escape_control("".join(traceback.format_exception(error)).rstrip("\n"))


def first_line(error: BaseException) -> str:
    """The message of another library's error, on one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


_PLAIN = str.maketrans({
    "·": "-", "→": "->", "←": "<-", "↔": "<->", "…": "...", "×": "x", "─": "-", "━": "-", "│": "|",
    "└": "`", "├": "|", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "±": "+-", "▐": "[", "▌": "]",
    "⏎": "/", "η": "eta", "²": "^2", "✓": "ok", "✗": "x", "■": "#", "□": "o", "○": "o",
    "█": "#",
})  # fmt: skip


def in_signs_of(encoding: str | None, text: str) -> str:
    """The text in characters that an encoding has: ours have a plain form,
    any others are written as escapes."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    return text


class UsageError(RlcliError):
    exit_code = 2
    code = "USAGE"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a recipe."""

    code: str
    what: str
    where: str | None = None
    hint: str | None = None
    excerpt: str | None = None
    """The offending line with a caret, ready to print."""
    about: str | None = None
    """The section or the component whose keys it concerns, which `rlcli show` lists."""

    def __str__(self) -> str:
        line = render(self.code, self.what, self.where, self.hint)
        return f"{line}\n{self.excerpt}" if self.excerpt else line


class RecipeError(UsageError):
    """All problems of a recipe, reported together."""

    code = "RECIPE"

    def __init__(self, problems: Sequence[Problem]):
        first = problems[0]
        super().__init__(first.what, where=first.where, hint=first.hint, code=first.code)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class Errors(RlcliError):
    """Several errors that were found together; the exit code is that of the first."""

    def __init__(self, errors: Sequence[RlcliError]):
        first = errors[0]
        super().__init__(first.what, where=first.where, hint=first.hint, code=first.code)
        self.exit_code = first.exit_code
        self.problems = tuple(errors)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def raise_all(errors: Iterable[RlcliError]) -> None:
    """Raise what was found, if anything: one error as it is,
    several as one report without duplicates."""
    unique: dict[str, RlcliError] = {}
    for error in errors:
        for problem in error.problems if isinstance(error, Errors) else (error,):
            unique.setdefault(str(problem), problem)
    if len(unique) == 1:
        raise next(iter(unique.values()))
    if unique:
        raise Errors(list(unique.values()))


class ProjectError(UsageError):
    code = "PROJECT"


class UnknownComponent(UsageError):
    code = "R70"


class DataError(RlcliError):
    exit_code = 4
    code = "DATA"


class ModelError(RlcliError):
    exit_code = 5
    code = "MODEL"


class NoWholeCheckpoint(ModelError):
    """A run has made progress that it cannot continue from."""


class ResourceError(RlcliError):
    exit_code = 6
    code = "RESOURCE"


class WorkerError(RlcliError):
    exit_code = 7
    code = "WORKER"


class HangError(RlcliError):
    exit_code = 8
    code = "HANG"


class NumericError(RlcliError):
    exit_code = 9
    code = "NUMERIC"


class Stopped(RlcliError):
    exit_code = 75
    code = "STOPPED"


def as_document(error: RlcliError) -> dict[str, Any]:
    """An error as JSON, for a program that runs a command."""
    problems = error.problems if isinstance(error, RecipeError | Errors) else (error,)
    return {
        "ok": False,
        "exit_code": error.exit_code,
        "error": type(error).__name__,
        "problems": [
            {
                "code": problem.code,
                "where": problem.where,
                "what": problem.what,
                "hint": problem.hint,
                "excerpt": getattr(problem, "excerpt", None),
            }
            for problem in problems
        ],
    }


def from_document(document: Mapping[str, Any]) -> RlcliError:
    """The error that `as_document` describes. One whose class is not in this file is of the class
    here that has its exit code."""
    problems = [Problem(**problem) for problem in document["problems"]]
    if document["error"] == RecipeError.__name__:
        return RecipeError(problems)
    kind = _BY_EXIT_CODE.get(document["exit_code"], RlcliError)
    errors = [kind(p.what, where=p.where, hint=p.hint, code=p.code) for p in problems]
    error = errors[0] if len(errors) == 1 else Errors(errors)
    error.exit_code = document["exit_code"]
    return error


_BY_EXIT_CODE = {
    kind.exit_code: kind
    for kind in (
        UsageError,
        DataError,
        ModelError,
        ResourceError,
        WorkerError,
        HangError,
        NumericError,
        Stopped,
    )
}
