"""The command line, run in process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from syrupy.extensions.amber import AmberSnapshotExtension

from rlcli.cli import main as command_line


@pytest.fixture
def rlcli(capsys, tmp_path, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    # set first, so that they are gone afterwards too
    for variable in ("RLCLI_PROJECT", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            command_line.main(list(arguments))
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


class Pages(AmberSnapshotExtension):
    """Output as a user reads it, in `snapshots`; `pytest tests/cli --snapshot-update` rewrites
    it."""

    snapshot_dirname = "snapshots"


@pytest.fixture
def pages(snapshot):
    """Compares equal to the recorded output."""
    return snapshot.use_extension(Pages)


HEAVY = (
    "torch", "transformers", "datasets", "sympy", "math_verify", "huggingface_hub", "matplotlib",
    "tensorboardX",
)  # fmt: skip


@pytest.fixture
def assert_light():
    """Runs verbs in one process, which starts once; none of them may fail, or load a heavy
    library."""

    def run(verbs, folder=None):
        script = f"""
import sys
from rlcli.cli.main import main
for arguments in {verbs!r}:
    try:
        main(arguments)
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder)
        assert done.returncode == 0, done.stderr

    return run
