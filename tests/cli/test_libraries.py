"""A library that a component requires and that is not installed is reported before anything
starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.api.config import ModelBackendAbstraction
from rlcli.errors import ProjectError, ResourceError
from rlcli.registry import load, make_backend, requirements, signature
from rlcli.registry.requirements import missing_libraries

SAYS = "backend deepspeed needs deepspeed, which is not installed"
FIX = "pip install 'rlcli[deepspeed]'"
BACKEND = """
import no_such_library_zz
from dataclasses import dataclass
from typing import ClassVar
from rlcli.api.model import ModelBackend, register_backend

@register_backend("zz_mine")
@dataclass(frozen=True, kw_only=True)
class Mine(ModelBackend):
    "A backend of the user."

    REQUIRES: ClassVar[tuple[str, ...]] = {declared}
"""
LAYER = """\
extends: sft_math
models:
  actor:
    backend: {backend}
"""


@pytest.fixture
def without_deepspeed(rlcli, monkeypatch):
    real = requirements.installed_version
    monkeypatch.setattr(
        requirements, "installed_version", lambda name: None if name == "deepspeed" else real(name)
    )
    Path("mine.yaml").write_text(LAYER.format(backend="deepspeed"))


@pytest.fixture
def backend(rlcli, tmp_path, monkeypatch):
    """Writes a project with a backend that declares its requirements;
    its file cannot be imported here."""
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))

    def make(declared: str) -> Path:
        (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
        (tmp_path / "backends").mkdir()
        (tmp_path / "backends" / "zz_mine.py").write_text(BACKEND.format(declared=declared))
        (tmp_path / "mine.yaml").write_text(
            LAYER.format(backend="{_replace_: true, type: zz_mine}")
        )
        return tmp_path

    return make


@pytest.mark.parametrize("verb", ["validate", "train"])
def test_a_missing_library_is_reported_with_the_command_to_install_it(
    rlcli, without_deepspeed, verb
):
    code, out, err = rlcli(verb, "mine.yaml")
    assert (code, out) == (6, "")
    assert f"error[R75] mine.yaml:4:14: {SAYS}\n  hint: {FIX}" in err
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_libraries_of_a_warm_start_are_checked(rlcli, without_deepspeed):
    Path("second.yaml").write_text(
        "extends: ppo_math\nmodels: {actor: {path: 'recipe:mine.yaml#actor'}}\n"
    )
    code, _, err = rlcli("validate", "second.yaml")
    assert code == 6
    assert f"mine.yaml:4:14: {SAYS}" in err


def test_validate_reports_a_missing_library_as_json(rlcli, without_deepspeed):
    code, out, _ = rlcli("validate", "mine.yaml", "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["code"], problem["hint"]) == (6, "R75", FIX)


def test_check_reports_a_missing_library(rlcli, without_deepspeed):
    code, out, _ = rlcli("check", "mine.yaml", "--rows", "2", "--json")
    failures = [finding for finding in json.loads(out)["findings"] if finding["level"] == "FAIL"]
    assert code == 6
    assert [
        (finding["about"], finding["says"], finding["fix"], finding["details"])
        for finding in failures
    ] == [("library", SAYS, FIX, ["mine.yaml:4:14"])]


def test_a_plan_only_notes_a_missing_library(rlcli, without_deepspeed):
    code, out, err = rlcli("plan", "mine.yaml", "--devices", "8")
    assert (code, err) == (0, "")
    assert f"mine.yaml:4:14: {SAYS} here: {FIX}" in " ".join(out.split())
    document = json.loads(rlcli("plan", "mine.yaml", "--json")[1])
    assert document["missing_libraries"] == [{"what": SAYS, "where": "mine.yaml:4:14", "fix": FIX}]
    assert json.loads(rlcli("plan", "sft_math", "--json")[1])["missing_libraries"] == []
    assert rlcli("show", "mine.yaml")[0] == 0


def test_doctor_names_the_component_that_needs_a_library(rlcli, backend):
    backend('("no-such-distribution-zz>=2",)')
    findings = json.loads(rlcli("doctor", "--json")[1])["findings"]
    (finding,) = [
        candidate for candidate in findings if candidate["about"] == "no-such-distribution-zz"
    ]
    assert finding["level"] == "skip"
    assert (
        finding["says"] == "no-such-distribution-zz not installed; only needed by backend zz_mine"
    )
    assert finding["fix"] == "pip install 'no-such-distribution-zz>=2'"


def test_libraries_of_components_of_the_user_are_checked(rlcli, backend):
    backend('("no-such-distribution-zz>=2",)')
    code, _, err = rlcli("validate", "mine.yaml")
    assert code == 6
    assert "backend zz_mine needs no-such-distribution-zz>=2, which is not installed" in err
    assert "hint: pip install 'no-such-distribution-zz>=2'" in err
    # and not an error of importing its file
    with pytest.raises(ResourceError, match="zz_mine needs"):
        load("backends", "zz_mine")


def test_a_version_outside_the_requirement_is_reported_as_missing(rlcli, backend):
    backend('("packaging<1",)')
    (error,) = missing_libraries(signature("backends", "zz_mine"))
    assert error.what.startswith(
        "backend zz_mine needs packaging<1, which is installed in version "
    )


@pytest.mark.parametrize("declared", ['"deepspeed"', '("a b c",)', "(1,)"])
def test_an_invalid_requirement_is_refused_with_its_location(rlcli, backend, declared):
    backend(declared)
    with pytest.raises(ProjectError, match="REQUIRES of Mine") as error:
        list(missing_libraries(signature("backends", "zz_mine")))
    assert str(error.value.where).endswith("zz_mine.py:9")


def test_building_a_component_without_its_library_is_an_error(without_deepspeed):
    with pytest.raises(ResourceError, match=SAYS):
        make_backend(ModelBackendAbstraction("deepspeed"))


def test_libraries_are_checked_without_importing_them(tmp_path):
    script = """
import sys
from rlcli.cli.main import main
try:
    main(["validate", "sft_math", "models.actor.backend=deepspeed"])
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in ("torch", "deepspeed", "megatron") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
