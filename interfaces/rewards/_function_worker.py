"""A process that calls a user's function for model responses. Started by `function_reward`,
as a script."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlcli.interfaces.rewards._worker import Broken, Work, serve

LARGEST = 3.4028234e38
"""Largest number that fits into a float32."""
ERROR = {"error", "traceback", "where"}
"""What describes an exception."""
LONGEST = 3000
"""Characters kept of a traceback; its end says most."""


def prepare(settings: dict[str, Any]) -> Work:
    os.chdir(settings["folders"][0])
    try:
        function = loaded(settings["path"], settings["function"], settings["folders"])
        arguments = Arguments(function)
    except BaseException as problem:
        raise Broken(f"{type(problem).__name__}: {problem}", **cause_in(problem)) from problem
    cause_of = partial(cause_in, otherwise=definition_of(function))

    def work(task: dict[str, Any]) -> dict[str, Any]:
        row = task["row"]
        if lacking := [name for name in arguments.needed if name not in row]:
            return {"lacks": lacking, "row": list(row)}
        try:
            return {"value": number(function(**arguments.chosen(row)))}
        except MemoryError:
            return {"limit": "memory"}
        except BaseException as problem:  # SystemExit too: a function must not end its process
            return {"error": f"{type(problem).__name__}: {problem}", **cause_of(problem)}

    return work


def is_reply(message: dict[str, Any]) -> bool:
    """Whether `work` could have produced this reply; a function may write to descriptors that are
    not its own."""
    message = dict(message)
    if not isinstance(message.pop("printed", ""), str):
        return False
    if "value" in message:
        value = message["value"]
        return isinstance(value, float) and math.isfinite(value) and abs(value) <= LARGEST
    if "lacks" in message:
        return all(
            isinstance(names, list) and all(isinstance(name, str) for name in names)
            for names in message.values()
        )
    texts = {name: value for name, value in message.items() if value is not None}
    return all(isinstance(text, str) for text in texts.values()) and set(message) in (
        {"limit"},
        ERROR,
    )


class Arguments:
    """Passes a function what its parameter names request of a response and its row."""

    def __init__(self, function: Callable[..., Any]):
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.needed = [p.name for p in named if p.default is p.empty]
        self.names = {p.name for p in named}

    def chosen(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if self.takes_all or name in self.names}


def loaded(path: str | None, name: str, folders: list[str]) -> Callable[..., Any]:
    """Load `score` from the file `path`, or `package.module:score` from one of the folders."""
    module_name, _, function = name.rpartition(":")
    if path is None:
        sys.path[:0] = folders
        module = importlib.import_module(module_name)
    else:
        sys.path.insert(0, str(Path(path).parent))
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    value = getattr(module, function)
    if not callable(value):
        raise TypeError(f"{function} is {value!r}, not a function")
    return value


def number(value: Any) -> float:
    """The function's return value, if it is a number that can be trained on."""
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        raise TypeError(f"it returned {value!r:.60}, which is not a number")
    score = float(value)
    if not math.isfinite(score) or abs(score) > LARGEST:
        raise ValueError(f"it returned {score}, which is not a finite float32")
    return score


def cause_in(problem: BaseException, otherwise: str | None = None) -> dict[str, Any]:
    """The traceback starting at the user's code, and its innermost location there; `otherwise`:
    the location if it was not raised there, as what a function returned is wrong."""
    frames = traceback.extract_tb(problem.__traceback__)
    users = [
        frame
        for frame in frames
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    lines = [*traceback.format_list(users), *traceback.format_exception_only(problem)]
    if len(lines) == 1:  # no more than the error itself
        lines = []
    where = f"{users[-1].filename}:{users[-1].lineno}" if users else otherwise
    if isinstance(problem, SyntaxError) and problem.filename:
        where = f"{problem.filename}:{problem.lineno}"
    return {"traceback": "".join(lines)[-LONGEST:].rstrip(), "where": where}


def definition_of(function: Callable[..., Any]) -> str | None:
    """File and line of a function that is written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


if __name__ == "__main__":
    serve(prepare, is_reply)
