"""Which calls of a run may overlap, and the picture of a few steps."""

from __future__ import annotations

import pytest

from rlcli.api.dataflow import CallGraph, in_turn, weight_writers
from rlcli.recipe.graph import train_graph
from rlcli.recipe.resolve import load_recipe
from rlcli.topology.overlap import COLUMNS, Timetable
from rlcli.topology.report import make_plan, plan_json
from rlcli.topology.text import plan_lines

APART = ("launch=local", "cluster.devices_per_node=2", "models.actor.rollout.devices=1")
TRAINING = [
    *("reward_inf", "ref_inf", "critic_inf", "actor_inf"),
    *("advantages", "actor_train", "critic_train"),
]


def plan(*overrides, profiles=("async",)):
    return make_plan(load_recipe("ppo_math", overrides, profiles))


def timetable(*overrides, profiles=("async",)):
    planned = plan(*overrides, profiles=profiles)
    return Timetable(planned.recipe, planned.topology)


def test_generation_ahead_overlaps_with_every_call_of_the_previous_step():
    table = timetable(*APART)
    assert table.overlaps(1) == {"actor_gen": TRAINING}
    assert table.overlaps(0) == {}


def test_synchronous_generation_overlaps_only_with_training_of_the_critic():
    assert timetable(*APART, "train.max_staleness=0").overlaps(1) == {"actor_gen": ["critic_train"]}


def test_calls_of_one_step_overlap_on_separate_devices():
    cluster = ("launch=local", "cluster.devices_per_node=2", "models.ref.devices=1")
    placement = ("models.actor.devices=0", "models.critic.devices=0", "models.reward.devices=0")
    table = timetable(*cluster, *placement, profiles=())
    assert table.overlaps(0) == {"reward_inf": ["ref_inf"], "ref_inf": ["critic_inf"]}


def test_on_one_device_nothing_overlaps():
    planned = plan(profiles=())
    table = Timetable(planned.recipe, planned.topology)
    assert table.overlaps(1) == table.overlaps(0) == {}
    assert not any("overlaps" in line for line in plan_lines(planned, timeline=True))


def test_the_picture_has_the_order_of_a_synchronous_run():
    """Each call starts as in a run: once its inputs and weights are ready,
    and in its turn on each rank."""
    planned = plan(*APART, "train.max_staleness=0")
    table, graph = Timetable(planned.recipe, planned.topology), train_graph(planned.recipe)
    rows, turns = table.turns(), [mfc.name for mfc in in_turn(graph)]
    mfcs, makers, writers = (
        {mfc.name: mfc for mfc in graph},
        CallGraph(graph).reads,
        weight_writers(graph),
    )
    done, started = set(), {}
    for turn in range(COLUMNS):
        for name, row in rows.items():
            if turn and row[turn - 1] is not None and row[turn] != row[turn - 1]:
                done.add((name, row[turn - 1]))
        for name in turns:
            step = rows[name][turn]
            if step is None or (name, step) in started:
                continue
            started[name, step] = turn
            before = {(maker, step) for maker in makers[name]}
            before |= {
                (writer, step - 1) for writer in writers.get(mfcs[name].model_name, ()) if step > 1
            }
            assert before <= done
    assert max(step for _, step in started) > 2  # several steps were drawn
    for rank in range(planned.topology.world_size):
        of_rank = [
            (start, step, turns.index(name))
            for (name, step), start in started.items()
            if rank in table.places[name]
        ]
        assert [task[1:] for task in sorted(of_rank)] == sorted(task[1:] for task in of_rank)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_generation_in_the_picture_is_as_far_ahead_as_allowed(staleness):
    table = timetable(*APART, f"train.max_staleness={staleness}")
    turns = table.turns()
    lags = set()
    for turn in range(COLUMNS):
        busy = [
            rank
            for name, row in turns.items()
            if row[turn] is not None
            for rank in table.places[name]
        ]
        assert len(busy) == len(set(busy))
        if (sampled := turns["actor_gen"][turn]) is not None and turns["actor_gen"][
            turn - 1
        ] != sampled:
            trained = max(
                (step for step in turns["actor_train"][:turn] if step is not None), default=0
            )
            lags.add(sampled - 1 - trained)
    assert max(lags) == staleness


def test_the_plan_shows_overlaps_in_80_columns_and_in_json():
    planned = plan(*APART)
    lines = list(plan_lines(planned, timeline=True))
    start = next(number for number, line in enumerate(lines) if line.startswith("timeline:"))
    assert lines[start + 8].split()[:12] == ["1", "actor_gen", *"11112222", "·", "·"]
    assert max(map(len, lines)) <= 80
    assert "  actor_gen overlaps with reward_inf, ref_inf, critic_inf, actor_inf," in lines
    assert plan_json(planned)["overlaps"] == {
        "same_step": {},
        "step_before": {"actor_gen": TRAINING},
    }
