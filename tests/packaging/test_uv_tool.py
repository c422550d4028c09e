"""`uv tool install` of the wheel, as the README has it: the command alone, in an environment that
uv makes."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH"),
]

CLEARED = ("PYTHON", "RLCLI_", "VIRTUAL_ENV", "UV_")
"""Variables that would lead to this checkout, or to another folder of uv."""


def _without_dependencies(wheel: Path, overrides: Path) -> Path:
    """A file of overrides by which uv leaves out all requirements of a wheel, so that nothing is
    downloaded."""
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    required = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist")
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in required}
    overrides.write_text("".join(f"{name} ; python_version < '0'\n" for name in sorted(names)))
    return overrides


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a command in an empty folder; it must succeed. What uv writes is in `run.home`."""
    home = tmp_path_factory.mktemp("uv")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)}
    folders = {f"UV_{name}": str(home / name) for name in ("TOOL_DIR", "TOOL_BIN_DIR", "CACHE_DIR")}
    environment = {**inherited, **folders, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    (home / "user").mkdir()

    def run(*command):
        done = subprocess.run(
            command, cwd=home / "user", env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run.home = home
    return run


@pytest.fixture(scope="module")
def rlcli(wheel, run):
    """The command that uv installed. Its dependencies are those of this environment."""
    overrides = _without_dependencies(wheel, run.home / "overrides.txt")
    options = ["--offline", "--overrides", str(overrides), "--python", sys.executable]
    run("uv", "tool", "install", *options, str(wheel))
    environment = run.home / "TOOL_DIR" / "rlcli"
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    (site_packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return lambda *arguments: run(run.home / "TOOL_BIN_DIR" / "rlcli", *arguments)


def test_the_installed_tool_is_the_wheel(rlcli):
    assert str(Path("TOOL_DIR", "rlcli")) in rlcli("show", "ppo_actor", "--json")


def test_the_installed_tool_validates_and_trains(rlcli):
    assert "ppo_math" in rlcli("ls")
    rlcli("validate", "ppo_math")
    small = ["train.steps=1", "train.eval.every_steps=null", "train.prompts_per_step=4"]
    result = json.loads(rlcli("train", "sft_math", *small, "--quiet", "--json"))
    assert (result["ok"], result["steps"]) == (True, 1)
