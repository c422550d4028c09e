"""`rlcli train --profile`: traces and a table of the calls of some steps, and the metrics that say
how fast roles compute."""

import json

import pytest
from run_files import numbers, samples

pytestmark = pytest.mark.timeout(420)  # some are several runs

CALLS = {"actor_gen", "ref_inf", "critic_inf", "actor_train", "critic_train"}
"""Those that compute with a model."""


def events(file):
    return json.loads(file.read_text())["traceEvents"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_ppo, train_into):
    """The same training with a profile of its second step and without one."""
    home = tmp_path_factory.mktemp("runs")
    return [
        train_into(home, "ppo_math", *tiny_ppo, *extra, name=name)
        for name, extra in {"profiled": ("--profile", "2"), "plain": ()}.items()
    ]


@pytest.mark.long
def test_the_calls_of_a_profiled_step_are_traced(runs):
    profiled, plain = runs
    assert profiled.code == plain.code == 0, profiled.err + plain.err
    files = sorted(file.name for file in (profiled.folder / "profile").iterdir())
    assert files == ["step2-calls.json", "step2-rank0.json"]
    traced = events(profiled.folder / "profile" / "step2-rank0.json")
    calls = {event["name"]: event for event in traced if event["cat"] == "call"}
    assert set(calls) >= CALLS
    products = [event for event in traced if event["name"] == "aten::mm"]
    for call in calls.values():
        end = call["ts"] + call["dur"]
        inside = [event for event in products if call["ts"] <= event["ts"] < end]
        assert bool(inside) == (call["name"] in CALLS), call["name"]
    assert not (plain.folder / "profile").exists()


@pytest.mark.long
def test_the_report_has_a_table_of_calls_and_names_the_trace(runs):
    profiled, plain = runs
    assert "profile: run" not in plain.out
    assert "profile: profiled/profile/step2-rank0.json" in profiled.out
    rows = [line.split() for line in profiled.out.splitlines() if line.strip().startswith("2 ")]
    assert {row[1] for row in rows} >= CALLS
    for row in rows:
        assert (row[3] != "-") == (row[1] in CALLS)
        assert (row[5] != "-") == (row[1] in CALLS)


@pytest.mark.long
def test_a_profile_changes_no_result(runs):
    profiled, plain = (run.folder for run in runs)
    assert samples(profiled) == samples(plain)
    assert numbers(profiled) == numbers(plain)


@pytest.mark.long
def test_the_utilisation_is_known_once_it_was_measured(runs):
    profiled, plain = runs
    assert not [name for record in plain.records for name in record if name.endswith("/mfu")]
    first, second = profiled.steps
    assert not [name for name in first if name.endswith("/mfu")]
    assert {name for name in second if name.endswith("/mfu")} == {
        "perf/actor/mfu",
        "perf/ref/mfu",
        "perf/critic/mfu",
    }


@pytest.mark.long
def test_the_utilisation_follows_from_a_stated_rate_and_the_time_of_the_calls(train, tiny_ppo):
    run = train("ppo_math", *tiny_ppo, "log.peak_tflops=0.5")
    assert run.code == 0, run.err
    for step in run.steps:
        seconds = step["time/actor_gen"] + step["time/actor_train"]
        share = step["perf/actor/flops"] / (seconds * 0.5e12)
        assert step["perf/actor/mfu"] == pytest.approx(share)


@pytest.mark.long
def test_ranks_have_traces_of_their_own_and_count_what_one_rank_computes(train, tiny_ppo, runs):
    ranks = ("launch=local", "cluster.devices_per_node=2", "train.microbatches=1")
    run = train("ppo_math", *tiny_ppo, *ranks, "--profile", "1-2", "--json")
    assert run.code == 0, run.err
    named = [file.rsplit("/", 1)[1] for file in json.loads(run.out)["profile"]]
    assert named == [f"step{step}-rank{rank}.json" for step in (1, 2) for rank in (0, 1)]
    for ours, alone in zip(run.steps, runs[1].steps, strict=True):
        for role in ("actor", "critic", "ref"):
            name = f"perf/{role}/flops"
            assert ours[name] == pytest.approx(alone[name], rel=0.1)


@pytest.mark.parametrize("steps", ["0", "3-2", "1-11", "two", "2-"])
def test_steps_that_cannot_be_profiled_are_refused(train, tiny_ppo, steps):
    run = train("ppo_math", *tiny_ppo, "--profile", steps)
    assert run.code == 2, run.out
    assert "log.profile" in run.err
    assert "Traceback" not in run.err
