"""How a batch goes through calls: in which order they take their turns,
and which weights they wait for."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.dataflow import MFCDef, ModelInterfaceType, ParamReallocHook, in_turn
from rlcli.errors import UsageError
from rlcli.runtime.flow import Batch, Conditions, Gate, Versions

KINDS = {
    "generate": ModelInterfaceType.GENERATE,
    "inference": ModelInterfaceType.INFERENCE,
    "train_step": ModelInterfaceType.TRAIN_STEP,
}


def mfc(name, role, kind, inputs=(), outputs=(), copies_to=()):
    return MFCDef(
        name=name,
        model_name=role,
        interface_type=KINDS[kind],
        interface_impl=ModelInterfaceAbstraction("x"),
        input_keys=tuple(inputs),
        output_keys=tuple(outputs),
        post_hooks=tuple(ParamReallocHook(target=target) for target in copies_to),
    )


PPO = [
    mfc("gen", "actor", "generate", ["prompts"], ["ids"]),
    mfc("rew", "reward", "inference", ["ids"], ["rewards"]),
    mfc("val", "critic", "inference", ["ids"], ["values"]),
    mfc("a_train", "actor", "train_step", ["ids", "rewards", "values"]),
    mfc("c_train", "critic", "train_step", ["ids", "rewards", "values"]),
]
FOLLOWED = [
    mfc("gen", "rollout", "generate", ["prompts"], ["ids"]),
    mfc("ref", "ref", "inference", ["ids"], ["ref_logprobs"]),
    mfc("train", "actor", "train_step", ["ids", "ref_logprobs"], copies_to=["rollout", "ref"]),
    mfc("other", "ref", "inference", ["ids"], ["unread"]),
]


def names(calls):
    return [call.name for call in calls]


def test_turns_have_the_order_of_the_graph():
    assert names(in_turn(PPO)) == names(PPO)


def test_a_call_takes_its_turn_after_those_that_it_reads_from():
    assert names(in_turn([PPO[3], PPO[4], *PPO[:3]])) == ["gen", "rew", "val", "a_train", "c_train"]


def test_training_takes_its_turn_after_the_other_calls_of_its_role():
    """They are to see the weights from before the update, wherever they are in the graph."""
    graph = [
        mfc("train", "actor", "train_step", ["prompts"]),
        mfc("look", "actor", "inference", ["prompts"], ["unused"]),
        mfc("slow", "other", "inference", ["prompts"], ["late"]),
        mfc("late_look", "actor", "inference", ["late"], ["more"]),
    ]
    assert names(in_turn(graph)) == ["look", "slow", "late_look", "train"]


def test_weights_are_not_replaced_under_a_call_of_a_follower():
    assert names(in_turn(FOLLOWED)) == ["gen", "ref", "other", "train"]


def test_a_call_that_reads_from_training_has_its_turn_after_it():
    graph = [
        mfc("train", "actor", "train_step", ["prompts"], ["advice"]),
        mfc("look", "actor", "inference", ["advice"], ["unused"]),
    ]
    assert names(in_turn(graph)) == ["train", "look"]


def test_calls_that_need_each_others_old_weights_are_refused():
    graph = [
        mfc("a_train", "a", "train_step", ["prompts"], ["x"]),
        mfc("b_train", "b", "train_step", ["prompts"], ["y"]),
        mfc("a_look", "a", "inference", ["y"], ["u"]),
        mfc("b_look", "b", "inference", ["x"], ["v"]),
    ]
    with pytest.raises(
        UsageError, match="wait for each other's weights: a_train, b_train, a_look, b_look"
    ):
        in_turn(graph)


def test_a_call_waits_for_the_weights_that_the_step_before_has_trained():
    versions = Versions(PPO, 0)
    assert versions.have_reached(["actor"], 0)
    assert not versions.have_reached(["actor"], 1)
    assert versions.have_reached(["reward"], 7), "its weights never change"
    versions.write(PPO[3], 0)
    assert versions.have_reached(["actor"], 1)
    assert not versions.have_reached(["actor", "critic"], 1)


def test_two_training_calls_of_one_role_make_one_version():
    first, second = (mfc(name, "actor", "train_step", ["ids"]) for name in ("first", "second"))
    versions = Versions([first, second], 0)
    versions.write(first, 0)
    assert versions.of(["actor"]) == 0
    versions.write(second, 0)
    assert versions.of(["actor"]) == 1


def test_a_follower_has_the_version_of_its_source():
    versions = Versions(FOLLOWED, 3)
    assert versions.of(["rollout", "ref"]) == 3
    versions.write(FOLLOWED[2], 3)
    assert versions.of(["rollout", "ref"]) == versions.of(["actor"]) == 4


def test_weights_that_never_change_count_as_those_of_the_finished_steps():
    versions = Versions([replace(PPO[0], model_name="frozen")], 2)
    assert versions.of(["frozen"]) == 2


def test_a_waiting_call_continues_once_the_weights_are_trained():
    progress = Conditions()
    versions, log = Versions(PPO, 0), []

    async def generate():
        await progress.until(lambda: versions.have_reached(["actor"], 1))
        log.append("gen of step 2")

    async def train():
        log.append("train of step 1")
        versions.write(PPO[3], 0)
        progress.note()

    async def both():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(generate())
            tasks.create_task(train())

    asyncio.run(both())
    assert log == ["train of step 1", "gen of step 2"]


def test_a_gate_lets_one_chunk_through_at_a_time_and_counts_the_samples_that_wait():
    gate, log = Gate(), []

    async def go_through(number, samples):
        async with gate.let_through(samples):
            await asyncio.sleep(0)
            log.append((number, gate.waiting))

    async def all_of_them():
        await asyncio.gather(
            *[go_through(number, samples) for number, samples in enumerate((4, 8, 16))]
        )

    asyncio.run(all_of_them())
    assert log == [(0, 24), (1, 16), (2, 0)]


def test_reports_have_the_order_of_the_graph_whichever_call_ends_first():
    batch = Batch("step 1", SimpleNamespace(drop=lambda call, reasons: None), 0)
    for call in (PPO[2], PPO[1], PPO[0]):
        batch.take_in(SimpleNamespace(mfc=call, updates=0, dropped=dict))
    assert names(report.mfc for report in batch.reports_in(PPO)) == ["gen", "rew", "val"]
