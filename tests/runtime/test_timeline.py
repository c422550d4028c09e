"""Where the time of a step goes: what each rank works on, what it waits for, and which metrics
follow."""

import itertools
import weakref
from collections import defaultdict

import pytest

from rlcli.api.timing import TimeSpan, Timing
from rlcli.messaging.messages import COMPUTE, MOVE
from rlcli.observe.trace import MASTER, TraceFile, read_trace
from rlcli.runtime.call_times import INPUTS, TURN, WEIGHTS, WORK
from rlcli.runtime.clocks import Clocks
from rlcli.runtime.rank_times import RankTimes
from rlcli.runtime.timeline import Timeline
from rlcli.topology import WorkerGroup
from rlcli.topology.groups import MOVES

GROUPS = [
    WorkerGroup((0, 1), ("actor", "critic")),
    WorkerGroup((2,), ("rollout",)),
    WorkerGroup((3,), ("ref",)),
]
POOL = "reward-pool"


class Run:
    """A timeline whose clock is set by hand."""

    def __init__(self, folder):
        self.now, self.numbers = 0.0, itertools.count(1)
        self.ranks = RankTimes(Clocks(4), lambda: self.now)
        self.file = TraceFile(folder, 10)
        self.folder = folder
        self.timeline = Timeline(GROUPS, self.ranks, {MOVES, POOL}, lambda: self.now)
        self.timeline.write_to(self.file)

    def work(self, name, lane=COMPUTE, op="run_call", of=None, inner=(), **times):
        """A request that ranks answer, each with when it began and ended: `r0=(1, 2)`."""
        number, before = next(self.numbers), self.now
        ranks = {int(rank[1:]): interval for rank, interval in times.items()}
        of = of or self.timeline.follow(name, "inference", "step 1", tuple(ranks))
        self.now = min(began for began, _ in ranks.values())
        self.ranks.sent(number, op, name, lane, ranks, of)
        for rank, (began, ended) in ranks.items():
            self.now = ended
            self.ranks.answered(number, rank, lane, Timing(began, ended, spans=[*inner]).as_json())
        self.now = before

    def spans(self, step, process):
        """(name, began, ended) of what ended in a step, since the step began."""
        self.file.write()
        traced = read_trace(self.folder).steps[step]
        began = next(each.span.began for each in traced if each.span.name == f"step {step}")
        return [
            (
                each.span.name,
                round(each.span.began - began, 3),
                round(each.span.ended - began, 3),
            )
            for each in traced
            if each.process == process
        ]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def idle(metrics):
    """Seconds in which each group was idle."""
    return [metrics[f"time/idle/{name}"] for name in ("actor+critic", "rollout", "ref")]


def test_idle_is_what_is_left_of_the_time_of_all_ranks_of_a_group(run):
    run.work("train", r0=(0, 2), r1=(0, 4))
    run.work("value", r0=(4, 6), r1=(4, 6))
    run.work("gen", r2=(2, 9.5))
    run.work("ref", r3=(0, 10))
    run.now = 10.0
    metrics = run.timeline.end_step(1)
    assert metrics["time/step"] == 10.0
    assert idle(metrics) == pytest.approx([5.0, 2.5, 0.0])
    assert metrics["time/idle_share/actor+critic"] == pytest.approx(0.5)


def test_what_a_rank_does_besides_computing_leaves_it_idle(run):
    run.work("move", lane=MOVES, op=MOVE, r0=(0, 8), r1=(0, 8))
    run.work("score", lane=POOL, r0=(0, 10))
    run.now = 10.0
    assert idle(run.timeline.end_step(1)) == [10.0, 10.0, 10.0]


def test_a_move_takes_as_long_as_its_slowest_rank(run):
    run.work("move", lane=MOVES, op=MOVE, r0=(0, 0.5), r2=(0, 2))
    run.work("move", lane=MOVES, op=MOVE, r0=(3, 4), r3=(3, 4))
    run.now = 10.0
    assert run.timeline.end_step(1)["time/moves"] == 3.0


def test_a_call_counts_in_each_step_that_it_overlaps_with(run):
    call = run.timeline.follow("gen", "generate", "chunk 1", (2,))
    run.ranks.sent(0, "run_call", "gen", COMPUTE, [2], call)
    run.now = 10.0
    assert idle(run.timeline.end_step(1))[1] == 0.0, "it is at work"
    run.timeline.begin_step()
    run.now = 14.0
    run.ranks.answered(0, 2, COMPUTE, Timing(1.0, 14.0).as_json())
    run.now = 20.0
    assert idle(run.timeline.end_step(2))[1] == pytest.approx(6.0)


def test_a_step_begins_without_what_was_before_it(run):
    run.work("train", r0=(0, 5), r1=(0, 5))
    run.now = 8.0
    run.timeline.begin_step()
    run.now = 10.0
    metrics = run.timeline.end_step(1)
    assert (metrics["time/step"], *idle(metrics)) == (2.0, 2.0, 2.0, 2.0)


@pytest.fixture
def trained(run):
    """A step whose training waits for the reference, for its turn, and for the master."""
    train = run.timeline.follow("train", "train_step", "step 1", (0, 1))
    with train.stage(INPUTS) as inputs:
        run.now, inputs.cause = 6.0, "ref"
    with train.stage(TURN):
        run.now = 6.5
    with train.stage(WORK):
        run.work("train", of=train, r0=(7, 9.5), r1=(7, 10))
    run.work("ref", r3=(1, 6))
    run.now = 10.0
    run.timeline.end_step(1)
    return run


def test_a_rank_waits_for_what_its_next_call_waits_for(trained):
    assert trained.spans(1, 0) == [
        ("train", 7, 9.5),
        ("waits for ref", 0, 6),
        ("waits for its turn", 6, 6.5),
        ("waits for the master", 6.5, 7),
        ("waits for train", 9.5, 10),
    ]


@pytest.mark.parametrize("rank", range(4))
def test_the_spans_of_a_rank_and_its_waits_fill_the_step(trained, rank):
    spans = sorted(trained.spans(1, rank), key=lambda span: span[1])
    begins, ends = zip(*(span[1:] for span in spans), strict=True)
    assert begins == (0, *ends[:-1])
    assert ends[-1] == 10


def test_a_rank_without_a_next_call_waits_for_the_call_that_ends_last(run):
    run.work("gen", r2=(0, 4))
    run.work("train", r0=(4, 9), r1=(4, 9))
    run.now = 10.0
    run.timeline.end_step(1)
    waits = [("waits for train", 4, 9), ("waits for the master", 9, 10)]
    assert run.spans(1, 2) == [("gen", 0, 4), *waits]


def test_the_way_of_a_call_is_on_a_track_of_the_master(run):
    train = run.timeline.follow("train", "train_step", "step 1", (0, 1))
    with train.stage(INPUTS) as inputs:
        run.now, inputs.cause = 1.0, "ref"
    with train.stage(WEIGHTS):
        pass
    with train.stage(WORK):
        run.now = 3.0
    run.timeline.end(train)
    run.now = 4.0
    run.timeline.end_step(1)
    way = [("waits for ref", 0, 1), ("train", 1, 3)]
    assert run.spans(1, MASTER) == [("step 1", 0, 4), *way]


def test_what_overlaps_is_drawn_on_several_tracks(run):
    run.work("gen", lane="rollout-responses", r2=(0, 6))
    run.work("gen", lane="rollout-responses", r2=(2, 4))
    run.work("gen", lane="rollout-responses", r2=(4, 5))
    run.now = 6.0
    run.timeline.end_step(1)
    run.file.write()
    tracks = defaultdict(list)
    for each in read_trace(run.folder).steps[1]:
        if each.span.name == "gen":
            tracks[each.span.track].append(round(each.span.seconds))
    assert tracks == {"rollout-responses": [6], "rollout-responses (2)": [2, 1]}


def test_tasks_and_waits_inside_a_call_are_drawn_with_it(run):
    task = TimeSpan("score", "task", 1.0, 2.0, "reward-pool0")
    wait = TimeSpan("other calls that sample", "wait", 2.0, 3.0)
    run.work("score", lane=POOL, inner=[task, wait], r0=(0, 4))
    run.now = 4.0
    run.timeline.end_step(1)
    run.file.write()
    inner = {each.span.name: each for each in read_trace(run.folder).steps[1] if each.of}
    assert inner["score"].span.track in (POOL, "reward-pool0")
    assert inner["waits for other calls that sample"].span.track == POOL


def test_calls_of_a_step_are_not_kept_where_no_timeline_is_written(run, tmp_path):
    run.timeline.write_to(TraceFile(tmp_path, 0))
    call = run.timeline.follow("gen", "generate", "step 1", (0,))
    run.timeline.end(call)
    reference = weakref.ref(call)
    del call
    run.timeline.end_step(1)
    assert reference() is None


def test_seconds_of_a_call_are_without_those_that_it_waits_for_others():
    assert Timing(1.0, 4.0, apart=0.5).seconds == 2.5


def test_clocks_of_other_nodes_are_measured_by_the_answers(tmp_path):
    """The clock of node 1 is 100 s ahead; messages take up to 0.3 s, requests wait in a queue."""
    clocks, ahead = Clocks(ranks_per_node=2), 100.0
    for sent, wait, work, back in [(0, 0.2, 1, 0.1), (5, 3, 1, 0.3), (9, 0.1, 1, 2), (12, 1, 1, 1)]:
        began = sent + wait
        clocks.note(2, sent, began + ahead, began + work + ahead, began + work + back)
        clocks.note(1, sent, began, began + work, began + work + back)
    described = clocks.described()
    assert list(described) == ["node 1"]
    assert described["node 1"]["error"] == pytest.approx(0.1)
    assert abs(clocks.ahead(3) - ahead) <= described["node 1"]["error"]
    assert clocks.ahead(0) == clocks.ahead(1) == 0.0


def test_times_of_ranks_are_those_of_the_clock_of_the_master(tmp_path):
    now = 0.0
    ranks = RankTimes(Clocks(ranks_per_node=1), lambda: now)
    ranks.sent(1, "run_call", "gen", COMPUTE, [1], None)
    now = 2.0
    ranks.answered(
        1, 1, COMPUTE, Timing(50.5, 51.5, spans=[TimeSpan("x", "wait", 51, 51.2)]).as_json()
    )
    (work,), _ = ranks.drain()
    assert (work.timing.began, work.timing.ended) == pytest.approx((0.5, 1.5))
    assert work.timing.spans[0].began == pytest.approx(1.0)
