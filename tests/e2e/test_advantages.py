"""The call for advantages takes the batch of a step, however the calls before it were given its
prompts."""

import runpy
from pathlib import Path

import pytest

KILL_ANYWHERE = runpy.run_path(str(Path(__file__).with_name("kill_anywhere.py")))
SETTINGS = (
    *(
        setting
        for setting in KILL_ANYWHERE["ALGORITHMS"]["dapo"]
        if "prompts_per_draw" not in setting
    ),
    "log.trackers=[]",
    "log.plot=false",
    "train.eval.dataset=null",
    "grpo.baseline=batch",
    "grpo.adv_norm=true",
)
COUNTING = "graph.advantages.interface={type: counted, args: '${grpo}'}"
OF_REWARD = "graph.advantages.model=reward"
"""A role whose weights never change, whose other calls work ahead of training."""
COUNTED = '''\
"""Advantages of a user's own: GRPO's, and how many samples the call takes at a time."""

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.metrics import Metrics
from rlcli.api.model import register_interface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface


@dataclass(kw_only=True)
class CountedInterface(GroupRelativeInterface):
    METRICS: ClassVar[Metrics] = {"taken": ("samples", "samples of a call for advantages")}

    def numbers(self, responses, scores, advantages, trained):
        """Those of GRPO, and the number of samples."""
        samples = responses.data.bs
        taken = {"taken": [(float(samples), 1)] * samples}
        return super().numbers(responses, scores, advantages, trained) | taken


register_interface("counted", CountedInterface)
'''

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def home(tmp_path):
    """A user's project with an estimator."""
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "interfaces").mkdir()
    (tmp_path / "interfaces" / "counted.py").write_text(COUNTED)
    return tmp_path


def numbers_of(run):
    """The numbers of roles, by step."""
    assert run.code == 0, run.err
    roles = ("actor/", "reward/")
    return [
        {name: value for name, value in step.items() if name.startswith(roles)}
        for step in run.steps
    ]


@pytest.mark.long
def test_a_run_does_not_depend_on_the_number_of_prompts_drawn_at_a_time(home, train_into):
    """Some prompts are dropped and replaced, so that calls before advantages see the batch in
    different pieces, and some draws have a surplus that starts the next step."""
    settings = (*SETTINGS, "train.steps=2", COUNTING)
    runs = [
        numbers_of(train_into(home, *settings, f"train.prompts_per_draw={draw}", name=f"by_{draw}"))
        for draw in ("null", "1", "3", "4")
    ]
    for step in runs[0]:
        assert step["actor/taken"] == 4
        assert step["actor/advantage_abs"] > 0
    for steps in runs[1:]:
        for step, expected in zip(steps, runs[0], strict=True):
            assert of_actor(step) == pytest.approx(of_actor(expected), rel=1e-5, abs=1e-6)


def of_actor(step):
    """Its numbers: those of the reward count surplus samples too."""
    return {name: value for name, value in step.items() if name.startswith("actor/")}


@pytest.mark.long
def test_samples_made_ahead_of_training_are_compared_within_the_batch_of_their_step(
    home, train_into
):
    settings = (*SETTINGS, "train.steps=3", "train.max_staleness=1", "train.prompts_per_draw=3")
    steps = numbers_of(train_into(home, *settings, COUNTING, OF_REWARD))
    assert [step["reward/taken"] for step in steps] == [4, 4, 4]
    for step in steps:
        assert step["reward/shaped_reward"] == pytest.approx(-0.5), (
            "the filter keeps pairs of -1 and 0"
        )
