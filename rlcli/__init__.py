"""A recipe toolkit for reinforcement-learning post-training of language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcli.errors import RlcliError as RlcliError
    from rlcli.python.runs import Run as Run
    from rlcli.python.runs import run as run
    from rlcli.python.runs import runs as runs
    from rlcli.python.runs import train as train

__version__ = "0.1.0"

NOT_ON_WINDOWS = "rlcli runs on Linux, macOS or WSL, and not on Windows itself"

_FOR_PYTHON = {
    "RlcliError": "rlcli.errors",
    "Run": "rlcli.python.runs",
    "run": "rlcli.python.runs",
    "runs": "rlcli.python.runs",
    "train": "rlcli.python.runs",
}
"""Name → its module, which is loaded when it is used: what docs/python.md describes."""


def __getattr__(name: str) -> Any:
    if name in _FOR_PYTHON:
        return getattr(import_module(_FOR_PYTHON[name]), name)

    from rlcli.api.elsewhere import attributes_of

    return attributes_of(__name__)(name)


def __dir__() -> list[str]:
    return [*globals(), *_FOR_PYTHON]
