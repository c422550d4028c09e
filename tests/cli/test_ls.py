"""`rlcli ls` lists components and recipes with their origin."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def project(rlcli, tmp_path):
    """The working directory as a project with a recipe, a profile and a broken dataset."""
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "recipes" / "profiles").mkdir(parents=True)
    (tmp_path / "recipes" / "mine.yaml").write_text(
        "# Does something. And more.\nextends: ppo_math\n"
    )
    (tmp_path / "recipes" / "profiles" / "tiny.yaml").write_text(
        "# For a walk.\ntrain: {steps: 1}\n"
    )
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "broken.py").write_text("def :\n")
    return rlcli


def test_each_entry_has_its_origin(project):
    document = json.loads(project("ls", "recipes", "--json")[1])
    homes = {entry["name"]: entry["home"] for entry in document["recipes"]}
    assert (homes["mine"], homes["ppo_math"]) == ("project", "built-in")
    (mine,) = [entry for entry in document["recipes"] if entry["name"] == "mine"]
    assert Path(mine["where"]).samefile("recipes/mine.yaml")
    assert mine["doc"] == "Does something. And more."
    (line,) = [
        line for line in project("ls", "recipes")[1].splitlines() if line.startswith("mine ")
    ]
    assert line.split() == ["mine", "project", "Does", "something."]


def test_profiles_are_listed_separately_by_their_name_for_with(project):
    document = json.loads(project("ls", "--json")[1])
    assert "tiny" in [entry["name"] for entry in document["profiles"]]
    assert not any("tiny" in entry["name"] for entry in document["recipes"])
    assert "--with" in project("ls", "profiles")[1]
    assert project("validate", "mine", "--with", "tiny")[0] == 0


def test_a_broken_component_is_listed_with_its_problem(project):
    code, out, _ = project("ls", "datasets")
    assert code == 0
    assert "not valid Python" in " ".join(out.split())


def test_the_list_fits_80_columns(project):
    assert [line for line in project("ls")[1].splitlines() if len(line) > 80] == []


def test_the_list_of_everything_fits_one_screen(project):
    out = project("ls")[1]
    assert out.count("\n") <= 40
    homes = [
        line.split()[:3] for line in out.splitlines() if line.startswith(("datasets", "profiles"))
    ]
    assert homes[0][1] == "built-in"
    assert ["datasets", "project", "broken"] in homes
    assert ["profiles", "project", "tiny"] in homes
    document = json.loads(project("ls", "--json")[1])
    words = set(out.replace(",", " ").split())
    assert {entry["name"] for entries in document.values() for entry in entries} <= words


def test_profiles_are_mentioned_only_if_there_are_any(rlcli):
    profiles = json.loads(rlcli("ls", "profiles", "--json")[1])["profiles"]
    assert ("profiles" in rlcli("ls")[1]) == bool(profiles)


def test_listing_builds_no_sections_of_recipes(project):
    code = (
        "import sys\n"
        "from rlcli.cli.main import main\n"
        "try: main(['ls'])\n"
        "finally: assert 'rlcli.recipe.schema' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_list_of_names_reads_no_component(project, monkeypatch):
    from rlcli import registry

    monkeypatch.setattr(registry, "signature", None)
    code, out, _ = project("ls")
    assert code == 0
    assert "broken" in out
    assert "ppo_actor" in out
