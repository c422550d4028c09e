"""Checks of a component's declarations, the same for every kind that takes arguments;
it is not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import ValidationError

from rlcli.api.component import module_name
from rlcli.project import is_built_in
from rlcli.registry import COMPUTED, Argument, Signature, load, signature
from rlcli.testing.contract import Contract, Note, Violation, place_of


class DeclaredSubject(Contract):
    """A component whose class is registered under a name,
    and whose fields are the recipe's `args:`."""

    base: ClassVar[type]
    """The base class that it must derive from."""

    def described(self) -> Signature:
        return signature(f"{self.kind}s", self.name)

    def test_registers_under_its_name(self) -> None:
        """registers under its name, read without importing it"""
        described = self.described()
        cls = load(f"{self.kind}s", self.name)
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise Violation(
                f"{cls!r} is not a subclass of {self.base.__name__}",
                "derive the class from it",
                place_of(cls),
            )
        if (described.class_name, module_name(self.name).rpartition(".")[2]) != (
            cls.__name__,
            described.path.stem,
        ):
            raise Violation(
                f"its source registers {described.class_name}, its import {cls.__name__}",
                "register one class, by a plain call at the end of the file",
                f"{described.path}:{described.line}",
            )

    def test_says_what_it_does(self, record_property: Note) -> None:
        """class and arguments are documented, in words"""
        described = self.described()
        unsaid = []
        if not described.doc or described.doc.startswith(f"{described.class_name}("):
            finding = f"{described.class_name} has no docstring"
            unsaid.append(
                Violation(
                    finding,
                    "one line below `class`: `rlcli ls` and `rlcli show` print it",
                    f"{described.path}:{described.line}",
                )
            )
        for argument in _all(described.arguments):
            if not argument.doc:
                finding = f"argument {argument.name} has no docstring"
                cause = "a string on the line below the field: what it does, in which unit"
                unsaid.append(Violation(finding, cause, f"{argument.path}:{argument.line}"))
        self.tell_unsaid(unsaid, record_property)

    def tell_unsaid(self, unsaid: Sequence[Violation], record_property: Note) -> None:
        """Report missing documentation. It breaks nothing,
        so for a user's component it is only a note."""
        if unsaid and is_built_in(self.described().path):
            raise unsaid[0]
        if unsaid:
            first, rest = unsaid[0], f" (and {len(unsaid) - 1} more)" if len(unsaid) > 1 else ""
            record_property("note", f"{first.finding}{rest}: {first.cause}")

    def test_arguments_are_typed(self) -> None:
        """arguments have types that a recipe is checked by"""
        described = self.described()
        assert described.needs is not None  # it raises ProjectError for what cannot be read
        for argument in _all(described.arguments):
            if argument.annotation in ("", "Any", "object", "typing.Any"):
                raise Violation(
                    (
                        f"argument {argument.name} has the type {argument.annotation}: any "
                        "mistake in a recipe would pass"
                    ),
                    "annotate it: int, float, str, bool, Literal[...], list[...], a dataclass",
                    f"{argument.path}:{argument.line}",
                )
        for argument in described.arguments:
            if argument.default is COMPUTED or argument.required:
                continue
            try:
                described.model([argument.name]).model_validate({argument.name: argument.default})
            except ValidationError as error:
                if all(problem["loc"][0] != argument.name for problem in error.errors()):
                    continue  # a different one is required
                raise Violation(
                    (
                        f"the default of argument {argument.name}, {argument.default_text}, is no "
                        f"{argument.annotation}"
                    ),
                    f"a recipe that writes the default is refused ({error.errors()[0]['msg']})",
                    f"{argument.path}:{argument.line}",
                ) from error


def _all(arguments: tuple[Argument, ...]) -> Iterator[Argument]:
    """All arguments, including those of nested dataclasses."""
    for argument in arguments:
        yield argument
        yield from _all(argument.fields)
