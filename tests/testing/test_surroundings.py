"""What counts as written by an environment while it is played."""

import importlib
import sys

import pytest

from rlcli.testing.environment_checks.surroundings import Conduct, watched


@pytest.fixture
def conduct(tmp_path):
    (tmp_path / "scratch").mkdir()
    return Conduct(str(tmp_path / "scratch"), has_network=False)


def test_a_file_outside_of_the_temporary_folder_is_written(tmp_path, conduct):
    with watched(conduct):
        (tmp_path / "notes.txt").write_text("1")
        (tmp_path / "folder").mkdir()
    assert conduct.writes == [str(tmp_path / "notes.txt"), str(tmp_path / "folder")]


def test_what_a_library_writes_while_it_is_imported_is_not_the_episodes(
    tmp_path, conduct, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "writing_library.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('settings').mkdir()\n"
    )
    with watched(conduct):
        importlib.import_module("writing_library")
    sys.modules.pop("writing_library")
    assert (tmp_path / "settings").is_dir()
    assert conduct.writes == []
