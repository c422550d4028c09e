"""The command line, run in process."""

from __future__ import annotations

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
