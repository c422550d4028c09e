"""An interface that began as a copy of another: where its own arguments change nothing, it still
does what that one does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.interface import ModelInterface
from rlcli.registry import make_interface, signature
from rlcli.testing.contract import Violation, skip_unless
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial
from rlcli.testing.interface.outputs import gap
from rlcli.testing.interface.training_trial import Make, Rehearsal

HOW_TO_DIFFER = (
    "name the arguments with which it does: `neutral = {…}` in its TestContract; if there are "
    "none, remove `twin` and test what it does instead"
)


class TwinChecks(CallSubject):
    """Comparisons with the interface that it was copied from."""

    twin: ClassVar[str] = ""
    """The interface that it equals with `neutral` arguments."""
    neutral: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def make_neutral(self, make: Make) -> Make:
        """Builds the interface with neutral arguments."""
        skip_unless(self.twin, "has no `twin`: was not copied from another interface")
        return lambda **changes: make(**{**self.neutral, **changes})

    @pytest.fixture
    def make_twin(self, make_neutral: Make) -> Make:
        """Builds the twin, with those of the contract's arguments that it has too."""
        shared = {argument.name for argument in signature("interfaces", self.twin).arguments}
        args = {name: value for name, value in dict(self.args).items() if name in shared}

        def built(**changes: Any) -> ModelInterface:
            return make_interface(ModelInterfaceAbstraction(self.twin, {**args, **changes}))

        return built

    def test_trains_as_its_twin(
        self, make_neutral: Make, make_twin: Make, rehearsal: Rehearsal
    ) -> None:
        """with neutral arguments it trains as the interface that it was copied from"""
        copy = Rehearsal(make_neutral, rehearsal.batches)
        twin = Rehearsal(make_twin, rehearsal.batches)
        expected, actual = twin.train(rehearsal.batch), copy.train(rehearsal.batch)
        how = (f"with {self.twin}", f"with {self.name}")
        rehearsal.demand_same(expected, actual, how, HOW_TO_DIFFER)

    def test_infers_as_its_twin(
        self, make_neutral: Make, make_twin: Make, inferring: CallTrial
    ) -> None:
        """with neutral arguments it infers what the interface that it was copied from infers"""
        results = [
            CallTrial(built, "inference", inferring.batch, inferring.tokenizer).result
            for built in (make_twin, make_neutral)
        ]
        mismatch = gap(results[0], results[1])
        if mismatch is not None:
            raise Violation(
                f"{self.name} differs from {self.twin}: {mismatch}", HOW_TO_DIFFER, inferring.where
            )
