"""The building blocks of contract suites: checks described in words, and failures that say why.

A contract is a class whose test methods are the checks; the first line of a method's docstring
describes the check. A check records what to report when it passes: `record_property("note", "max
diff 3e-7")`. pytest runs a subclass as it is, so a component is tested by

    class TestContract(InterfaceContract):
        name = "my-interface"

and `rlcli test` runs the same class without that file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import pytest

from rlcli.api.limits import unmet
from rlcli.project import search_paths_kept
from rlcli.registry import signature

Note = Callable[[str, object], None]
"""pytest's `record_property`."""


class Violation(AssertionError):
    """A component breaks its contract.

    `found`: what was observed, with its number; `cause`: the most common cause, in the imperative;
    `where`: the place to look at, `file:line`.
    """

    def __init__(self, finding: str, cause: str = "", where: str = ""):
        super().__init__("\n".join(line for line in (finding, cause, where) if line))
        self.finding = finding
        self.cause = cause
        self.where = where


class TimeIsUp(BaseException):
    """A check takes too long. Not an Exception, so that no `except Exception` on the way swallows
    it."""


class FailedElsewhere(RuntimeError):
    """An exception from another process, with its traceback there;
    `problem` is all that a report says about it."""

    def __init__(self, problem: str, trace: str):
        super().__init__(f"{problem}\n\n{trace}")
        self.problem = problem


class Contract:
    """Checks of one kind of component. Subclasses set the component's `name` and,
    if needed, `args`."""

    kind: ClassVar[str]
    """As in `rlcli test`: interface, backend, dataset, environment, family or recipe."""
    name: ClassVar[str] = ""
    """The component, as a recipe names it."""
    args: ClassVar[Mapping[str, Any]] = {}
    """Arguments as a recipe would set them under `args:`."""

    @pytest.fixture(autouse=True)
    def _components_stay(self) -> Iterator[None]:
        """Components are searched for once in a check, which builds some of them hundreds of
        times."""
        with search_paths_kept():
            yield


def skip_if(condition: object, reason: str) -> None:
    """Skip the check where this holds."""
    if condition:
        pytest.skip(reason)


def skip_unless(condition: object, reason: str) -> None:
    """Skip the check where this does not hold."""
    skip_if(not condition, reason)


def skip_without_arguments(kind: str, name: str, args: Mapping[str, Any]) -> None:
    """Skip a check of a component that needs arguments which are not given, or whose defaults do
    not meet what its NEEDS demand."""
    described = signature(f"{kind}s", name)
    required = [(argument.name,) for argument in described.arguments if argument.required]
    alternatives = tuple(described.constants.get("ONE_OF", ()))
    defaults = {argument.name: argument.default for argument in described.arguments}
    needed = [names[::-1] for names in unmet(described.needs, defaults.get, defaults.get)]
    choices = [*required, *needed, *([alternatives] if alternatives else [])]
    lacking = [names for names in choices if args.keys().isdisjoint(names)]
    if lacking:
        settings = " ".join(" or ".join(f"{name}=…" for name in names) for names in lacking)
        pytest.skip(f"not tried: needs arguments: rlcli test {kind} {name} {settings}")


def place_of(code: type | Callable[..., Any]) -> str:
    """`file:line` of a component's class or function; empty if it has no source."""
    while isinstance(code, partial):
        code = code.func
    try:
        code = inspect.unwrap(code)
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except (OSError, TypeError):
        return ""
