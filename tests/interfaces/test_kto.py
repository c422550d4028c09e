"""KTO"""

from rlcli.testing.interface import InterfaceContract


class TestContract(InterfaceContract):
    name = "kto"
    args = {"beta": 0.3, "desirable_weight": 1.5}
