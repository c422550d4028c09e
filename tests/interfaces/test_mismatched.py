"""Prompts with answers to other prompts; `InterfaceContract` checks what holds for any interface."""

from rlcli.testing.interface import InterfaceContract


class TestContract(InterfaceContract):
    name = "mismatched"
