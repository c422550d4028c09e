"""Whole runs whose policy plays episodes."""

import pytest
from toy_project import TINY_PPO

pytestmark = pytest.mark.timeout(300)

ACTOR_GEN = "graph.actor_gen.interface"
TINY = (
    "models.actor.backend.args.warmup_steps=0",
    "models.actor.backend.args.eps=1e-5",  # as usual, it would let rounding move weights
    "generation.responses_per_prompt=4",
    "train.prompts_per_step=4",
    "train.eval.dataset=null",
    "train.steps=2",
    "log.plot=false",
    "log.tensorboard=false",
)


def numbers_of(run, *names):
    assert run.code == 0, run.err
    return [[step[name] for name in names] for step in run.steps]


def test_episodes_of_one_turn_train_like_plain_responses_bit_for_bit(tmp_path, train_into):
    settings = (*TINY_PPO, "generation.responses_per_prompt=4")
    one_turn = "{_replace_: true, type: episodes, args: {environment: calculator, max_turns: 1}}"
    generation = f"{ACTOR_GEN}.args.generation=${{generation}}"
    plain = train_into(tmp_path, "grpo_math", *settings, name="plain")
    played = train_into(
        tmp_path, "grpo_math", *settings, f"{ACTOR_GEN}={one_turn}", generation, name="played"
    )
    names = ("actor/loss", "actor/grad_norm", "reward/reward", "actor/kl")
    assert numbers_of(played, *names) == numbers_of(plain, *names)


def test_layouts_of_ranks_play_the_same_episodes(tmp_path, train_into):
    variants = {
        "inline": (),
        "micro_batches": ("train.microbatches=3",),
        "two_ranks": ("launch=local", "cluster.devices_per_node=2"),
    }
    runs = {
        name: train_into(tmp_path, "grpo_guess", *TINY, *extra, name=name)
        for name, extra in variants.items()
    }
    expected = numbers_of(runs["inline"], "actor/turns", "actor/out_of_turns", "actor/reward")
    assert all(turns > 1 for turns, _, _ in expected)
    losses = numbers_of(runs["inline"], "actor/loss")
    for run in runs.values():
        played = numbers_of(run, "actor/turns", "actor/out_of_turns", "actor/reward")
        for ours, theirs in zip(played, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        for (ours,), (theirs,) in zip(numbers_of(run, "actor/loss"), losses, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
