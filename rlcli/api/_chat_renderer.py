"""A process that renders chat templates: JSON lines in, JSON lines out.
Started by `chat_template`, as a script.

A template is third-party code. jinja2's sandbox keeps it from calling anything harmful, but not
from looping forever or filling the memory; the limits of a process do. Time is processor time, so
that the outcome does not depend on the load of the machine.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import sys
from datetime import date, datetime
from functools import lru_cache
from typing import Any

from rlcli.processes import isolate

MEMORY_BYTES = 512 << 20
LONGEST = 16 << 20
"""Longest rendered conversation, in characters."""
NONCE = secrets.token_hex(8)
"""Unknown to the authors of templates and messages, so that nobody can forge a mark."""
OPEN, CLOSE = f"\x02{NONCE}\x02", f"\x03{NONCE}\x03"
"""Enclose what a template marks as written by the assistant, until the text is complete."""
LIMITS: dict[type[Exception], str] = {
    MemoryError: f"it needs more than {MEMORY_BYTES >> 20} MiB of memory",
    RecursionError: "it calls itself too deeply",
    OverflowError: "it uses a number or a range that is too large",
}


class TooLong(ValueError):
    """The text that a template writes is too long."""


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else may mix with the replies
    for line in sys.stdin.buffer:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, task["limit_s"])
        try:
            text, spans = rendered(**task["conversation"])
            message: dict[str, Any] = {"text": text, "spans": spans}
        except (MemoryError, RecursionError, OverflowError) as problem:
            message = {"error": LIMITS[type(problem)], "limit": True}
        except TooLong as problem:
            message = {"error": str(problem), "limit": True}
        except Exception as problem:  # whatever a template makes jinja2 raise
            message = {"error": f"{type(problem).__name__}: {problem}"[:2000], "limit": False}
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(message) + "\n")
        replies.flush()


def rendered(
    template: str, day: str | None, variables: dict[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """The text, and [start, end) in characters of each part that the template marks as
    generated."""
    text: list[str] = []
    length = 0
    for piece in _compiled(template, day).generate(**variables):
        text.append(piece)
        length += len(piece)
        if length > LONGEST:
            raise TooLong(f"it writes more than {LONGEST >> 20} million characters")
    marked = "".join(text)
    marked.encode()  # raises an error for half of a surrogate pair, which no tokenizer reads
    return _without_marks(marked)


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks, and the spans between them; of nested marks,
    the outermost count."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = depth = start = 0
    for piece in re.split(f"({OPEN}|{CLOSE})", marked):
        if piece == OPEN:
            start = start if depth else length
            depth += 1
        elif piece == CLOSE:
            depth -= 1
            if not depth and length > start:
                spans.append((start, length))
        else:
            parts.append(piece)
            length += len(piece)
    return "".join(parts), spans


@lru_cache(maxsize=8)
def _compiled(template: str, day: str | None) -> Any:
    """The template in an environment where it can only call what transformers offers it."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %} … {% endgeneration %}` renders what it encloses, between marks."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(
                line
            )

        def _render(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    class Namespace(jinja2.utils.Namespace):
        """A namespace without names that lead into Python's internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            names = dict(*args, **kwargs)
            for name in names:
                _refuse_private(name)
            jinja2.utils.Namespace.__init__(self, names)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

    clock = datetime.now() if day is None else date.fromisoformat(day)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": clock.strftime,
        "dict": _Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(template)


class _Dict:
    """`dict` as a template may use it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _refuse_private(name: Any) -> None:
    from jinja2.exceptions import SecurityError

    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not set {name!r} on a namespace")


if __name__ == "__main__":
    isolate(parent=int(sys.argv[1]), memory_bytes=MEMORY_BYTES)
    serve()
