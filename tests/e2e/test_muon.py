"""Runs that train with Muon: interrupted, resumed, and with another optimizer afterwards."""

import pytest
from run_files import numbers

pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]  # some are several runs

MUON = (
    "models.actor.backend.args.optimizer=muon",
    "models.actor.backend.args.schedule=constant",  # so that runs of other lengths are the same
    "models.critic.backend.args.schedule=constant",
    "checkpoint.every_steps=1",
)


def small(changes, steps):
    """The changes that make a recipe small, and Muon."""
    return [
        *(c for c in changes if not c.startswith("train.steps=")),
        *MUON,
        f"train.steps={steps}",
    ]


def last_two(run, name):
    return [record[name] for record in numbers(run.folder)[-2:]]


def test_a_resumed_run_equals_the_uninterrupted_run(train, warm_command, tiny_ppo):
    uninterrupted = train("ppo_math", *small(tiny_ppo, 3), name="uninterrupted")
    run = train("ppo_math", *small(tiny_ppo, 1))
    assert uninterrupted.code == run.code == 0, uninterrupted.err + run.err
    resumed = warm_command("resume", "run", "train.steps=3", cwd=run.folder.parent)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("step", "actor/loss", "actor/grad_norm"):
        assert last_two(run, name) == last_two(uninterrupted, name)
    model = "models/actor/model.safetensors"
    assert (run.folder / model).read_bytes() == (uninterrupted.folder / model).read_bytes()


def test_another_optimizer_is_refused_on_resume(train, warm_command, tiny_ppo):
    run = train("ppo_math", *small(tiny_ppo, 1))
    assert run.code == 0, run.err
    change = "models.actor.backend.args.optimizer=adamw"
    resumed = warm_command(
        "resume", "run", "train.steps=2", change, "--accept-changes", cwd=run.folder.parent
    )
    assert resumed.returncode == 2, resumed.stdout
    assert "models.actor.backend.args.optimizer" in resumed.stderr
    assert "Traceback" not in resumed.stderr
