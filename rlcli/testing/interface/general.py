"""Checks of an interface's declarations; no model is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlcli.api.interface import ModelInterface
from rlcli.testing.contract import Note, Violation, place_of, skip_unless
from rlcli.testing.declaration import DeclaredSubject
from rlcli.testing.interface.training_trial import (
    Batches,
    InterfaceSubject,
    Make,
    keys_in_source,
    overrides,
    place_of_call,
    untried,
)

CALLS = ("train_step", "inference", "generate", "evaluate")
"""The methods that a graph calls."""

DECLARATIONS = ("READS", "WRITES", "DROPS", "NEEDS_GROUP", "COUNTS_LEFT_OUT", "HEAD", "TAKES_BATCH")
"""Constants whose entries are for calls."""


class GeneralChecks(DeclaredSubject, InterfaceSubject):
    base = ModelInterface

    def test_declares_the_keys_of_its_calls(self, make: Make, record_property: Note) -> None:
        """declares the keys of every call that it has"""
        interface = make()
        calls = [call for call in CALLS if overrides(interface, call)]
        if not calls:
            raise Violation(
                f"{type(interface).__name__} has none of {', '.join(CALLS)}",
                "implement at least one: a graph has nothing to call",
                place_of(type(interface)),
            )
        self._require_calls_in_declarations(interface)
        self._require_group_sizes(interface, calls)
        computed = [] if self.described().has_unread_bases else [*self._computed(interface, calls)]
        self.tell_unsaid([*_undeclared(interface, calls), *computed], record_property)

    def _computed(self, interface: ModelInterface, calls: list[str]) -> Iterator[Violation]:
        """What READS and WRITES have that their source does not say."""
        for declaration in ("READS", "WRITES"):
            written = self.described().constants.get(declaration, {})
            for call in getattr(type(interface), declaration).keys() & set(calls):
                if call not in written:
                    yield Violation(
                        f"{declaration} of {call} is computed, so that recipes lack its keys",
                        "write the names of the keys: recipes read it without importing it",
                        place_of_call(interface, call),
                    )

    def _require_calls_in_declarations(self, interface: ModelInterface) -> None:
        for declaration in DECLARATIONS:
            declared = getattr(type(interface), declaration, {})
            for call in declared:
                if call not in CALLS:
                    raise Violation(
                        f"{declaration} names {call!r}, which is not a call",
                        f"the calls are {', '.join(CALLS)}",
                        place_of(type(interface)),
                    )
                if isinstance(declared, Mapping) and isinstance(text := declared[call], str):
                    raise Violation(
                        f"{declaration} has the text {text!r} for {call}, not a tuple of texts",
                        f'a tuple of one has a comma: {{"{call}": ("{text}",)}}',
                        place_of(type(interface)),
                    )

    def _require_group_sizes(self, interface: ModelInterface, calls: list[str]) -> None:
        for call in calls:
            declared = interface.group_sizes(call)
            sizes = declared.all if declared is not None else ()
            if not all(map(str.isdecimal, sizes)):
                raise Violation(
                    f"NEEDS_GROUP has {', '.join(sizes)} for {call}; a group is given by its "
                    "number of responses",
                    f'NEEDS_GROUP: ClassVar[Declaration] = {{"{call}": ("2",)}}',
                    place_of_call(interface, call),
                )

    def test_its_training_can_be_tried(self, make: Make, batches: Batches) -> None:
        """a batch can be made with the keys that training reads"""
        skip_unless(overrides(make(), "train_step"), "does not train")
        try:
            batches()
        except ValueError as error:
            raise untried(self.name, "train_step", "batches", make(), error) from error


def _undeclared(interface: ModelInterface, calls: list[str]) -> Iterator[Violation]:
    """What READS and WRITES leave out."""
    for call in calls:
        where = place_of_call(interface, call)
        if interface.reads(call) is None:
            keys = ", ".join(f'"{key}"' for key in keys_in_source(interface, call))
            yield Violation(
                f"{call} is not in READS: a recipe that forgets one of its keys fails only when it "
                "runs",
                f'READS: ClassVar[Declaration] = {{"{call}": ({keys},)}}',
                where,
            )
        if call in ("inference", "generate") and interface.writes(call) is None:
            yield Violation(
                f"{call} is not in WRITES: no recipe knows what it returns",
                f'WRITES: ClassVar[Declaration] = {{"{call}": ("a_key",)}}',
                where,
            )
