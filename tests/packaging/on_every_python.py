"""Run as a script, by `make test-pythons`; not a test itself.

For each version of Python that pyproject.toml names: if it is on this machine, the wheel and all
that it requires are installed in a new environment in build/pythons, and the commands of the README
run there. Otherwise pip must find wheels of all requirements for it. Exits with 1 if one of these
fails. Needs a package index, and some minutes and gigabytes for each version.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "pythons"
COMMANDS = ROOT / "tests" / "packaging" / "test_fresh_environment.py"
PIP = ["pip", "--disable-pip-version-check", "install", "--quiet"]


def versions() -> list[str]:
    """`3.11` and later, from the classifiers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        match[1]
        for line in project["classifiers"]
        if (match := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line))
    ]


def interpreter(version: str) -> Path | None:
    """A Python of that version: on PATH, or one of pyenv's."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = [*([Path(on_path)] if on_path else []), *of_pyenv.glob(f"{version}.*/bin/python")]
    return next((path for path in candidates if _is(path, version)), None)


def _is(python: Path, version: str) -> bool:
    """Whether it starts, and is of that version: pyenv's shims may be of none."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return asked.stdout.strip() == version


def works(python: Path, version: str, wheel: Path) -> bool:
    """Whether the commands of the README work in a new environment of this Python."""
    folder = ENVIRONMENTS / version
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    fresh = folder / "bin" / "python"
    installed = subprocess.run([fresh, "-m", *PIP, wheel], cwd=ENVIRONMENTS)
    if installed.returncode != 0:
        return False
    environment = {**os.environ, "RLCLI_FRESH_PYTHON": str(fresh)}
    tests = [sys.executable, "-m", "pytest", "-q", "-n", "0", COMMANDS]
    return subprocess.run(tests, cwd=ROOT, env=environment).returncode == 0


def resolves(version: str, wheel: Path) -> bool:
    """Whether there are wheels of all requirements for a Python that is not here."""
    target = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--python-version", version]
    command = [sys.executable, "-m", *PIP, *target, "--target", ENVIRONMENTS / version, wheel]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main() -> int:
    """Print one line for each version."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    outcomes: list[tuple[str, bool, str]] = []
    for version in versions():
        python = interpreter(version)
        if python is None:
            outcomes.append((version, resolves(version, wheel), "not here; wheels for it"))
        else:
            outcomes.append(
                (version, works(python, version, wheel), f"commands of the README, {python}")
            )
    for version, is_good, description in outcomes:
        print(f"{'ok  ' if is_good else 'FAIL'}  Python {version}: {description}")
    return int(not all(is_good for _, is_good, _ in outcomes))


if __name__ == "__main__":
    sys.exit(main())
