"""`rlcli profile`: the critical path of a step."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from recorded_runs import record_run, record_timeline

from rlcli.observe.profile import ProfiledCall, described

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


def test_json_has_the_operations_of_profiled_steps(rlcli):
    recorded()
    call = ProfiledCall(2, "train", 0.5, 3e9, None)
    file, text = described(2, [call])
    (RUN / file).parent.mkdir()
    (RUN / file).write_text(text)
    document = json.loads(rlcli("profile", "recorded", "--json")[1])
    assert document["operations"] == [asdict(call)]


def test_a_run_without_a_timeline_says_when_there_is_one(rlcli):
    record_run(RUN)
    code, _, err = rlcli("profile", "recorded")
    assert (code, "log.trace_steps" in err) == (6, True)
