"""Calls of one role and interface share its state, however their arguments are written."""

import pytest

from rlcli.recipe.graph import train_graph
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.roles import Interfaces


@pytest.mark.parametrize(
    ("setting", "calls"),
    [
        ("critic_inf.interface.args.value_eps_clip=0.2", ("critic_inf", "critic_train")),
        ("critic_train.interface.args.minibatches=4", ("critic_inf", "critic_train")),
        ("actor_gen.interface.args.generation.top_p=1.0", ("actor_gen", "actor_train")),
    ],
)
def test_a_default_that_is_written_for_one_call_changes_nothing(setting, calls):
    training = train_graph(load_recipe("ppo_math", [f"graph.{setting}"]).recipe)
    interfaces = Interfaces(training, [])
    first, second = (interfaces.of(call) for call in training if call.name in calls)
    assert first is second
