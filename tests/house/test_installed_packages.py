"""Components of installed packages: by a short name through an entry point,
or by the name of their module."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli import project, registry
from rlcli.api.config import EnvironmentAbstraction, ModelInterfaceAbstraction
from rlcli.errors import ProjectError, UnknownComponent
from rlcli.inspect.doctor import examine
from rlcli.registry.faults import attribute_user_errors
from rlcli.scaffold import plan

HOME = Path(__file__).parents[2]
BREVITY = '''
from dataclasses import dataclass
from {shared} import Bounded
from rlcli.api.model import ModelInterface
from rlcli.api.component import register_interface

@dataclass(kw_only=True)
class Brevity(Bounded, ModelInterface):
    """Pays for short answers."""

    goal: int = 80
    """Characters that earn the whole reward."""

    READS = {{"inference": ("packed_input_ids",)}}
    WRITES = {{"inference": ("rewards",)}}

    def inference(self, model, data, mb_spec):
        raise NotImplementedError

register_interface("{name}", Brevity)
'''
SHARED = '''
from dataclasses import dataclass

@dataclass(kw_only=True)
class Bounded:
    """Has a floor."""

    floor: float = 0.0
    """Lowest reward."""
'''
RECIPE = """
extends: ppo_math
graph:
  reward_inf:
    interface: {type: %s, args: {floor: 0.5}}
"""


@pytest.fixture
def site(tmp_path, monkeypatch, unregistered_afterwards):
    """A folder of installed packages with `my-lab`, which is unregistered afterwards."""
    site = tmp_path / "site"
    files = {
        "my_lab/__init__.py": "raise SystemExit('imported')",
        "my_lab/rlcli/interfaces/short_words.py": BREVITY.format(
            shared="._bounded", name="short-words"
        ),
        "my_lab/rlcli/interfaces/_bounded.py": SHARED,
        "my_lab/rlcli/recipes/my_lab_math.yaml": RECIPE % "short_words",
        "my_lab-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: my-lab\nVersion: 1.0\n",
        "my_lab-1.0.dist-info/entry_points.txt": "[rlcli]\nmy_lab = my_lab.rlcli\n",
        "their_lab/__init__.py": "",
        "their_lab/rewards/__init__.py": "",
        "their_lab/rewards/brevity.py": BREVITY.format(shared="._bounded", name="brevity"),
        "their_lab/rewards/_bounded.py": SHARED,
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    project.installed_roots.cache_clear()
    yield site
    project.installed_roots.cache_clear()


@pytest.fixture
def rlcli(site):
    """Runs a command where those packages are installed; returns its output or its error."""

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "rlcli", *arguments],
            capture_output=True,
            text=True,
            cwd=site.parent,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(HOME)])},
        )
        return done.stdout if done.returncode == 0 else done.stderr

    return run


def test_components_of_an_entry_point_have_short_names(site):
    assert (
        registry.path_of("interfaces", "short-words")
        == site / "my_lab/rlcli/interfaces/short_words.py"
    )
    assert [one.name for one in registry.signature("interfaces", "short-words").arguments] == [
        "floor",
        "goal",
    ]
    assert "my_lab" not in sys.modules
    assert registry.load("interfaces", "short-words").__name__ == "Brevity"
    assert "my_lab" not in sys.modules  # the folder is one of rlcli.interfaces


def test_a_component_may_be_named_by_its_module(site):
    name = "their_lab.rewards.brevity"
    assert [one.name for one in registry.signature("interfaces", name).arguments] == [
        "floor",
        "goal",
    ]
    assert registry.module_of("interfaces", name) == name
    assert name not in sys.modules
    assert registry.load("interfaces", name).__module__ == name


def test_show_takes_the_name_of_a_module(site, capsys):
    from rlcli.cli.show import _show_by_name

    assert _show_by_name("their_lab.rewards.brevity", as_json=False)
    assert capsys.readouterr().out.startswith("interface their_lab.rewards.brevity · ")


SETTINGS = """
from dataclasses import dataclass, field
from rlcli.api.component import {registrar}
from ._scale import Scale

@dataclass(kw_only=True)
class Scaled:
    scale: Scale = field(default_factory=Scale)

{registrar}("scaled", Scaled)
"""
SCALE = """
from dataclasses import dataclass

@dataclass
class Scale:
    factor: float = 2.0
"""


@pytest.mark.parametrize("kind", ["interface", "environment"])
def test_a_component_named_by_its_module_may_have_settings_of_its_own(site, kind):
    (site / "their_lab/rewards/_scale.py").write_text(SCALE)
    registrar = f"register_{kind}"
    (site / "their_lab/rewards/scaled.py").write_text(SETTINGS.format(registrar=registrar))
    name, args = "their_lab.rewards.scaled", {"scale": {"factor": 3.0}}
    abstraction, make = {
        "interface": (ModelInterfaceAbstraction, registry.make_interface),
        "environment": (EnvironmentAbstraction, registry.make_environment),
    }[kind]
    scale = make(abstraction(name, args)).scale
    assert (type(scale).__module__, scale.factor) == ("their_lab.rewards._scale", 3.0)


def test_an_error_in_a_component_named_by_its_module_is_the_components(site):
    cls = registry.load("interfaces", "their_lab.rewards.brevity")
    with (
        pytest.raises(ProjectError, match="NotImplementedError") as caught,
        attribute_user_errors(),
    ):
        cls().inference(None, None, None)
    assert caught.value.where == f"{site / 'their_lab/rewards/brevity.py'}:18"
    assert caught.value.hint.startswith("rlcli test interface their_lab.rewards.brevity tries")


def test_a_copy_of_a_component_named_by_its_module_finds_what_that_imports(site, tmp_path):
    (site / "their_lab/rewards/deep.py").write_text(
        BREVITY.format(shared="._bounded", name="deep")
        .replace("from rlcli.api.model", "from . import _bounded\nfrom rlcli.api.model")
        .replace("        raise", "        from ..rewards import _bounded\n        raise")
    )
    code, _ = plan("interface", "mine", tmp_path, like="their_lab.rewards.deep").files
    imports = [line.strip() for line in code.text.splitlines() if "_bounded" in line]
    assert imports == [
        "from their_lab.rewards._bounded import Bounded",
        "from their_lab.rewards import _bounded",
        "from their_lab.rewards import _bounded",
    ]


def test_packages_may_have_modules_of_the_same_name(site):
    third = site / "third/brevity.py"
    third.parent.mkdir()
    (third.parent / "_bounded.py").write_text(SHARED)
    third.write_text(BREVITY.format(shared="._bounded", name="brevity"))
    classes = [
        registry.load("interfaces", name) for name in ("their_lab.rewards.brevity", "third.brevity")
    ]
    assert [one.__module__ for one in classes] == ["their_lab.rewards.brevity", "third.brevity"]


@pytest.mark.parametrize("name", ["their_lab.rewards", "their_lab.rewards.absent", "absent.module"])
def test_a_missing_module_is_an_unknown_component(site, name):
    with pytest.raises(UnknownComponent, match="there is no such module"):
        registry.path_of("interfaces", name)


def test_a_module_that_registers_nothing_is_not_imported(site):
    (site / "their_lab/evil.py").write_text("raise SystemExit('imported')")
    with pytest.raises(ProjectError, match="the file registers no class"):
        registry.load("interfaces", "their_lab.evil")


def test_an_entry_point_without_a_package_only_causes_a_warning(site, caplog):
    (site / "my_lab-1.0.dist-info/entry_points.txt").write_text("[rlcli]\nmy_lab = my_lab.gone\n")
    assert "short_words" not in registry.names("interfaces")
    assert "ppo_actor" in registry.names("interfaces")
    wrong = (
        "the entry point my_lab of my-lab names 'my_lab.gone', which is not an installed package"
    )
    assert caplog.messages == [f"{wrong}. rlcli doctor says more"]
    (warning,) = [finding for finding in examine() if finding.about == "my-lab"]
    assert (warning.level, warning.says) == ("warn", wrong)
    assert "install my-lab again" in warning.fix


def test_recipes_use_entry_points_and_modules(rlcli, site):
    (site.parent / "mine.yaml").write_text(RECIPE % "their_lab.rewards.brevity")
    for recipe in ("mine.yaml", "my_lab_math"):
        assert "ok" in rlcli("validate", recipe)
    listed = json.loads(rlcli("ls", "interfaces", "--json"))["interfaces"]
    assert [one["home"] for one in listed if one["name"] == "short_words"] == ["my-lab"]
    assert "Characters that earn" in rlcli("show", "interface", "their_lab.rewards.brevity")
    assert "did you mean floor?" in rlcli(
        "validate", "mine.yaml", "graph.reward_inf.interface.args.flor=1"
    )
