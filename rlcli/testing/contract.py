"""What every contract suite is made of: checks said in words, and failures that say why.

A contract is a class whose test methods are the checks; the first line of a method's docstring is the check in words.
What a check wants said when it passes, it records: `record_property("note", "max diff 3e-7")`.
pytest runs a subclass as it stands, so a component is tested by

    class TestContract(InterfaceContract):
        name = "my-interface"

and `rlcli test` runs the same class without that file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

Note = Callable[[str, object], None]
"""pytest's `record_property`."""


class Violation(AssertionError):
    """A component breaks its contract.

    `found` is what was seen, with its number; `cause` what this most often comes from, in the imperative; `where` the
    place to look at, `file:line`.
    """

    def __init__(self, found: str, cause: str = "", where: str = ""):
        super().__init__("\n".join(line for line in (found, cause, where) if line))
        self.found = found
        self.cause = cause
        self.where = where


class TimeIsUp(BaseException):
    """A check takes too long. No Exception, so that no `except Exception` on the way goes on as if nothing were."""


class FailedElsewhere(RuntimeError):
    """An exception of another process, with the traceback that it had there; `what` is all that a report says of it."""

    def __init__(self, what: str, trace: str):
        super().__init__(f"{what}\n\n{trace}")
        self.what = what


class Contract:
    """Checks of one kind of component. Subclasses give the component's `name` and, where it needs some, `args`."""

    kind: ClassVar[str]
    """As `rlcli test` calls it: interface, backend, dataset, family or recipe."""
    name: ClassVar[str] = ""
    """The component, as a recipe names it."""
    args: ClassVar[Mapping[str, Any]] = {}
    """What a recipe would say under `args:`."""


def place_of(code: type | Callable[..., Any]) -> str:
    """`file:line` of a class or function of a component; empty if it has no source."""
    try:
        code = inspect.unwrap(code)
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return ""
