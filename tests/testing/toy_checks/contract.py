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
    def subject(self):
        return registry.make_interface(ModelInterfaceAbstraction(self.name, dict(self.args)))

    def test_construction(self, subject, record_property):
        """it can be made"""
        record_property("note", f"of {type(subject).__name__}")

    def test_factor(self, subject):
        """its factor is 1"""
        if subject.factor != 1:
            raise Violation(
                f"its factor is {subject.factor}", "leave it alone", place_of(type(subject))
            )

    def test_crash(self, subject):
        """it divides by its factor"""
        subject.divided()

    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_cases(self, subject, n):
        """its limit is kept"""
        assert n <= subject.limit

    def test_haste(self, subject):
        """it answers at once"""
        with contextlib.suppress(Exception):  # as code under test may do
            time.sleep(subject.seconds)

    def test_other(self):
        """nothing"""
        pytest.skip("has no other")


class ToyPart(Contract):
    kind = "interface"

    def test_part(self):
        """a part"""
