"""`rlcli watch`: which runs it shows, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

from recorded_runs import record_run

from rlcli.observe.run_directory import RunDirectory


def test_named_runs_are_shown_and_their_exit_code_is_returned(rlcli):
    record_run(Path("runs/ppo_math/one"))
    failed = record_run(Path("runs/ppo_math/two"))
    code, out, err = rlcli("watch", "one")
    assert (code, err, out.split()[:3]) == (0, "", ["ppo_math/one", "done", "4/4"])
    with RunDirectory.reopen(failed) as run:
        run.write_status("failed", 4, 8, 9)
    code, out, _ = rlcli("watch", "one", "two", "one")
    assert (code, len(out.splitlines())) == (9, 2)
    document = json.loads(rlcli("watch", "one", "two", "--json")[1])
    assert [run["state"] for run in document["runs"]] == ["done", "failed"]


def test_a_folder_of_runs_is_all_of_them(rlcli):
    for number in (1, 2):
        record_run(Path(f"runs/ppo_math/sweep/{number}"))
    assert len(rlcli("watch", "ppo_math/sweep")[1].splitlines()) == 2


def test_without_running_runs_there_is_nothing_to_watch(rlcli):
    record_run(Path("runs/ppo_math/one"))
    code, out, err = rlcli("watch")
    assert (code, out) == (0, "")
    assert "rlcli status" in err
    assert json.loads(rlcli("watch", "--json")[1]) == {"runs": []}
