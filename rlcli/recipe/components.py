"""What the source of the components that a recipe names says of them: their arguments, and what
their classes declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rlcli import registry
from rlcli.api.declared_keys import DeclaredKeys, declared_keys
from rlcli.errors import UsageError
from rlcli.recipe.schema import Call, Component


@cache
def signature_of(kind: str, name: str) -> registry.Signature:
    """A component's signature. It is kept without looking whether files have changed,
    until `cache_clear`."""
    return registry.signature(kind, name)


def known_signature(kind: str, name: str) -> registry.Signature | None:
    """A component's signature; None if it cannot be read, which `check_components` reports."""
    try:
        return signature_of(kind, name)
    except UsageError:
        return None


def lacks_method(interface: str, method: str) -> bool:
    """Whether an interface is known not to have a method."""
    signature = known_signature("interfaces", interface)
    return (
        signature is not None and method not in signature.methods and not signature.has_unread_bases
    )


def has_method(kind: str, component: str, method: str) -> bool:
    """Whether a component is known to have an optional method."""
    signature = known_signature(kind, component)
    return signature is not None and method in signature.methods


def declared(kind: str, component: str, constant: str) -> Any:
    """A literal declared in a component's class, such as a dataset's KEYS;
    None if there is none."""
    signature = known_signature(kind, component)
    return signature.constants.get(constant) if signature is not None else None


def declared_mapping(kind: str, component: str, constant: str) -> Mapping[str, Any]:
    """A mapping declared in a component's class; empty if there is none, or something else."""
    declaration = declared(kind, component, constant)
    return declaration if isinstance(declaration, dict) else {}


def declared_of_call(constant: str, call: Call) -> DeclaredKeys | None:
    """What the call's interface declares in a constant such as READS for its method and arguments;
    None: nothing."""
    entries = declared_mapping("interfaces", call.interface.type, constant).get(call.call)
    if not isinstance(entries, tuple | list) or not all(
        isinstance(entry, str) for entry in entries
    ):
        return None

    def argument(name: str) -> Any:
        value = argument_of("interfaces", call.interface, name)
        if value is registry.COMPUTED:
            raise LookupError(name)
        return value

    try:
        return declared_keys(entries, argument)
    except ValueError:
        return None  # `rlcli test interface` reports it


def replaced_interfaces() -> dict[str, Mapping[str, Any]]:
    """Interface of an older format → what replaces it: the interface `by`,
    and what its `REPLACES` says."""
    return {
        older: {"by": name, **how}
        for name in registry.names("interfaces")
        for older, how in declared_mapping("interfaces", name, "REPLACES").items()
    }


def dataset_keys(
    datasets: Mapping[str, Component], name: str | None, asking: tuple[str, ...] = ()
) -> tuple[str, ...] | None:
    """The keys in the rows of one of a recipe's datasets, given its arguments: the tuple `KEYS` in
    its class, or the keys of the datasets named by its argument `KEYS_OF`; None if not declared.
    `asking`: datasets made of this one."""
    if name is None or name in asking:
        return None
    dataset = datasets.get(name, Component(type=name))
    entries = declared("datasets", dataset.type, "KEYS")
    if isinstance(entries, tuple | list):
        try:
            return declared_keys(entries, lambda key: argument_of("datasets", dataset, key)).needed
        except (ValueError, TypeError):
            return None  # `rlcli test dataset` reports it
    keys = [dataset_keys(datasets, source, (*asking, name)) for source in handled_as(dataset)]
    return keys[0] if keys and all(others == keys[0] for others in keys) else None


def holds_pairs(
    datasets: Mapping[str, Component], name: str, asking: tuple[str, ...] = ()
) -> bool | None:
    """Whether a row of one of a recipe's datasets is pairs of sequences, as `PAIRS` in its class,
    or in those of the datasets that it is made of, declares; None if it is not declared."""
    dataset = datasets.get(name, Component(type=name))
    argument = declared("datasets", dataset.type, "PAIRS")
    if argument is not None or name in asking:
        return None if argument is None else bool(argument)
    answers = {holds_pairs(datasets, source, (*asking, name)) for source in handled_as(dataset)}
    return answers.pop() if len(answers) == 1 else None


def handled_as(dataset: Component) -> list[str]:
    """The datasets that the argument `KEYS_OF` of a dataset names: its rows are theirs."""
    argument = declared("datasets", dataset.type, "KEYS_OF")
    named = argument_of("datasets", dataset, argument) if argument else None
    return [named] if isinstance(named, str) else list(map(str, named or ()))


def with_sources(datasets: Mapping[str, Component], name: str) -> tuple[str, ...]:
    """A dataset of the recipe, and those it is made of."""
    names: dict[str, None] = {}
    waiting = [name]
    while waiting:
        next_name = waiting.pop()
        if next_name in datasets and next_name not in names:
            names[next_name] = None
            waiting += sources_of(datasets[next_name])
    return tuple(names)


def sources_of(dataset: Component) -> tuple[str, ...]:
    """The datasets of the recipe that this one is made of:
    the keys of its mapping argument named by `KEYS_OF`."""
    argument = declared("datasets", dataset.type, "KEYS_OF")
    named = dataset.args.get(argument) if argument else None
    return tuple(map(str, named)) if isinstance(named, dict) else ()


def argument_of(kind: str, component: Component, name: str) -> Any:
    """The value of a component's argument: given, or its default;
    None if there is no such argument."""
    if name in component.args:
        return component.args[name]
    argument = argument_named(kind, component.type, name)
    return argument.default if argument is not None else None


def complete_arguments(kind: str, component: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The given arguments of a component and the defaults of all others, in settings that are
    dataclasses, too; `COMPUTED` for what only the component's source knows."""
    signature = known_signature(kind, component)
    return dict(args) if signature is None else _complete(signature.arguments, args)


def _complete(arguments: Sequence[registry.Argument], args: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for argument in arguments:
        value = args.get(argument.name, argument.default)
        if argument.fields and value is registry.COMPUTED:
            value = argument.presets
        is_partial = argument.fields and isinstance(value, Mapping)
        values[argument.name] = _complete(argument.fields, value) if is_partial else value
    return values


def argument_names(kind: str, component: str) -> tuple[str, ...] | None:
    """The names of a component's arguments; None if it is unknown or cannot be read."""
    signature = known_signature(kind, component)
    if signature is None:
        return None
    return tuple(argument.name for argument in signature.arguments)


def has_argument(kind: str, component: str, name: str) -> bool:
    """Whether a component is known to have an argument."""
    return argument_named(kind, component, name) is not None


def argument_named(kind: str, component: str, name: str) -> registry.Argument | None:
    """An argument of a component; None if it has none of that name, or cannot be read."""
    signature = known_signature(kind, component)
    arguments = signature.arguments if signature is not None else ()
    return next((argument for argument in arguments if argument.name == name), None)
