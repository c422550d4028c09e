"""The unrolled graph: what may run when."""

from dataclasses import replace

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.dataflow import MFCDef, ModelInterfaceType, ParamReallocHook
from rlcli.runtime.scheduler import Scheduler

KINDS = {"generate": ModelInterfaceType.GENERATE, "inference": ModelInterfaceType.INFERENCE,
         "train_step": ModelInterfaceType.TRAIN_STEP}  # fmt: skip


def mfc(name, role, kind, inputs=(), outputs=()):
    return MFCDef(
        name=name, model_name=role, interface_type=KINDS[kind], interface_impl=ModelInterfaceAbstraction("x"),
        input_keys=tuple(inputs), output_keys=tuple(outputs),
    )  # fmt: skip


PPO = [
    mfc("gen", "actor", "generate", ["prompts"], ["ids"]),
    mfc("rew", "reward", "inference", ["ids"], ["rewards"]),
    mfc("val", "critic", "inference", ["ids"], ["values"]),
    mfc("a_train", "actor", "train_step", ["ids", "rewards", "values"]),
    mfc("c_train", "critic", "train_step", ["ids", "rewards", "values"]),
]


def run(scheduler, slow=()):
    """Serve ready calls one by one, those named in `slow` last; returns the order of completion."""
    done, under_way = [], []
    while not scheduler.finished:
        for task in scheduler.ready():
            scheduler.start(task)
            under_way.append(task)
        assert under_way, f"nothing can run after {done}"
        task = next((t for t in under_way if t.call not in slow), under_way[0])
        under_way.remove(task)
        scheduler.finish(task)
        done.append((task.step, task.call))
    return done


def names(tasks):
    return [(task.step, task.call) for task in tasks]


def test_without_staleness_the_steps_follow_each_other():
    order = run(Scheduler(PPO, steps=3))
    one = ["gen", "rew", "val", "a_train", "c_train"]
    assert order == [(step, call) for step in range(3) for call in one]


def test_calls_that_do_not_wait_for_each_other_are_ready_together():
    scheduler = Scheduler(PPO, steps=1)
    (gen,) = scheduler.ready()
    scheduler.start(gen)
    assert scheduler.ready() == []
    scheduler.finish(gen)
    assert names(scheduler.ready()) == [(0, "rew"), (0, "val")]


def test_overlap_generates_while_another_role_still_trains():
    alone, overlapping = Scheduler(PPO, steps=2), Scheduler(PPO, steps=2, window=2)
    for scheduler, expected in ((alone, []), (overlapping, [(1, "gen")])):
        while (0, "c_train") not in names(ready := scheduler.ready()):
            for task in ready:
                scheduler.start(task)
                scheduler.finish(task)
        for task in ready:
            scheduler.start(task)
        scheduler.finish(next(task for task in ready if task.call == "a_train"))
        assert names(scheduler.ready()) == expected


def test_training_waits_for_the_other_calls_of_its_role():
    """They are to see the weights from before the update, whatever rank is slow."""
    graph = [
        mfc("look", "actor", "inference", ["prompts"], ["unused"]),
        mfc("slow", "other", "inference", ["prompts"], ["late"]),
        mfc("late_look", "actor", "inference", ["late"], ["more"]),
        mfc("train", "actor", "train_step", ["prompts"]),
    ]
    order = run(Scheduler(graph, steps=2), slow=("slow",))
    for step in range(2):
        assert order.index((step, "late_look")) < order.index((step, "train"))


def test_two_training_calls_of_one_role_make_one_version():
    graph = [
        mfc("gen", "actor", "generate", ["prompts"], ["ids"]),
        mfc("one", "actor", "train_step", ["ids"]),
        mfc("two", "actor", "train_step", ["ids"]),
    ]
    order = run(Scheduler(graph, steps=2))
    assert order == [(step, call) for step in range(2) for call in ("gen", "one", "two")]


def test_a_step_is_over_when_all_its_calls_are_done():
    scheduler = Scheduler(PPO[:2], steps=1)
    for call in ("gen", "rew"):
        assert not scheduler.is_over(0)
        (task,) = scheduler.ready()
        assert task.call == call
        scheduler.start(task)
        scheduler.finish(task)
    assert scheduler.is_over(0)
    assert scheduler.finished


FOLLOWED = [
    mfc("gen", "rollout", "generate", ["prompts"], ["ids"]),
    mfc("ref", "ref", "inference", ["ids"], ["ref_logprobs"]),
    mfc("other", "ref", "inference", ["ids"], ["unread"]),
    replace(
        mfc("train", "actor", "train_step", ["ids", "ref_logprobs"]),
        post_hooks=(ParamReallocHook(target="rollout"), ParamReallocHook(target="ref", eta=0.1)),
    ),
]


def test_a_role_that_follows_another_has_the_version_of_its_source():
    order = run(Scheduler(FOLLOWED, steps=4, window=2), slow=("train",))
    for step in range(4):
        before = order[: order.index((step, "gen"))]
        assert len([call for _, call in before if call == "train"]) >= step
        assert order.index((step, "ref")) > order.index((step - 1, "train")) if step else True


def test_weights_are_not_replaced_under_a_call_that_wants_those_from_before():
    """A follower's calls of a step come before the copy at its end, also where no key links them."""
    scheduler = Scheduler(FOLLOWED, steps=1)
    for call in ("gen", "ref"):
        task = next(task for task in scheduler.ready() if task.call == call)
        scheduler.start(task)
        scheduler.finish(task)
    assert names(scheduler.ready()) == [(0, "other")]
    scheduler.start(scheduler.ready()[0])
    assert names(scheduler.ready()) == [(0, "train")]


def test_a_resumed_run_counts_the_versions_of_followers_from_its_checkpoint():
    assert names(Scheduler(FOLLOWED, steps=5, first_step=3).ready()) == [(3, "gen")]


def serve(scheduler):
    """Run what is ready until nothing is; returns the calls in order."""
    done = []
    while ready := scheduler.ready():
        scheduler.start(ready[0])
        scheduler.finish(ready[0])
        done.append((ready[0].step, ready[0].call))
    return done


def test_where_calls_drop_samples_training_waits_for_the_batch():
    scheduler = Scheduler(PPO, steps=2, drops=True)
    assert serve(scheduler) == [(0, "gen"), (0, "rew"), (0, "val")]
    assert scheduler.chooses(0)
    scheduler.repeat(0)
    assert not scheduler.chooses(0)
    assert serve(scheduler) == [(0, "gen"), (0, "rew"), (0, "val")]
    scheduler.close(0)
    assert not scheduler.chooses(0)
    assert serve(scheduler) == [(0, "a_train"), (0, "c_train"), (1, "gen"), (1, "rew"), (1, "val")]
    assert scheduler.is_over(0)
    assert scheduler.chooses(1)


def test_what_waits_for_changed_weights_works_on_the_batch_too():
    graph = [
        mfc("gen", "actor", "generate", ["prompts"], ["ids"]),
        replace(mfc("look", "critic", "inference", ["ids"], ["seen"]), post_hooks=(ParamReallocHook(target="ref"),)),
        mfc("after", "reward", "inference", ["seen"], ["unread"]),
    ]
    scheduler = Scheduler(graph, steps=1, drops=True)
    assert serve(scheduler) == [(0, "gen")]
    assert scheduler.chooses(0)
    scheduler.close(0)
    assert serve(scheduler) == [(0, "look"), (0, "after")]
    assert scheduler.finished


def test_without_training_a_step_that_drops_is_over_once_it_is_closed():
    scheduler = Scheduler(PPO[:2], steps=1, drops=True)
    assert serve(scheduler) == [(0, "gen"), (0, "rew")]
    assert not scheduler.is_over(0)
    scheduler.close(0)
    assert scheduler.is_over(0)
