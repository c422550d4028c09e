"""The table in which component classes register themselves. `rlcli.registry` loads them by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar, overload

from rlcli.errors import ProjectError

KINDS = ("interfaces", "backends", "datasets")

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
    Components of an installed module are registered under the module's full name."""
    home = cls.__module__
    if home.startswith(f"rlcli.{kind}.") and home.rsplit(".", 1)[1] != module_name(name):
        raise ProjectError(
            f"{home} registers {name!r}, but {kind}/{module_name(name)}.py is "
            f"where {name!r} must live"
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
    _TABLES[kind][name] = cls


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


def _maker(kind: str) -> Callable[..., Any]:
    """Components are loaded by `rlcli.registry`; as that imports this module,
    it is only imported on use."""

    def make_component(cfg: Any, *arguments: Any, **named: Any) -> Any:
        return getattr(importlib.import_module("rlcli.registry"), f"make_{kind}")(
            cfg, *arguments, **named
        )

    make_component.__doc__ = f"The {kind} that an abstraction (`type_`, `args`) describes."
    return make_component


make_interface, make_backend, make_dataset = map(_maker, ("interface", "backend", "dataset"))
register_interface = _registrar("interfaces")
register_backend = _registrar("backends")
register_dataset = _registrar("datasets")
