"""Interfaces with wrong or missing declarations: the contract reports which, and where."""

import inspect
import shutil
from pathlib import Path

import pytest

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.cli.checks import SilentPrinter
from rlcli.registry import make_interface
from rlcli.testing import declaration
from rlcli.testing.batches import make_batch
from rlcli.testing.contract import Violation, skip_without_arguments
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.runner import run_checks
from rlcli.testing.subjects import subjects

EXAMPLE = Path(__file__).parents[1] / "interfaces" / "custom_interface_example.txt"
HEADER = """
from dataclasses import dataclass
from typing import Any, ClassVar
from rlcli.api.interface import ModelInterface, register_interface
"""
CLASS = "@dataclass\nclass X(ModelInterface):\n"


@pytest.mark.parametrize(
    ("source", "check", "finding"),
    [
        (
            f'{CLASS}    "Does."\n    n: Any = 1\n    "N."\n',
            "arguments_are_typed",
            "the type Any: any mistake",
        ),
        (
            f'{CLASS}    "Does."\n    n: int = 0.5\n    "N."\n',
            "arguments_are_typed",
            r"default of argument n, 0\.5,",
        ),
        (f'{CLASS}    "Does."\n', "declares_the_keys_of_its_calls", "X has none of train_step"),
        (
            (
                f'{CLASS}    "Does."\n    READS: ClassVar = {{"trainstep": '
                "()}\n    evaluate = print\n"
            ),
            "declares_the_keys_of_its_calls",
            "READS names 'trainstep', which is not a call",
        ),
        (
            f'{CLASS}    "Does."\n    READS: ClassVar = {{"inference": ("values")}}\n'
            "    inference = print\n",
            "declares_the_keys_of_its_calls",
            "READS has the text 'values' for inference, not a tuple of texts",
        ),
        (
            (
                f'{CLASS}    "Does."\n    def train_step(self, model, data, '
                "mb_spec):\n        return {}\n"
            ),
            "its_training_can_be_tried",
            "the content of 'my_mask' is unknown",
        ),
        (
            f'{CLASS}    "Does."\n    METRICS: ClassVar = {{"gap": "nats"}}\n',
            "metrics_have_a_unit_and_a_meaning",
            "METRICS gives gap 'nats'",
        ),
    ],
)
def test_a_wrong_declaration_is_a_violation(tmp_path, monkeypatch, source, check, finding):
    file, method, arguments = prepared(tmp_path, monkeypatch, source, check)
    with pytest.raises(Violation, match=finding) as caught:
        method(**arguments, **notes(method, []))
    assert caught.value.where.startswith(f"{file}:")


@pytest.mark.parametrize(
    ("source", "check", "note"),
    [
        (
            f'{CLASS}    "Does."\n    n: int = 1\n    m: int = 1\n',
            "says_what_it_does",
            (
                "argument n has no docstring (and 1 more): a string on the line below the field: "
                "what it does, in which unit"
            ),
        ),
        (
            f"{CLASS}    pass\n",
            "says_what_it_does",
            "X has no docstring: one line below `class`: `rlcli ls` and `rlcli show` print it",
        ),
        (
            (
                f'{CLASS}    "Does."\n    def inference(self, model, data, mb_spec):\n        '
                'return data.data["values"]\n'
            ),
            "declares_the_keys_of_its_calls",
            (
                "inference is not in READS: a recipe that forgets one of its keys fails only when "
                "it runs (and 1 more): "
                'READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "values",)}'
            ),
        ),
        (
            f'KEY = "values"\n{CLASS}    "Does."\n    READS: ClassVar = {{"inference": (KEY,)}}\n'
            '    WRITES: ClassVar = {"inference": ("scores",)}\n    inference = print\n',
            "declares_the_keys_of_its_calls",
            "READS of inference is computed, so that recipes lack its keys: write the names of the "
            "keys: recipes read it without importing it",
        ),
        (
            f'{CLASS}    "Does."\n    READS: ClassVar = {{"inference": ("values",)}}\n'
            "    def inference(self, model, data, mb_spec):\n        return data\n",
            "declares_the_keys_of_its_calls",
            "inference is not in WRITES: no recipe knows what it returns: "
            'WRITES: ClassVar[Declaration] = {"inference": ("a_key",)}',
        ),
    ],
)
def test_a_missing_declaration_of_a_user_interface_is_a_note(
    tmp_path, monkeypatch, source, check, note
):
    _, method, arguments = prepared(tmp_path, monkeypatch, source, check)
    recorded = []
    method(**arguments, **notes(method, recorded))
    assert recorded == [("note", note)]


def test_a_missing_declaration_of_a_built_in_interface_is_a_violation(tmp_path, monkeypatch):
    _, method, arguments = prepared(
        tmp_path, monkeypatch, f"{CLASS}    pass\n", "says_what_it_does"
    )
    monkeypatch.setattr(declaration, "is_built_in", lambda path: True)
    with pytest.raises(Violation, match="X has no docstring"):
        method(**arguments, **notes(method, []))


def test_the_documented_example_interface_has_two_notes_and_one_failure(tmp_path, monkeypatch):
    """It declares nothing, and reads a key of its own: two notes,
    and one failure that says what to provide."""
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "interfaces/documented.py")
    file = tmp_path / "interfaces/documented.py"
    file.write_text(file.read_text().replace('"custom"', '"documented"'))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    (tested,) = run_checks(subjects("interface", "documented"), SilentPrinter())
    checks = {check.words: check for check in tested.checks}
    assert [words for words, check in checks.items() if check.outcome == "FAIL"] == [
        "a batch can be made with the keys that training reads"
    ]
    assert "has no docstring" in checks["class and arguments are documented, in words"].note
    assert (
        '("packed_input_ids", "mask",)'
        in checks["declares the keys of every call that it has"].note
    )


def notes(method, recorded):
    takes = "record_property" in inspect.signature(method).parameters
    return {"record_property": lambda *note: recorded.append(note)} if takes else {}


def prepared(tmp_path, monkeypatch, source, check):
    """The file of an interface, a check of it, and what that is given."""
    name = f"unsaid_{abs(hash(source))}"
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces").mkdir()
    file = tmp_path / "interfaces" / f"{name}.py"
    file.write_text(f'{HEADER}\n\n{source}\n\nregister_interface("{name}", X)\n')
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    contract = type("TestContract", (InterfaceContract,), {"name": name})()
    arguments = {
        "make": lambda: make_interface(ModelInterfaceAbstraction(name)),
        "batches": lambda: make_batch(["my_mask"]),
    }
    method = getattr(contract, f"test_{check}")
    return (
        file,
        method,
        {
            key: value
            for key, value in arguments.items()
            if key in inspect.signature(method).parameters
        },
    )


def test_an_interface_whose_defaults_do_not_meet_its_needs_is_not_tried():
    with pytest.raises(pytest.skip.Exception, match="function_reward path=… or function=…"):
        skip_without_arguments("interface", "function_reward", {})
    for arguments in ({"path": "my_reward.py"}, {"function": "my_module:score"}):
        skip_without_arguments("interface", "function_reward", arguments)
