"""A project with a toy interface, for tests of the runner of checks."""

import shutil
import sys
from pathlib import Path

import pytest

from rlcli.testing import subjects as of_subjects
from rlcli.testing.subjects import SubjectKind

TOY = Path(__file__).with_name("toy_checks")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one interface, and a toy contract for interfaces."""
    (tmp_path / "pyproject.toml").write_text(
        "[tool.rlcli]\n[tool.pytest.ini_options]\naddopts = '--nonsense'\n"
    )
    (tmp_path / "interfaces").mkdir()
    shutil.copy(TOY / "component.py", tmp_path / "interfaces" / "toy_checked.py")
    shutil.copy(TOY / "contract.py", tmp_path / "toy_contract_for_tests.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--more-nonsense")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        of_subjects,
        "KINDS",
        {
            **of_subjects.KINDS,
            "interface": SubjectKind("toy_contract_for_tests", "ToyContract", "paper"),
        },
    )
    for module in ("runner", "selection"):
        monkeypatch.setattr(f"rlcli.testing.{module}.KINDS", of_subjects.KINDS)
    _forget()
    yield tmp_path
    _forget()


def _forget():
    """Each project has a component of the same name."""
    from rlcli.api.component import registered

    registered("interfaces").pop("toy-checked", None)
    for name in (
        "toy_contract_for_tests",
        "rlcli.interfaces.toy_checked",
        "tests.interfaces.test_toy_checked",
    ):
        sys.modules.pop(name, None)
