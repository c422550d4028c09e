"""The timeline of whole runs, by the toy recipe, whose calls sleep."""

import json
from collections import defaultdict
from itertools import combinations
from statistics import median

import pytest

from rlcli.observe.critical_path import BETWEEN, critical_path, steps_of
from rlcli.observe.trace import MASTER, TRACE, read_trace
from rlcli.recipe.resolve import load_recipe
from rlcli.topology import plan_topology
from rlcli.topology.overlap import Timetable

pytestmark = pytest.mark.timeout(420)  # a start on two ranks takes a while on a slow machine


def takes(seconds):
    return f"{{type: toy, args: {{seconds: {seconds}}}}}"


CALLS = ("gen", "value", "train_actor", "train_critic")
APART = (
    "launch=local",
    "cluster.devices_per_node=2",
    "train.eval.dataset=null",
    "models.actor.devices='0'",
    "models.critic.devices='1'",
    "models.reward.devices='0'",
    *(f"graph.{call}.interface={takes(0.2)}" for call in CALLS),
)
"""The critic has a rank of its own: it trains while the actor does."""


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def seconds_of_spans(step):
    """Of the critical path, and of each rank's calls and waits."""
    sums = defaultdict(float, path=sum(stretch.seconds for stretch in critical_path(step)))
    for each in step.traced:
        if each.process != MASTER and each.span.track == "calls":
            sums[each.process] += step.inside(each.span)
    return dict(sums)


@pytest.mark.usefixtures("quick_ranks")
def test_the_spans_of_each_rank_and_the_path_add_up_to_the_time_of_the_step(train):
    _, folder = train(*APART)
    steps = {step.number: step for step in steps_of(read_trace(folder))}
    assert list(steps) == [1, 2, 3]
    gaps = defaultdict(list)
    for record in records(folder):
        step, seconds = steps[record["step"]], record["time/step"]
        assert step.seconds == pytest.approx(seconds, rel=0.02)
        for name, spans in seconds_of_spans(step).items():
            gaps[name].append(abs(spans / seconds - 1))
    assert gaps.keys() == {0, 1, "path"}
    for name, of_steps in gaps.items():  # a busy machine may stop a process between two spans
        assert median(of_steps) <= 0.02, name


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
def test_a_rank_waits_for_the_call_that_keeps_it_from_working(train):
    _, folder = train(*APART)
    step = steps_of(read_trace(folder))[0]
    took = {each.span.name: each.span.seconds for each in step.calls}
    waits = defaultdict(float)
    for wait in step.waits:
        waits[wait.process, wait.cause] += step.inside(wait.span)
    assert waits[1, "gen"] >= 0.7 * took["gen"]
    assert waits[0, "value"] >= 0.7 * took["value"]
    names = [
        stretch.name
        for stretch in critical_path(step)
        if stretch.seconds > 0.1 and stretch.kind != BETWEEN
    ]
    assert names[:2] == ["gen", "value"]
    assert names[2] in ("train_actor", "train_critic")


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize("staleness", [0, 1])
def test_calls_overlap_as_the_plan_says(train, staleness):
    overrides = (*APART, f"train.max_staleness={staleness}", "train.steps=6")
    _, folder = train(*overrides)
    recipe = load_recipe("toy.yaml", overrides).recipe
    table = Timetable(recipe, plan_topology(recipe))
    planned = {
        frozenset([call, another])
        for steps_before in (0, 1)
        for call, others in table.overlaps(steps_before).items()
        for another in others
    }
    pairs = overlapping(each for step in steps_of(read_trace(folder)) for each in step.calls)
    assert pairs <= planned
    assert frozenset(["train_actor", "train_critic"]) in pairs


def overlapping(calls):
    """Pairs of calls that run at the same time, on any ranks and on whatever samples, for longer
    than it takes to send a request."""
    spans = {(each.span.name, each.of, each.span.began, each.span.ended) for each in calls}
    return {
        frozenset([first, second])
        for (first, _, began, ended), (second, _, later, end) in combinations(spans, 2)
        if min(ended, end) - max(began, later) > 0.02 and first != second
    }


def test_the_timeline_of_a_resumed_run_continues(train, resume):
    _, folder = train("train.steps=2", "train.eval.dataset=null")
    before = read_trace(folder)
    resume("train.steps=4", accept=True)
    after = read_trace(folder)
    assert list(after.steps) == [1, 2, 3, 4]
    assert after.began == before.began
    ends = [step.window.ended for step in steps_of(after)]
    assert ends == sorted(ends)
    assert ends[:2] == [step.window.ended for step in steps_of(before)]


def test_files_of_a_checkpoint_are_written_besides_the_calls(train):
    _, folder = train("checkpoint.every_steps=1", "train.eval.dataset=null")
    spans = [each.span for step in steps_of(read_trace(folder)) for each in step.traced]
    assert "writing the checkpoint of step 1" in {span.name for span in spans}


def test_a_run_may_have_no_timeline(train):
    _, folder = train("log.trace_steps=0", "train.eval.dataset=null")
    assert not (folder / TRACE).exists()
    assert all("time/step" in record for record in records(folder))
