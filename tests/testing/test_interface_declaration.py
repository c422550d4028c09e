"""Interfaces that leave something unsaid: the contract tells what, and where."""

import inspect

import pytest

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.registry import make_interface
from rlcli.testing.batches import make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface import InterfaceContract

HEADER = """
from dataclasses import dataclass
from typing import Any, ClassVar
from rlcli.api.interface import ModelInterface, register_interface
"""
CLASS = "@dataclass\nclass X(ModelInterface):\n"


@pytest.mark.parametrize(
    ("source", "check", "found"),
    [
        (f'{CLASS}    "Does."\n    n: int = 1\n', "says_what_it_does", "argument n has no docstring"),
        (f"{CLASS}    pass\n", "says_what_it_does", "X has no docstring"),
        (f'{CLASS}    "Does."\n    n: Any = 1\n    "N."\n', "arguments_are_typed", "the type Any: any mistake"),
        (f'{CLASS}    "Does."\n    n: int = 0.5\n    "N."\n', "arguments_are_typed", r"default of argument n, 0\.5,"),
        (f'{CLASS}    "Does."\n', "declares_the_keys_of_its_calls", "X has none of train_step"),
        (
            f'{CLASS}    "Does."\n    def inference(self, model, data, mb_spec):\n        return data.data["values"]\n',
            "declares_the_keys_of_its_calls",
            "inference is not in READS",
        ),
        (
            f'{CLASS}    "Does."\n    READS: ClassVar = {{"inference": ("values",)}}\n'
            "    def inference(self, model, data, mb_spec):\n        return data\n",
            "declares_the_keys_of_its_calls",
            "inference is not in WRITES",
        ),
        (f'{CLASS}    "Does."\n    READS: ClassVar = {{"trainstep": ()}}\n    evaluate = print\n',
         "declares_the_keys_of_its_calls", "READS names 'trainstep', which is not a call"),
        (
            f'{CLASS}    "Does."\n    def train_step(self, model, data, mb_spec):\n        return {{}}\n',
            "its_training_can_be_tried",
            "nobody knows what 'my_mask' holds",
        ),
    ],
)  # fmt: skip
def test_what_an_interface_leaves_unsaid(tmp_path, monkeypatch, source, check, found):
    name = f"unsaid_{abs(hash(source))}"
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces").mkdir()
    file = tmp_path / "interfaces" / f"{name}.py"
    file.write_text(f'{HEADER}\n\n{source}\n\nregister_interface("{name}", X)\n')
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    contract = type("TestContract", (InterfaceContract,), {"name": name})()
    given = {
        "make": lambda: make_interface(ModelInterfaceAbstraction(name)),
        "batches": lambda: make_batch(["my_mask"]),
    }
    method = getattr(contract, f"test_{check}")
    with pytest.raises(Violation, match=found) as told:
        method(**{key: value for key, value in given.items() if key in inspect.signature(method).parameters})
    assert told.value.where.startswith(f"{file}:")
