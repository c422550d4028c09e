"""How far generation runs ahead of training: never further than the recipe allows, and really ahead. By the ledger."""

import json
import sys

import pytest

from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe

pytestmark = pytest.mark.timeout(420)  # a start on two ranks takes a while on a slow machine

TWO_RANKS = ("launch=local", "cluster.devices_per_node=2", "models.critic.devices='1'", "models.reward.devices='0'")
DROPPING = ("graph.score.interface={type: toy_reward, args: {drop: 3}}",)


def lags(project, *overrides):
    """Of each sample that was trained on: training steps between the weights that sampled it and those it trained."""
    settings = ("train.steps=8", "train.eval.dataset=null", *overrides)
    with PlainDisplay(sys.stderr) as display:
        run_recipe(load_recipe("toy.yaml", settings), project / "run", display)
    lines = [json.loads(line) for line in (project / "run/ledger.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["state"] == "trained"]
    assert len(trained) == len({line["sample"] for line in trained}) == 8 * 8
    return [line["step"] - 1 - line["versions"]["gen"] for line in trained]


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(("staleness", "ranks"), [(0, ()), (1, ()), (4, TWO_RANKS)])
def test_samples_are_as_stale_as_the_recipe_allows_and_no_staler(project, staleness, ranks):
    found = lags(project, f"train.max_staleness={staleness}", *ranks)
    assert set(found) == set(range(staleness + 1))


def test_where_samples_are_dropped_generation_still_runs_ahead_within_its_limit(project):
    """A step is drawn once the batch of the step before it is known, so it runs at most one step ahead."""
    found = lags(project, "train.max_staleness=4", *DROPPING)
    assert set(found) <= {0, 1}
