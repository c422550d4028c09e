"""A contract for interfaces, whose checks a toy passes or fails on request."""

import contextlib
import time

import pytest

from rlcli import registry
from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.testing.contract import Contract, Violation, place_of


class ToyContract(Contract):
    kind = "interface"

    @pytest.fixture
    def made(self):
        return registry.make_interface(ModelInterfaceAbstraction(self.name, dict(self.args)))

    def test_sound(self, made, record_property):
        """it can be made"""
        record_property("note", f"of {type(made).__name__}")

    def test_factor(self, made):
        """its factor is 1"""
        if made.factor != 1:
            raise Violation(f"its factor is {made.factor}", "leave it alone", place_of(type(made)))

    def test_crash(self, made):
        """it divides by its factor"""
        made.divided()

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_cases(self, made, n):
        """its limit is kept"""
        assert n <= made.limit

    def test_haste(self, made):
        """it answers at once"""
        with contextlib.suppress(Exception):  # as code under test may do
            time.sleep(made.seconds)

    def test_other(self):
        """nothing"""
        pytest.skip("has no other")


class ToyPart(Contract):
    kind = "interface"

    def test_part(self):
        """a part"""
