"""Whose fault it is that a batch is unusable: that of a component, of a row, or ours."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlcli import registry
from rlcli.api.dataflow import MFCDef
from rlcli.errors import DataError, NumericError, ProjectError, RlcliError
from rlcli.project import is_built_in
from rlcli.recipe.schema import Recipe

CODE = "F54"


class Origin(Protocol):
    """Turns a fault in a batch into the error shown to the user."""

    def malformed(self, problem: str) -> RlcliError:
        """The batch cannot be read as what it should be; `problem` continues a sentence: `gave
        rewards of shape …`."""

    def not_finite(self, problem: str) -> RlcliError:
        """The batch holds a number that is not finite."""

    def describe(self, id_: Hashable) -> str:
        """How to find a sample: `row-17 (row 17 of dataset train)`."""


@dataclass(frozen=True)
class CallOrigin:
    """A call of the graph.

    A user's component is at fault for what it returns, but for a number that is not finite only if
    it computes without a model. Where there is a model, its weights may be the cause, as with a
    loss that is not finite.
    """

    call: str
    component: str
    """`interface my_reward`, and the backend if that is the user's."""
    method: str
    where: str | None
    """File and line of the user's component; None if everything involved is built in."""
    has_model: bool
    describe: Callable[[Hashable], str]

    def malformed(self, problem: str) -> RlcliError:
        message = f"call {self.call}: {self.method} of {self.component} {problem}"
        if self.where is None:
            return RlcliError(
                message,
                hint="this is a bug in rlcli, not in the recipe: please report it",
                code=CODE,
            )
        hint = f"rlcli test {self.component.partition(' with ')[0]} tries it alone"
        return ProjectError(message, where=self.where, hint=hint, code=CODE)

    def not_finite(self, problem: str) -> RlcliError:
        if self.where is not None and not self.has_model:
            return self.malformed(problem)
        return NumericError(
            (
                f"call {self.call}: {self.method} of {self.component} {problem}; "
                "nothing was trained on it"
            ),
            where=self.where,
            hint=(
                "check this sample; if its model has just been trained, its weights may have "
                "diverged: go back to a checkpoint and lower the learning rate"
            ),
            code=CODE,
        )


@dataclass(frozen=True)
class RowOrigin:
    """A row of a dataset."""

    dataset: str
    row: int
    """Counted from 0; messages count from 1, as lines do."""

    def malformed(self, problem: str) -> RlcliError:
        return DataError(f"row {self.row + 1} of dataset {self.dataset} {problem}", code="F31")

    not_finite = malformed

    def describe(self, id_: Hashable) -> str:
        return str(id_)


def origin_of_call(
    recipe: Recipe,
    mfc: MFCDef,
    interface: Any,
    has_model: bool,
    describe: Callable[[Hashable], str],
) -> CallOrigin:
    """The origin of a call. It searches the folders of components,
    so make it once per call of a graph."""
    section = recipe.models[mfc.model_name].backend
    backend = section.type if section is not None else None
    method, name = mfc.interface_type.value, mfc.interface_impl.type_
    component = f"interface {name}"
    where = _line_in_user_file("interfaces", name, getattr(type(interface), method, None))
    backend_file = _line_in_user_file("backends", backend) if backend is not None else None
    if backend_file is not None:
        component += f" with backend {backend}"
    return CallOrigin(mfc.name, component, method, where or backend_file, has_model, describe)


def _line_in_user_file(kind: str, name: str, function: Any = None) -> str | None:
    """File and line of a component that is not built in."""
    path = registry.path_of(kind, name)
    if is_built_in(Path(path).parent):
        return None
    code = getattr(function, "__code__", None)
    return (
        f"{path}:{code.co_firstlineno}"
        if code is not None and Path(code.co_filename) == Path(path)
        else str(path)
    )
