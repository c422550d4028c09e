"""What may import what, and what must stay light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = [path for kind in ("interfaces", "backends", "datasets") for path in sorted((ROOT / kind).glob("*.py"))]
HEAVY = ("torch", "transformers", "datasets", "accelerate", "matplotlib")
LIGHT_ROOMS = ("errors", "project", "registry", "recipe", "topology", "launch", "cli", "scaffold")


def run_python(code: str, cwd: Path = ROOT) -> str:
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, relative ones as `.`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.add("." * node.level)
            elif node.module == "rlcli":
                found |= {f"rlcli.{alias.name}" for alias in node.names}
            else:
                found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_components_import_contracts_maths_and_siblings_only(path):
    rooms = ("api", "ops", "registry", "errors", "files", "processes", "server_slot", path.parent.name)
    allowed = tuple(f"rlcli.{room}" for room in rooms)
    ours = {name for name in imported_modules(path) if name.split(".")[0] == "rlcli" or name.startswith(".")}
    wrong = {name for name in ours if name != "." and not any(f"{name}.".startswith(f"{room}.") for room in allowed)}
    assert not wrong


def test_the_component_folders_of_this_checkout_are_no_packages():
    assert COMPONENTS
    for kind in ("interfaces", "backends", "datasets", "recipes"):
        assert not (ROOT / kind / "__init__.py").exists()
        assert (ROOT / "rlcli" / kind / "__init__.py").exists()


def test_the_rooms_keep_their_floors():
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


def test_light_rooms_load_nothing_heavy():
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


def test_listing_and_reading_components_loads_nothing_heavy():
    code = f"""
import json, sys
from rlcli import registry
for kind in registry.KINDS:
    for name in registry.names(kind):
        registry.signature(kind, name).model()
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert json.loads(run_python(code)) == []


VERBS = [["--help"], ["ls"], ["validate", "recipes/ppo_math.yaml"], ["plan", "recipes/ppo_math.yaml"]]


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_light_verbs_load_nothing_heavy(words):
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


def test_our_datasets_folder_does_not_hide_hugging_faces():
    code = "import datasets; print(datasets.__file__)"
    for cwd in (ROOT, ROOT / "datasets"):
        assert "site-packages" in run_python(code, cwd=cwd)
