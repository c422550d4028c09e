"""`rlcli report`: where it writes the page, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

from recorded_runs import record_run


def test_the_page_of_a_run_is_written_into_its_folder(rlcli):
    run = record_run(Path("runs/ppo_math/one"))
    code, out, err = rlcli("report", "one")
    assert (code, out, err) == (0, "runs/ppo_math/one/report.html\n", "")
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_the_page_of_several_runs_is_written_here(rlcli, tmp_path):
    for seed in (1, 2):
        record_run(Path(f"runs/ppo_math/sweep/{seed}"), seed=seed)
    document = json.loads(rlcli("report", "ppo_math/sweep", "--json")[1])
    assert (document["file"], len(document["runs"])) == ("report.html", 2)
    assert document["bytes"] == (tmp_path / "report.html").stat().st_size


def test_a_page_has_another_name_on_request(rlcli, tmp_path):
    record_run(Path("runs/ppo_math/one"))
    assert rlcli("report", "one", "-o", "one.html")[0] == 0
    assert (tmp_path / "one.html").is_file()
    code, _, err = rlcli("report", "one", "-o", "one.pdf")
    assert (code, "-o one.html" in err) == (2, True)
    assert rlcli("report", "one", "-o", "missing/one.html")[0] == 6


def test_a_page_needs_runs_or_the_demo(rlcli):
    record_run(Path("runs/ppo_math/one"))
    for words in ((), ("one", "--demo")):
        code, _, err = rlcli("report", *words)
        assert (code, "--demo" in err) == (2, True)
    assert rlcli("report", "nothing")[0] == 6


def test_the_demo_needs_no_run(rlcli):
    assert rlcli("report", "--demo")[1] == "report.html\n"
