"""A library that a component requires and that is not installed is reported before anything starts."""

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
    "One of a user's own."

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
    monkeypatch.setattr(requirements, "installed_version", lambda name: None if name == "deepspeed" else real(name))
    Path("mine.yaml").write_text(LAYER.format(backend="deepspeed"))


@pytest.fixture
def backend(rlcli, tmp_path, monkeypatch):
    """Make a project with a backend that declares what it requires; its file cannot be imported here."""
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))

    def make(declared: str) -> Path:
        (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
        (tmp_path / "backends").mkdir()
        (tmp_path / "backends" / "zz_mine.py").write_text(BACKEND.format(declared=declared))
        (tmp_path / "mine.yaml").write_text(LAYER.format(backend="{_replace_: true, type: zz_mine}"))
        return tmp_path

    return make


@pytest.mark.parametrize("verb", ["validate", "train"])
def test_it_is_an_error_with_its_place_and_the_command_that_installs_it(rlcli, without_deepspeed, verb):
    code, out, err = rlcli(verb, "mine.yaml")
    assert (code, out) == (6, "")
    assert f"error[R75] mine.yaml:4:14: {SAYS}\n  hint: {FIX}" in err
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_what_a_recipe_starts_from_needs_its_libraries_too(rlcli, without_deepspeed):
    Path("second.yaml").write_text("extends: ppo_math\nmodels: {actor: {path: 'recipe:mine.yaml#actor'}}\n")
    code, _, err = rlcli("validate", "second.yaml")
    assert code == 6
    assert f"mine.yaml:4:14: {SAYS}" in err


def test_validate_says_so_in_json(rlcli, without_deepspeed):
    code, out, _ = rlcli("validate", "mine.yaml", "--json")
    (problem,) = json.loads(out)["problems"]
    assert (code, problem["code"], problem["hint"]) == (6, "R75", FIX)


def test_check_reports_it_with_all_else_that_it_finds(rlcli, without_deepspeed):
    code, out, _ = rlcli("check", "mine.yaml", "--rows", "2", "--json")
    failures = [finding for finding in json.loads(out)["findings"] if finding["level"] == "FAIL"]
    assert code == 6
    assert [(finding["about"], finding["says"], finding["fix"], finding["details"]) for finding in failures] == [
        ("library", SAYS, FIX, ["mine.yaml:4:14"])
    ]


def test_a_plan_for_another_machine_is_made_and_mentions_it(rlcli, without_deepspeed):
    code, out, err = rlcli("plan", "mine.yaml", "--devices", "8")
    assert (code, err) == (0, "")
    assert f"mine.yaml:4:14: {SAYS} here: {FIX}" in " ".join(out.split())
    told = json.loads(rlcli("plan", "mine.yaml", "--json")[1])
    assert told["missing_libraries"] == [{"what": SAYS, "where": "mine.yaml:4:14", "fix": FIX}]
    assert json.loads(rlcli("plan", "sft_math", "--json")[1])["missing_libraries"] == []
    assert rlcli("show", "mine.yaml")[0] == 0


def test_doctor_says_which_component_needs_it(rlcli, backend):
    backend('("no-such-distribution-zz>=2",)')
    told = json.loads(rlcli("doctor", "--json")[1])["findings"]
    (finding,) = [candidate for candidate in told if candidate["about"] == "no-such-distribution-zz"]
    assert finding["level"] == "skip"
    assert finding["says"] == "no-such-distribution-zz not installed; only backend zz_mine needs it"
    assert finding["fix"] == "pip install 'no-such-distribution-zz>=2'"


def test_components_of_a_user_declare_theirs_alike(rlcli, backend):
    backend('("no-such-distribution-zz>=2",)')
    code, _, err = rlcli("validate", "mine.yaml")
    assert code == 6
    assert "backend zz_mine needs no-such-distribution-zz>=2, which is not installed" in err
    assert "hint: pip install 'no-such-distribution-zz>=2'" in err
    with pytest.raises(ResourceError, match="zz_mine needs"):  # and not an error of importing its file
        load("backends", "zz_mine")


def test_a_version_that_is_not_allowed_is_as_good_as_none(rlcli, backend):
    backend('("packaging<1",)')
    (error,) = missing_libraries(signature("backends", "zz_mine"))
    assert error.what.startswith("backend zz_mine needs packaging<1, which is installed in version ")


@pytest.mark.parametrize("declared", ['"deepspeed"', '("a b c",)', "(1,)"])
def test_what_is_not_a_requirement_is_refused_at_its_place(rlcli, backend, declared):
    backend(declared)
    with pytest.raises(ProjectError, match="REQUIRES of Mine") as error:
        list(missing_libraries(signature("backends", "zz_mine")))
    assert str(error.value.where).endswith("zz_mine.py:9")


def test_whoever_makes_the_component_is_told_the_same(without_deepspeed):
    with pytest.raises(ResourceError, match=SAYS):
        make_backend(ModelBackendAbstraction("deepspeed"))


def test_no_library_is_imported_to_find_out(tmp_path):
    script = """
import sys
from rlcli.cli.main import main
try:
    main(["validate", "sft_math", "models.actor.backend=deepspeed"])
except SystemExit as ended:
    assert not ended.code, ended.code
print([name for name in ("torch", "deepspeed", "megatron") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
