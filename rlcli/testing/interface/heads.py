"""Checks of HEAD: each call uses the head of the model that its interface declares."""

from __future__ import annotations

from typing import get_args

from rlcli.api.interface import HeadName, ModelInterface
from rlcli.api.model import call_interface
from rlcli.testing.contract import Note, Violation, skip_unless
from rlcli.testing.declaration import DeclaredSubject
from rlcli.testing.interface.call_engine import ModalEngine
from rlcli.testing.interface.inference_trial import CallTrial
from rlcli.testing.interface.outputs import check_declared
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Make,
    Rehearsal,
    overrides,
    place_of_call,
)

HEAD_NAMES = get_args(HeadName)


class HeadChecks(DeclaredSubject, InterfaceSubject):
    def test_training_uses_the_head_that_it_declares(
        self, rehearsal: Rehearsal, record_property: Note
    ) -> None:
        """training uses the head of the model that HEAD names"""
        self._compare(rehearsal.make(), "train_step", rehearsal.heads, record_property)

    def test_evaluation_uses_the_head_that_it_declares(
        self, make: Make, rehearsal: Rehearsal, record_property: Note
    ) -> None:
        """evaluation uses the head of the model that HEAD names"""
        interface = make()
        skip_unless(overrides(interface, "evaluate"), "does not evaluate")
        model = rehearsal.model()
        model.module = ModalEngine(model.module.model, lr=0.0)
        call_interface(interface, "evaluate", model, [rehearsal.batch])
        self._compare(interface, "evaluate", model.module.heads, record_property)

    def test_inference_uses_the_head_that_it_declares(
        self, inferring: CallTrial, record_property: Note
    ) -> None:
        """inference uses the head of the model that HEAD names"""
        model = inferring.model()
        inferring.run(model=model, interface=inferring.make())
        self._compare(inferring.interface, "inference", model.module.heads, record_property)

    def _compare(
        self, interface: ModelInterface, call: str, used: set[str], record_property: Note
    ) -> None:
        """Raise Violation unless a call used the head that is declared for it; nothing at all
        declared is a note."""
        where, declared = place_of_call(interface, call), interface.heads(call)
        if declared is None:
            example = f'HEAD: ClassVar[Declaration] = {{"{call}": ("{min(used, default="lm")}",)}}'
            message = f"{call} uses the head {' and '.join(sorted(used))}, but it is not in HEAD"
            self.tell_unsaid([Violation(message, example, where)] if used else [], record_property)
        elif unknown := sorted(set(declared.all) - {*HEAD_NAMES}):
            raise Violation(
                f"HEAD names {', '.join(unknown)} for {call}, which is not a head",
                f"the heads are {', '.join(HEAD_NAMES)}",
                where,
            )
        else:
            check_declared(used, declared, "HEAD", "use", where)
