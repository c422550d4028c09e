"""Which rooms may import which, and which must not load heavy libraries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from package_tree import build

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "datasets", "accelerate", "matplotlib")
LIGHT_ROOMS = ("errors", "project", "registry", "recipe", "topology", "launch", "cli", "scaffold")


def run_python(code: str, cwd: Path = ROOT) -> str:
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=env, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_component_folders_are_not_packages_in_a_checkout():
    for kind in ("interfaces", "backends", "datasets", "recipes"):
        assert not (ROOT / kind / "__init__.py").exists()
        assert (ROOT / "rlcli" / kind / "__init__.py").exists()


def lint_imports(package: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    environment = {"PYTHONPATH": str(package)}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=package, timeout=60, env=environment
    )


def test_rooms_and_components_import_only_from_lower_floors(tmp_path):
    build(tmp_path)
    outcome = lint_imports(tmp_path)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.parametrize("imported", ["launch", "runtime", "interfaces"])
def test_a_backend_that_imports_from_above_or_sideways_is_reported(tmp_path, imported):
    build(tmp_path)
    (tmp_path / "rlcli" / "backends" / "intruder.py").write_text(
        f"import rlcli.{imported}\n", encoding="utf-8"
    )
    assert f"rlcli.backends.intruder -> rlcli.{imported}" in lint_imports(tmp_path).stdout


def test_a_reward_that_imports_from_above_is_reported(tmp_path):
    build(tmp_path)
    (tmp_path / "rlcli" / "interfaces" / "rewards" / "intruder.py").write_text(
        "import rlcli.launch\n", encoding="utf-8"
    )
    assert "rlcli.interfaces.rewards.intruder -> rlcli.launch" in lint_imports(tmp_path).stdout


def test_light_rooms_load_no_heavy_library():
    rooms = [room for room in LIGHT_ROOMS if list((ROOT / "rlcli").glob(f"{room}*"))]
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for room in rooms
        for path in [*(ROOT / "rlcli").glob(f"{room}.py"), *(ROOT / "rlcli" / room).rglob("*.py")]
    ]
    assert "rlcli.registry.signature" in modules
    code = f"""
import importlib, json, sys
for name in {modules!r}:
    importlib.import_module(name)
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert json.loads(run_python(code)) == []


def test_listing_and_reading_components_loads_no_heavy_library():
    code = f"""
import json, sys
from rlcli import registry
for kind in registry.KINDS:
    for name in registry.names(kind):
        registry.signature(kind, name).model()
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert json.loads(run_python(code)) == []


VERBS = [
    ["--help"],
    ["ls"],
    ["validate", "recipes/ppo_math.yaml"],
    ["plan", "recipes/ppo_math.yaml"],
]


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_light_verbs_load_no_heavy_library(words):
    code = f"""
import json, sys
from rlcli.cli.main import main
sys.argv = ["rlcli", *{words!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print()
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert json.loads(run_python(code)) == []


def test_the_datasets_folder_does_not_hide_the_datasets_library():
    code = "import datasets; print(datasets.__file__)"
    for cwd in (ROOT, ROOT / "datasets"):
        assert "site-packages" in run_python(code, cwd=cwd)
