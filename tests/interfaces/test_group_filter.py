"""Dynamic sampling: which prompts are worth training on, by hand, and the recipes that ask for it."""

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
    """What the interface says of groups with these scores."""
    scores = torch.tensor([score for group in groups for score in group], dtype=dtype)
    data = SequenceSample.from_default(
        ids=[f"s{n}" for n in range(len(groups))], seqlens={key: [[1] * len(group) for group in groups]},
        data={key: scores}, metadata={"answer": list(range(len(groups)))},
    )  # fmt: skip
    made = GroupFilterInterface(**settings).inference(ROLE, data, MicroBatchSpec())
    assert made.ids == data.ids
    assert not made.keys
    return [reason is not None for reason in made.metadata["dropped"]]


def test_groups_by_hand():
    assert dropped([[1, 1, 1], [0, 0], [0, 1, 0], [0.5, 0.5 + 1e-6], [3]]) == [True, True, False, False, False]


def test_by_what_is_right():
    groups = [[1, 1], [0, 0], [0, 1]]
    assert dropped(groups, "solved", torch.bool, by="solved") == [True, True, False]


def test_rewards_that_hardly_differ():
    assert dropped([[0.0, 0.25], [0.0, 0.26], [-1.0, 1.0]], min_spread=0.25) == [True, False, False]
    assert dropped([[0.0, 0.25]]) == [False]


def test_no_samples():
    assert dropped([]) == []


def test_dapo_trains_on_what_the_filter_keeps():
    recipe = load_recipe("grpo_math", profiles=["dapo"]).recipe
    (chooser,) = (mfc for mfc in train_graph(recipe) if mfc.drops)
    assert (chooser.name, chooser.drops) == ("group_filter", ("equal_rewards",))
    assert stages(recipe.graph) == [["actor_gen"], ["reward_inf"], ["group_filter"], ["advantages"], ["actor_train"]]


@pytest.mark.parametrize(("on_error", "drops"), [("stop", ()), ("drop", ("unreadable_answer",))])
def test_a_reward_drops_samples_where_it_is_asked_to(on_error, drops):
    recipe = load_recipe("ppo_math", [f"graph.reward_inf.interface.args.on_error={on_error}"]).recipe
    assert {mfc.name: mfc.drops for mfc in train_graph(recipe)}["reward_inf"] == drops
    last = ["actor_train", "critic_train"]
    assert stages(recipe.graph)[-1] == last
