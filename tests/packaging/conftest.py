"""A wheel of this checkout, and a folder that it is installed in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKED = (
    "rlcli",
    "interfaces",
    "backends",
    "datasets",
    "recipes",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def _run(command, cwd, **variables):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **variables}
    env.pop("RLCLI_PROJECT", None)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def run():
    """Run a command that must succeed, and give its output."""
    return _run


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Built from a copy, so that no cache file of this checkout decides what is in it."""
    source, out = tmp_path_factory.mktemp("source") / "checkout", tmp_path_factory.mktemp("dist")
    source.mkdir()
    for name in PACKED:
        origin = ROOT / name
        (shutil.copytree if origin.is_dir() else shutil.copy)(origin, source / name)
    (source / "interfaces" / "__pycache__").mkdir(exist_ok=True)
    (source / "interfaces" / "__pycache__" / "stale.pyc").write_bytes(b"")
    _run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)],
        cwd=source,
    )
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def site(wheel, tmp_path_factory):
    """A folder like site-packages, with the wheel in it."""
    target = tmp_path_factory.mktemp("site")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    _run([*install, str(wheel)], cwd=target)
    return target


DEPENDENCIES = "dependencies.pth"


@pytest.fixture(scope="session")
def fresh_python(wheel, tmp_path_factory):
    """The Python of a new environment with the wheel in it. Its dependencies are those of this
    environment, so that nothing is downloaded; `make test-pythons` names environments that have
    their own, in RLCLI_FRESH_PYTHON."""
    if "RLCLI_FRESH_PYTHON" in os.environ:
        return Path(os.environ["RLCLI_FRESH_PYTHON"])
    folder = tmp_path_factory.mktemp("fresh") / "env"
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], cwd=folder.parent)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    _run([*install, "--no-deps", "--no-index", str(wheel)], cwd=folder.parent)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    assert (site_packages / "rlcli").is_dir()
    # a folder named in a .pth file has its own .pth files ignored, such as that of this checkout
    (site_packages / DEPENDENCIES).write_text(f"{sysconfig.get_path('purelib')}\n")
    return python
