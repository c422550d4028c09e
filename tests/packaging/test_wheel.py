"""The wheel as a user installs it: elsewhere, with a component in a project of their own."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]

# The example of a custom interface in AReaL's documentation, as a user would write it.
CUSTOM = '''
from dataclasses import dataclass

from rlcli.api import model as model_api


@dataclass
class CustomInterface(model_api.ModelInterface):
    """A custom interface."""

    custom_param: float = 1.0
    """A custom knob."""

    def save(self, model, save_dir):
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)


model_api.register_interface("custom", CustomInterface)
'''


@pytest.fixture
def project(tmp_path):
    for kind in ("interfaces", "datasets"):
        (tmp_path / kind).mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces" / "custom.py").write_text(CUSTOM)
    (tmp_path / "datasets" / "_rows.py").write_text("ROWS = []\n")
    return tmp_path


def test_the_wheel_adds_only_rlcli(wheel):
    files = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in files} - {"rlcli"} == {
        f"rlcli-{wheel.name.split('-')[1]}.dist-info"
    }
    assert not [name for name in files if "__pycache__" in name or name.endswith(".pyc")]
    for kind in ("interfaces", "backends", "datasets"):
        components = {f"rlcli/{path.relative_to(ROOT)}" for path in (ROOT / kind).rglob("*.py")}
        assert components
        assert components <= set(files)
    recipes = {
        f"rlcli/recipes/{path.relative_to(ROOT / 'recipes')}"
        for path in (ROOT / "recipes").rglob("*.yaml")
    }
    assert recipes
    assert recipes <= set(files)
    assert {name for name in files if name.startswith("rlcli/interfaces/_")} >= {
        "rlcli/interfaces/__init__.py"
    }


def test_ls_lists_built_in_and_user_components(site, project, run):
    out = run([sys.executable, "-m", "rlcli", "ls", "--json"], cwd=project, PYTHONPATH=str(site))
    json.loads(out)
    assert str(project / "interfaces" / "custom.py") in out
    assert str(site / "rlcli" / "interfaces" / "ppo_actor.py") in out
    assert str(site / "rlcli" / "interfaces" / "rewards" / "math_reward.py") in out
    assert str(ROOT / "interfaces") not in out


def test_a_user_component_is_loaded_by_name(site, project, run):
    code = """
import pickle, rlcli
from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.registry import make_interface
made = make_interface(ModelInterfaceAbstraction("custom", {"custom_param": 2}))
assert pickle.loads(pickle.dumps(made)) == made
print(rlcli.__file__, type(made).__module__, made.custom_param)
"""
    below = project / "interfaces"
    out = run([sys.executable, "-c", code], cwd=below, PYTHONPATH=str(site))
    assert out.split() == [str(site / "rlcli" / "__init__.py"), "rlcli.interfaces.custom", "2.0"]


def test_the_datasets_library_of_hugging_face_is_not_hidden(site, project, run):
    code = "import rlcli.datasets, datasets; print(datasets.load_dataset.__module__)"
    for cwd in (project, ROOT):
        assert run([sys.executable, "-c", code], cwd=cwd, PYTHONPATH=str(site)).startswith(
            "datasets."
        )
