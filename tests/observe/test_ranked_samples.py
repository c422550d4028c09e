"""Samples of long runs are searched without holding all of them."""

import re
import weakref

from rlcli.observe.samples import (
    SampleRecord,
    SampleSelection,
    by_reward,
    changed_between,
    matching,
)

STEPS = 500


class Recorded:
    """The samples of a long run, one at a time, and the most of them that lived at once."""

    def __init__(self):
        self.alive = weakref.WeakSet()
        self.most = 0

    def __iter__(self):
        for step in range(STEPS):
            sample = SampleRecord(
                step=step, id=step % 3, prompt="?", response=f"{step}!", reward=float(step % 7)
            )
            self.alive.add(sample)
            self.most = max(self.most, len(self.alive))
            yield sample
            del sample


def test_the_worst_and_the_best_samples_are_found_one_at_a_time():
    for best, steps in ((False, [497, 490]), (True, [496, 489])):
        recorded = Recorded()
        selection = SampleSelection(pattern=re.compile("!"), every_step=True)
        ranked = by_reward(matching(recorded, selection), 2, best=best)
        assert [sample.step for sample in ranked] == steps
        assert recorded.most < 10


def test_changed_responses_are_found_by_the_first_and_the_last_of_each_prompt():
    recorded = Recorded()
    pairs = changed_between(recorded, SampleSelection(every_step=True))
    assert [(before.step, after.step) for before, after in pairs] == [(0, 498), (1, 499), (2, 497)]
    assert recorded.most < 20
