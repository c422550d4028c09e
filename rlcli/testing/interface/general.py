"""Checks of what an interface says of itself: no model is run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from rlcli.api.component import module_name
from rlcli.api.interface import ModelInterface
from rlcli.registry import COMPUTED, Argument, load, signature
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.interface.rehearsal import Batches, InterfaceSubject, Make

CALLS = ("train_step", "inference", "generate", "evaluate")
"""The methods that a graph calls."""


class GeneralChecks(InterfaceSubject):
    def test_registers_under_its_name(self) -> None:
        """registers under its name, read without importing it"""
        described = signature("interfaces", self.name)
        cls = load("interfaces", self.name)
        if not (isinstance(cls, type) and issubclass(cls, ModelInterface)):
            raise Violation(f"{cls!r} is no ModelInterface", "derive the class from it", place_of(cls))
        if (described.class_name, module_name(self.name)) != (cls.__name__, described.path.stem):
            raise Violation(
                f"its source registers {described.class_name}, its import {cls.__name__}",
                "register one class, by a plain call at the end of the file",
                f"{described.path}:{described.line}",
            )

    def test_says_what_it_does(self) -> None:
        """class and arguments are documented, in words"""
        described = signature("interfaces", self.name)
        if not described.doc or described.doc.startswith(f"{described.class_name}("):
            raise Violation(
                f"{described.class_name} has no docstring",
                "one line below `class`: `rlcli ls` and `rlcli show` print it",
                f"{described.path}:{described.line}",
            )
        for argument in _all(described.arguments):
            if not argument.doc:
                raise Violation(
                    f"argument {argument.name} has no docstring",
                    "a string on the line below the field: what it does, in which unit",
                    f"{argument.path}:{argument.line}",
                )

    def test_arguments_are_typed(self) -> None:
        """arguments have types that a recipe is checked by"""
        described = signature("interfaces", self.name)
        for argument in _all(described.arguments):
            if argument.annotation in ("Any", "object", "typing.Any"):
                raise Violation(
                    f"argument {argument.name} has the type {argument.annotation}: any mistake in a recipe passes",
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
                    continue  # another one is required
                raise Violation(
                    f"the default of argument {argument.name}, {argument.default_text}, is no {argument.annotation}",
                    f"a recipe that writes the default is refused ({error.errors()[0]['msg']})",
                    f"{argument.path}:{argument.line}",
                ) from error

    def test_declares_the_keys_of_its_calls(self, make: Make) -> None:
        """declares the keys of every call that it has"""
        interface = make()
        own = [call for call in CALLS if getattr(type(interface), call) is not getattr(ModelInterface, call)]
        if not own:
            raise Violation(
                f"{type(interface).__name__} has none of {', '.join(CALLS)}",
                "implement at least one: a graph has nothing to call",
                place_of(type(interface)),
            )
        for call in own:
            if interface.reads(call) is None:
                raise Violation(
                    f"{call} is not in READS: a recipe that forgets one of its keys fails only when it runs",
                    f'READS: ClassVar[Declaration] = {{"{call}": ({_guess(interface, call)})}}',
                    place_of(getattr(type(interface), call)),
                )
        for call in own:
            if call in ("inference", "generate") and interface.writes(call) is None:
                raise Violation(
                    f"{call} is not in WRITES: no recipe knows what it returns",
                    f'WRITES: ClassVar[Declaration] = {{"{call}": ("a_key",)}}',
                    place_of(getattr(type(interface), call)),
                )

    def test_its_training_can_be_tried(self, make: Make, batches: Batches) -> None:
        """a batch can be made with the keys that training reads"""
        step = type(make()).train_step
        if step is ModelInterface.train_step:
            pytest.skip("does not train")
        try:
            batches()
        except ValueError as error:
            file = f"tests/interfaces/test_{module_name(self.name)}.py"
            raise Violation(
                f"no batch can be made for train_step: {error}",
                f"give TestContract in {file} a fixture `batches`, whose value is a function (lengths, seed) -> batch",
                place_of(step),
            ) from error


def _all(arguments: tuple[Argument, ...]) -> Iterator[Argument]:
    """Those of nested dataclasses too."""
    for argument in arguments:
        yield argument
        yield from _all(argument.fields)


def _guess(interface: ModelInterface, call: str) -> str:
    """The strings by which the method's file indexes `.data`, as far as that can be told."""
    try:
        tree = ast.parse(inspect.getsource(inspect.getmodule(getattr(type(interface), call))))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError):
        return '"packed_input_ids",'
    keys = {
        node.slice.value: None
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr in ("data", "seqlens")
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
    }
    return ", ".join(f'"{key}"' for key in ["packed_input_ids", *(k for k in keys if k != "packed_input_ids")]) + ","
