"""The contract of model families.

    class TestContract(FamilyContract):
        name = "my-family"

is a whole test if transformers has the family's `architecture`: tiny random models are made of its configuration, one
for every switch that it has. Otherwise `make_examples` says what the family is tested on:

        def make_examples(self):
            return [Example("small", hf={…}, tensors={…})]
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlcli.api.family import HFFamily
from rlcli.checkpoint.families import family_of
from rlcli.errors import UnknownComponent
from rlcli.testing.contract import Contract
from rlcli.testing.family_checks.configuration import ConfigurationChecks
from rlcli.testing.family_checks.examples import Example, made_examples
from rlcli.testing.family_checks.weights import WeightChecks

__all__ = ["Example", "FamilyContract"]


class FamilyContract(WeightChecks, ConfigurationChecks, Contract):
    """What every family must do. Its `name` is the `model_type` of a config.json."""

    kind = "family"

    @pytest.fixture
    def family(self) -> HFFamily:
        found = family_of(self.name)
        if found is None:
            raise UnknownComponent(f"no family is named {self.name!r}", hint="it is families/NAME.py of a project")
        return found

    def make_examples(self) -> Sequence[Example]:
        """Models of the family."""
        return made_examples(self.name)

    @pytest.fixture
    def examples(self) -> Sequence[Example]:
        try:
            return self.make_examples()
        except Exception:  # which one says the check that is about it
            pytest.skip("there is no model to test it on")

    def test_examples(self, family: HFFamily) -> None:
        """there are models to test it on"""
        for example in self.make_examples():
            family.config_from_hf(example.hf)
