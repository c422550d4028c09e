"""`rlcli cp` writes one file, or none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def test_the_copy_is_written_printed_and_valid(rlcli):
    code, out, err = rlcli("cp", "ppo_math", "mine.yaml", "ppo.kl_ctl=0.02")
    assert code == 0
    assert Path("mine.yaml").read_text() == out
    assert out.endswith("extends: ppo_math\n\nppo:\n  kl_ctl: 0.02\n")
    assert "next: rlcli train mine.yaml" in err
    assert rlcli("validate", "mine.yaml")[0] == 0
    changed = json.loads(rlcli("diff", "ppo_math", "mine.yaml", "--json")[1])["recipe"]
    assert {difference["key"].rpartition(".")[2] for difference in changed} == {"name", "kl_ctl"}


def test_a_dry_run_writes_no_files(rlcli):
    code, out, err = rlcli("cp", "ppo_math", "mine.yaml", "seed=3", "--dry-run")
    assert code == 0
    assert "seed: 3" in out
    assert "would write mine.yaml" in err
    assert list(Path().iterdir()) == []
    document = json.loads(rlcli("cp", "ppo_math", "mine.yaml", "--dry-run", "--json")[1])
    assert (document["written"], document["next"]) == (False, "rlcli train mine.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ppo_math", "mine"], "error[R68]"),
        (["ppo_math", "there.yaml"], "error[R68]"),
        (["ppo_math", "dangling.yaml"], "error[R68]"),
        (["ppo_math", "no/folder.yaml"], "error[R68]"),
        (["ppo_math", "ppo_math.yaml"], "error[R55]"),
        (["no_such", "mine.yaml"], "error[R51]"),
        (["ppo_math", "mine.yaml", "train.stpes=1"], "error[R42]"),
    ],
)
def test_after_a_mistake_no_file_is_written(rlcli, arguments, message):
    Path("there.yaml").write_text("mine")
    Path("dangling.yaml").symlink_to("nowhere")
    code, out, err = rlcli("cp", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert sorted(path.name for path in Path().iterdir()) == ["dangling.yaml", "there.yaml"]
    assert Path("there.yaml").read_text() == "mine"
