"""Which checks `rlcli test` runs, and of which component each is."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcli.api.component import module_name
from rlcli.testing.chosen_values import chosen_values
from rlcli.testing.contract import Contract
from rlcli.testing.subjects import KINDS, Subject

LONG = ("long", "exhaustive")
"""Marks of own tests that run with all layouts only."""


class CheckSelection:
    """Chooses from the checks that pytest has collected. The file of a check says of which
    component it is."""

    def __init__(
        self,
        suites: Mapping[Path, Subject],
        values: Mapping[Subject, Any],
        *,
        keyword: str,
        check_seconds: float,
        all_layouts: bool,
    ):
        """`suites`: file with a component's contract → the component; `values`: each one's values
        from the command line; `keyword`: words that selected checks must contain, empty for all;
        `check_seconds`: the time that a check may take; `all_layouts`: try backends in every
        layout, and run own tests that may take long."""
        self._suites = suites
        self._values = values
        self._keyword = keyword
        self._check_seconds = check_seconds
        self._all_layouts = all_layouts
        self._subjects = dict(suites)
        for subject in suites.values():
            for file in subject.own_tests:
                self._subjects.setdefault(file, subject)

    @property
    def subjects(self) -> Collection[Subject]:
        return self._suites.values()

    def has(self, file: Path) -> bool:
        """Whether the checks of a file are those of a component."""
        return file in self._subjects

    def subject_of(self, file: Path) -> Subject:
        """The component that the checks of a file are of."""
        return self._subjects[file]

    def is_suite(self, file: Path) -> bool:
        """Whether a file is the contract of a component, and not its own tests."""
        return file in self._suites

    def choose(self, items: Iterable[pytest.Item]) -> list[pytest.Item]:
        """The checks that run. Their contracts get the values from the command line.

        A full contract in a component's own file replaces the default one; a part of it does not.
        """
        checks = {
            item: self._subjects[item.path]
            for item in items
            if item.path in self._subjects and (self._all_layouts or not self._is_long(item))
        }
        replaced = {
            subject for item, subject in checks.items() if self._replaces_suite(item, subject)
        }
        chosen = [
            item
            for item, subject in checks.items()
            if not self._is_left_out(item, subject, replaced) and matches(item, self._keyword)
        ]
        for contract in {tested_contract(item, checks[item]) for item in chosen} - {None}:
            self._give_values(contract)
        return chosen

    def _is_long(self, item: pytest.Item) -> bool:
        """Whether it is marked so or, in a file that only mentions its component, may take longer
        than a check."""
        if any(item.get_closest_marker(mark) is not None for mark in LONG):
            return True
        timeout = item.get_closest_marker("timeout")
        if timeout is None or item.path == self._subjects[item.path].named_tests:
            return False
        seconds, *_ = (*timeout.args, timeout.kwargs.get("timeout", 0))
        return bool(seconds > self._check_seconds)

    def _replaces_suite(self, item: pytest.Item, subject: Subject) -> bool:
        """Whether it is one of a full contract in the component's own tests."""
        if item.path in self._suites:
            return False
        contract = tested_contract(item, subject)
        return (
            contract is not None
            and issubclass(contract, _contract_for(subject))
            and self._can_take_values(contract, subject)
        )

    def _can_take_values(self, contract: type[Contract], subject: Subject) -> bool:
        """Whether its arguments are a mapping, rather than a fixture, if there are values for
        them."""
        return not self._values.get(subject) or isinstance(contract.args, Mapping)

    def _is_left_out(
        self, item: pytest.Item, subject: Subject, replaced: Collection[Subject]
    ) -> bool:
        """Whether a check is replaced by one of the component's own tests, or in these is that of
        another component or of another part of the contract, or cannot take the values."""
        if item.path in self._suites:
            return subject in replaced
        contract = contract_of(item)
        if contract is None:
            return False
        if _is_about(contract, subject):
            takes_part = _is_in_part(item, subject) and self._can_take_values(contract, subject)
            return not takes_part
        return bool(contract.name)

    def _give_values(self, contract: Any) -> None:
        if self._all_layouts and hasattr(contract, "all_layouts"):
            contract.all_layouts = True
        for subject, values in self._values.items():
            if not _is_about(contract, subject):
                continue
            if subject.kind == "recipe":
                contract.overrides = (*contract.overrides, *values)
            elif isinstance(contract.args, Mapping):  # rather than a fixture
                present = {**contract.args, **values}
                contract.args = {**present, **chosen_values(subject, present)}


def contract_of(item: pytest.Item) -> type[Contract] | None:
    """The contract that an item is a check of; None for any other test."""
    cls = getattr(item, "cls", None)
    return cls if cls is not None and issubclass(cls, Contract) else None


def tested_contract(item: pytest.Item, subject: Subject) -> type[Contract] | None:
    """The contract that an item is a check of, if it is that of a component."""
    contract = contract_of(item)
    return contract if contract is not None and _is_about(contract, subject) else None


def _is_about(contract: type[Contract], subject: Subject) -> bool:
    """Whether a contract is that of a component, by kind and name."""
    kind = KINDS[subject.kind].part_of or subject.kind
    is_of_kind = getattr(contract, "kind", kind) == kind
    return is_of_kind and module_name(contract.name) == module_name(subject.name)


def _contract_for(subject: Subject) -> type[Contract]:
    """The class with all checks of a component."""
    kind = KINDS[subject.kind]
    return getattr(importlib.import_module(kind.module), kind.contract)


def _is_in_part(item: pytest.Item, subject: Subject) -> bool:
    """Whether a check of a full contract belongs to the part that applies to a component."""
    name = getattr(item, "originalname", item.name)
    return not KINDS[subject.kind].part_of or hasattr(_contract_for(subject), name)


def matches(item: pytest.Item, keyword: str) -> bool:
    """Whether a check contains these words, in the report or in its name;
    `or` between them gives alternatives."""
    text = f"{words_of(item)} {item.name}".casefold()
    alternatives = [words.split() for words in keyword.casefold().split(" or ")]
    return any(all(word in text for word in words) for words in alternatives)


def words_of(item: pytest.Item) -> str:
    """A check in words: the first paragraph of its docstring, else its name."""
    doc = getattr(getattr(item, "function", None), "__doc__", None)
    if doc:
        return " ".join(doc.strip().partition("\n\n")[0].split()).rstrip(".")
    return str(getattr(item, "originalname", item.name)).removeprefix("test_").replace("_", " ")
