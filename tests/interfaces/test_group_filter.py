"""Dynamic sampling: which prompts are worth training on, worked by hand,
and the recipes that use it."""

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.interfaces.group_filter import GroupFilterInterface
from rlcli.recipe.graph import stages, train_graph
from rlcli.recipe.resolve import load_recipe
from rlcli.testing.batches import DigitTokenizer

ROLE = Model("reward", None, DigitTokenizer(), torch.device("cpu"))


def dropped(groups, key="rewards", dtype=torch.float32, **settings):
    """Which groups with these scores the interface drops."""
    scores = torch.tensor([score for group in groups for score in group], dtype=dtype)
    data = SequenceSample.from_default(
        ids=[f"s{n}" for n in range(len(groups))],
        seqlens={key: [[1] * len(group) for group in groups]},
        data={key: scores},
        metadata={"answer": list(range(len(groups)))},
    )
    output = GroupFilterInterface(**settings).inference(ROLE, data, MicroBatchSpec())
    assert output.ids == data.ids
    assert not output.keys
    return [reason is not None for reason in output.metadata["dropped"]]


def test_groups_with_equal_rewards_are_dropped():
    assert dropped([[1, 1, 1], [0, 0], [0, 1, 0], [0.5, 0.5 + 1e-6], [3]]) == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_groups_can_be_compared_by_solved():
    groups = [[1, 1], [0, 0], [0, 1]]
    assert dropped(groups, "solved", torch.bool, by="solved") == [True, True, False]


def test_rewards_that_are_equal_but_for_rounding_are_equal():
    assert dropped([[0.1 + 0.2, 0.3], [0.7, 0.7 + 1e-7], [100.0, 100.001]]) == [True, True, False]
    assert dropped([[1.0, 0.9], [0.0, 0.1], [1.0, 0.899]], min_spread=0.1) == [True, True, False]


def test_min_spread_drops_groups_whose_rewards_hardly_differ():
    assert dropped([[0.0, 0.25], [0.0, 0.26], [-1.0, 1.0]], min_spread=0.25) == [True, False, False]
    assert dropped([[0.0, 0.25]]) == [False]


def test_a_batch_without_samples_is_allowed():
    assert dropped([]) == []


def test_dapo_trains_after_the_group_filter():
    recipe = load_recipe("grpo_math", profiles=["dapo"]).recipe
    (chooser,) = (mfc for mfc in train_graph(recipe) if mfc.drops)
    assert (chooser.name, chooser.drops) == ("group_filter", ("equal_rewards",))
    assert stages(recipe.graph) == [
        ["actor_gen"],
        ["reward_inf"],
        ["group_filter"],
        ["advantages"],
        ["actor_train"],
    ]


@pytest.mark.parametrize(("on_error", "drops"), [("stop", ()), ("drop", ("unreadable_answer",))])
def test_a_reward_drops_samples_only_with_on_error_drop(on_error, drops):
    recipe = load_recipe(
        "ppo_math", [f"graph.reward_inf.interface.args.on_error={on_error}"]
    ).recipe
    assert {mfc.name: mfc.drops for mfc in train_graph(recipe)}["reward_inf"] == drops
    last = ["actor_train", "critic_train"]
    assert stages(recipe.graph)[-1] == last
