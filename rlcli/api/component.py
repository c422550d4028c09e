"""The table in which component classes register themselves. `rlcli.registry` loads them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from rlcli.errors import ProjectError

if TYPE_CHECKING:
    from rlcli.api.config import (
        DatasetAbstraction,
        ModelBackendAbstraction,
        ModelInterfaceAbstraction,
    )
    from rlcli.api.model import ModelBackend, ModelInterface

KINDS = ("interfaces", "backends", "datasets", "environments")

C = TypeVar("C", bound=type)

_TABLES: dict[str, dict[str, type]] = {kind: {} for kind in KINDS}


def module_name(name: str) -> str:
    """The file that holds a component: `my-dataset` lives in `my_dataset.py`."""
    return name.replace("-", "_")


def registered(kind: str) -> dict[str, type]:
    """What the imported component files of a kind have registered so far, by name."""
    return _TABLES[kind]


def register(kind: str, name: str, cls: type) -> None:
    """Register a class under its name; its file must have the same name, and the name must be free.
    Components of an installed module are registered under the module's full name. Raises
    ProjectError."""
    home = cls.__module__
    *folders, file = home.split(".")
    if folders[:1] == ["rlcli"] and kind in folders and file != module_name(name):
        raise ProjectError(
            f"{home} registers {name!r}, but {name!r} must be in {kind}/{module_name(name)}.py"
        )
    if (
        "." in home
        and not home.startswith("rlcli.")
        and home.rpartition(".")[2] == module_name(name)
    ):
        name = home
    taken = _TABLES[kind].get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise ProjectError(
            f"two {kind} are named {name!r}: {taken.__module__} and {cls.__module__}"
        )
    if kind == "interfaces":
        _check_examples(cls)
    _TABLES[kind][name] = cls


def _check_examples(cls: type) -> None:
    """Raise ProjectError for EXAMPLES of a reward that `rlcli test` could not read."""
    from rlcli.api.interface import example_problem

    problem = example_problem(getattr(cls, "EXAMPLES", ()))
    if problem is not None:
        hint = 'for example ({"row": {"answer": "4"}, "right": "It is 4.", "wrong": "5"},)'
        raise ProjectError(f"EXAMPLES of {cls.__name__} {problem}", hint=hint)


def _registrar(kind: str) -> Callable[..., Any]:
    @overload
    def register_component(name: str, cls: C) -> C: ...
    @overload
    def register_component(name: str) -> Callable[[C], C]: ...
    def register_component(name: str, cls: C | None = None) -> C | Callable[[C], C]:
        if cls is not None:
            register(kind, name, cls)
            return cls

        def decorate(decorated: C) -> C:
            register(kind, name, decorated)
            return decorated

        return decorate

    register_component.__doc__ = (
        f"Register one of the {kind}: `register(name, cls)` or as a decorator."
    )
    return register_component


register_interface = _registrar("interfaces")
register_backend = _registrar("backends")
register_dataset = _registrar("datasets")
register_environment = _registrar("environments")


# Code that was written for other frameworks calls these in the module of the contracts. The rooms
# above do the work: the only import upwards, which pyproject.toml allows by name.


def make_interface(cfg: ModelInterfaceAbstraction) -> ModelInterface:
    """`rlcli.registry.make_interface`."""
    from rlcli import registry

    return registry.make_interface(cfg)


def make_backend(cfg: ModelBackendAbstraction) -> ModelBackend:
    """`rlcli.registry.make_backend`."""
    from rlcli import registry

    return registry.make_backend(cfg)


def make_dataset(cfg: DatasetAbstraction, util: Any) -> Any:
    """`rlcli.registry.make_dataset`."""
    from rlcli import registry

    return registry.make_dataset(cfg, util)
