"""`rlcli migrate`: what it prints and writes, and one clear error for what it cannot rewrite."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

OLDER = """\
# Mine.
extends: base/eval
graph:
  actor_train: {model: actor, call: train_step, interface: {type: ppo_actor, args: {kl_ctl: 0.3}}}
"""
TODAY = """\
# Mine.
format: 2
extends: base/eval
graph:
  gae: {model: actor, call: inference, interface: {type: gae, args: {kl_ctl: 0.3}}}
  actor_train: {model: actor, call: train_step, interface: {type: ppo_actor, args: {}}}
"""
CHANGES = [
    "graph.gae is new: it computes once what actor_train learns from",
    "kl_ctl of graph.actor_train is an argument of graph.gae",
]


@pytest.fixture
def older(rlcli, tmp_path: Path) -> Path:
    path = tmp_path / "older.yaml"
    path.write_text(OLDER)
    return path


def test_a_recipe_is_rewritten_once_and_says_what_has_changed(rlcli, older: Path):
    code, out, err = rlcli("migrate", "older.yaml")
    assert (code, out) == (
        0,
        "older.yaml: rewritten\n" + "".join(f"  {change}\n" for change in CHANGES),
    )
    assert err == "next: rlcli validate older.yaml\n"
    assert older.read_text() == TODAY
    assert rlcli("migrate", "older.yaml")[:2] == (0, "older.yaml: nothing to change\n")
    assert older.read_text() == TODAY


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_a_byte_order_mark_of_windows_are_kept(rlcli, older: Path, mark: bytes):
    older.write_bytes(mark + OLDER.replace("\n", "\r\n").encode())
    assert rlcli("migrate", "older.yaml")[0] == 0
    assert older.read_bytes() == mark + TODAY.replace("\n", "\r\n").encode()


def test_dry_run_only_says_what_would_change(rlcli, older: Path):
    code, out, _ = rlcli("migrate", "older.yaml", "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "older.yaml: would be rewritten")
    assert older.read_text() == OLDER


@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
def test_json_has_the_text_and_the_changes(rlcli, older: Path, dry_run: tuple[str, ...]):
    code, out, _ = rlcli("migrate", "older.yaml", "--json", *dry_run)
    expected = {"path": "older.yaml", "changes": CHANGES, "text": TODAY, "written": not dry_run}
    assert (code, json.loads(out)) == (0, [expected])
    assert older.read_text() == (OLDER if dry_run else TODAY)


def test_a_file_keeps_its_permissions_and_a_link_stays_one(rlcli, older: Path):
    older.chmod(0o640)
    link = older.with_name("link.yaml")
    link.symlink_to(older)
    rlcli("migrate", "link.yaml")
    assert older.stat().st_mode & 0o777 == 0o640
    assert older.read_text() == TODAY
    assert link.is_symlink()


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"graph: {a: [1\n", "R07", "bad.yaml:1:12: not YAML"),
        (b"- 1\n", "R02", "expected a mapping at the top level, found a list"),
        (b"", "R02", "found nothing"),
        (b"\xff\xfe\x00\x01", "R19", "a recipe is written in UTF-8"),
        (b"extends: nowhere\n", "R51", "no such layer"),
        (
            OLDER.replace("{kl_ctl: 0.3}", "{generation_size: 8}").encode(),
            "R71",
            "has another meaning now",
        ),
    ],
)
def test_a_file_that_cannot_be_rewritten_is_one_error(
    rlcli, older: Path, content: bytes, code: str, message: str
):
    """No file is changed then, not even those before it."""
    bad = older.with_name("bad.yaml")
    bad.write_bytes(content)
    status, out, err = rlcli("migrate", "older.yaml", "bad.yaml")
    assert (status, out) == (2, "")
    assert f"error[{code}]" in err
    assert message in err
    assert "Traceback" not in err
    assert (older.read_text(), bad.read_bytes()) == (OLDER, content)


def test_a_missing_file_and_a_folder_are_one_error_each(rlcli, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    assert rlcli("migrate", "missing.yaml") == (2, "", "error[R51]: no such file: missing.yaml\n")
    assert rlcli("migrate", "folder") == (2, "", "error[R57]: folder is not a regular file\n")
    code, _, err = rlcli("migrate")
    assert code == 2
    assert "rlcli migrate needs FILE" in err


@pytest.mark.skipif(os.getuid() == 0, reason="root may read and write everything")
def test_a_file_that_may_not_be_read_or_written_is_one_error(rlcli, older: Path):
    older.chmod(0o000)
    code, _, err = rlcli("migrate", "older.yaml")
    assert (code, err.count("error[")) == (2, 1)
    older.chmod(0o600)
    older.parent.chmod(0o555)
    try:
        code, _, err = rlcli("migrate", "older.yaml")
    finally:
        older.parent.chmod(0o755)
    assert code > 0
    assert "error[F75]" in err
    assert older.read_text() == OLDER


def test_a_full_disk_leaves_the_recipe_as_it_was(
    rlcli, older: Path, monkeypatch: pytest.MonkeyPatch
):
    from rlcli.cli import migrate

    def fail(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(migrate, "replace_file", fail)
    code, _, err = rlcli("migrate", "older.yaml")
    assert code > 0
    assert "older.yaml: not writable: No space left on device" in err
    assert older.read_text() == OLDER
