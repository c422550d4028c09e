"""When a checkpoint is due, and which step may not begin before it."""

import time

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.recipe.sections.checkpoint import Checkpoint
from rlcli.runtime.checkpoints import Schedule
from rlcli.runtime.data_order import StepSizes, digest_rows


def due_steps(steps, rows=10, rows_per_step=4, **settings):
    schedule = Schedule(
        Checkpoint(**{"every_seconds": None, **settings}), StepSizes(rows, rows_per_step)
    )
    return [step for step in range(1, steps + 1) if schedule.is_due(step)]


def test_a_checkpoint_is_due_every_so_many_steps():
    assert due_steps(9, every_steps=3) == [3, 6, 9]


def test_a_checkpoint_is_due_after_the_step_that_ends_an_epoch():
    # 10 rows, 4 a step: an epoch ends in steps 3 (12 rows), 5 (20 rows), 8 (32), 10 (40)
    assert due_steps(10, every_epochs=1) == [3, 5, 8, 10]
    assert due_steps(10, every_epochs=2) == [5, 10]


def test_steps_and_epochs_can_both_make_a_checkpoint_due():
    assert due_steps(8, every_steps=4, every_epochs=1) == [3, 4, 5, 8]


def test_a_checkpoint_is_due_so_many_seconds_after_the_last_one(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    schedule = Schedule(Checkpoint(every_seconds=60.0), StepSizes(10, 4))
    now[0] += 59
    assert not schedule.is_due(1)
    now[0] += 1
    assert schedule.is_due(2)
    schedule.note()
    assert not schedule.is_due(3)


@pytest.mark.parametrize("sizes", [StepSizes(10, 4), StepSizes(3, 7), StepSizes(10, 6, 3, 12)])
def test_whether_a_checkpoint_is_planned_before_a_step_is_known_as_it_begins(sizes):
    """Steps of an epoch: one is due after each that reaches an end."""
    schedule = Schedule(Checkpoint(every_seconds=None, every_epochs=1), sizes)
    for step in range(sizes.first_step + 1, 80):
        ends = any(
            place % sizes.rows == 0
            for place in range(sizes.position(step - 1) + 1, sizes.position(step) + 1)
        )
        assert schedule.is_due(step) == ends


def test_a_checkpoint_that_is_far_away_is_not_due():
    far = 10**9
    sizes = StepSizes(10, 4)
    for settings in (Checkpoint(every_steps=far), Checkpoint(every_epochs=far), Checkpoint()):
        assert not Schedule(settings, sizes).is_due(7)
    assert Schedule(Checkpoint(every_steps=far, every_epochs=1), sizes).is_due(8)


def test_steps_of_another_size_begin_at_the_position_of_the_checkpoint():
    whole = StepSizes(rows=10, per_step=4)
    wider = StepSizes(rows=10, per_step=6, first_step=3, first_position=whole.position(3))
    assert [wider.position(step) for step in (3, 4, 5)] == [12, 18, 24]


def test_datasets_with_different_rows_have_different_digests():

    def rows(*lengths):
        return [
            SequenceSample.from_default(
                ids=[str(i)], seqlens=[n], data={"packed_prompts": torch.arange(n)}
            )
            for i, n in enumerate(lengths)
        ]

    assert digest_rows(rows(2, 3)) == digest_rows(rows(2, 3))
    assert len({digest_rows(rows(2, 3)), digest_rows(rows(3, 2)), digest_rows(rows(2, 3, 1))}) == 3
