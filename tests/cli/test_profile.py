"""`rlcli profile`: the critical path of a step."""

from __future__ import annotations

import json
from pathlib import Path

from recorded_runs import record_run, record_timeline

RUN = Path("runs/ppo_math/recorded")


def recorded():
    record_run(RUN)
    record_timeline(RUN)


def test_the_profile_is_one_screen(rlcli, pages):
    recorded()
    code, out, err = rlcli("profile", "recorded")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert out == pages


def test_a_step_is_named(rlcli):
    recorded()
    document = json.loads(rlcli("profile", "recorded", "--step", "2", "--json")[1])
    assert (document["step"], document["steps"]) == (2, [1, 2, 3])
    assert [row["call"] for row in document["path"]] == ["gen", "ref", "train", "between calls"]
    code, _, err = rlcli("profile", "recorded", "--step", "9")
    assert (code, "it has steps 1 to 3" in err) == (2, True)


def test_a_run_without_a_timeline_says_when_there_is_one(rlcli):
    record_run(RUN)
    code, _, err = rlcli("profile", "recorded")
    assert (code, "log.trace_steps" in err) == (6, True)
