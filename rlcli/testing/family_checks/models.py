"""The prerequisites of the other checks: the family, and models of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlcli.api.family import HFFamily
from rlcli.checkpoint.families import family_of
from rlcli.errors import UnknownComponent
from rlcli.testing.contract import Contract
from rlcli.testing.family_checks.examples import Example, made_examples


class ModelChecks(Contract):
    """Whether there is anything to check. Last among the bases, so that it is reported first."""

    @pytest.fixture
    def family(self) -> HFFamily:
        family = family_of(self.name)
        if family is None:
            raise UnknownComponent(
                f"no family is named {self.name!r}", hint="it is families/NAME.py of a project"
            )
        return family

    def make_examples(self) -> Sequence[Example]:
        """Models of the family."""
        return made_examples(self.name)

    @pytest.fixture
    def examples(self) -> Sequence[Example]:
        try:
            return self.make_examples()
        except Exception:  # reported by the check for it
            pytest.skip("not tried: there is no model to test it on")

    def test_examples(self, family: HFFamily) -> None:
        """there are models to test it on"""
        for example in self.make_examples():
            family.config_from_hf(example.hf)
