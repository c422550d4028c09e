"""Which devices and engines roles get, and what does not fit."""

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.resolve import load_recipe
from rlcli.topology import plan_topology


def test_topology():
    overrides = ["launch=local", "cluster.devices_per_node=4", "models.ref.devices=2-3",
                 "models.critic.mesh.dp=4",
                 "models.reward.devices=0", "train.prompts_per_step=6"]  # fmt: skip
    plan = plan_topology(load_recipe("ppo_math", overrides).recipe)
    assert plan.world_size == 4
    assert plan.placement("ref").ranks == (2, 3)
    assert plan.placement("ref").mesh.dp == 2
    assert plan.roles_on(0) == ("actor", "critic", "reward")
    assert [(group.ranks, group.roles) for group in plan.groups] == [
        ((0, 1, 2, 3), ("actor", "critic")), ((2, 3), ("ref",)), ((0,), ("reward",)),
    ]  # fmt: skip
    assert plan.batch.sequences == 24
    assert plan.batch.sequences_per_rank["actor"] == (4, 8)
    assert plan.batch.minibatches == {"actor": 4, "critic": 4}


@pytest.mark.parametrize(
    ("on_one", "who", "hint"),
    [
        ((), "actor, critic, ref and reward have", "use at least 2, or fewer devices"),
        (("critic", "ref", "reward"), "actor has", "use at least 2, or models.actor.devices=0-0"),
        (("ref", "reward"), "actor and critic have", "use at least 2, or fewer devices"),
    ],
)
def test_too_few_prompts_for_the_ranks_are_one_problem(on_one, who, hint):
    given = ["launch=local", "cluster.devices_per_node=2", "train.prompts_per_step=1"]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", [*given, *(f"models.{role}.devices=0" for role in on_one)])
    what = f"train.prompts_per_step is 1, but {who} 2 data-parallel ranks"
    assert [(problem.what, problem.hint) for problem in caught.value.problems] == [(what, hint)]


def test_too_few_prompts_for_roles_of_different_widths_are_one_problem_too():
    given = ["launch=local", "cluster.devices_per_node=4", "train.prompts_per_step=1", "models.ref.devices=0-1"]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", given)
    what = "train.prompts_per_step is 1, but actor, critic, ref and reward have up to 4 data-parallel ranks"
    assert [problem.what for problem in caught.value.problems] == [what]


def test_a_mistake_in_one_role_does_not_hide_too_few_prompts_for_another():
    given = ["launch=local", "cluster.devices_per_node=2", "train.prompts_per_step=1", "models.ref.devcies=0"]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", given)
    said = [problem.what for problem in caught.value.problems]
    assert "unknown key models.ref.devcies" in said
    assert any(what.startswith("train.prompts_per_step is 1, but actor") for what in said)


@pytest.mark.parametrize("dimension", ["cp", "ep"])
@pytest.mark.parametrize("backend", ["deepspeed", "fsdp", "inference", "megatron"])
def test_no_engine_has_context_or_expert_parallel_ranks_yet(backend, dimension):
    """The refusal is at the number in the recipe."""
    others = ["launch=local", "cluster.devices_per_node=2", "models.critic.mesh.dp=2"]
    layout = [f"models.ref.backend.type={backend}", f"models.ref.mesh={{{dimension}: 2}}"]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", [*others, *layout])
    (problem,) = caught.value.problems
    assert problem.code == "R49"
    assert problem.what == f"the backend {backend} of ref knows no {dimension}, which is to be 2"
    assert f"{dimension}: 2" in (problem.excerpt or "")


def test_an_engine_that_does_not_generate_is_refused_where_it_is_asked_to():
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["models.actor.backend.type=megatron"])
    said = "the backend megatron of models.actor cannot generate, which {} asks of it"
    calls = ("graph.actor_gen", "train.eval.graph.eval_gen")
    assert [problem.what for problem in caught.value.problems] == [said.format(call) for call in calls]
    load_recipe("ppo_math", ["models.critic.backend.type=megatron"])


def test_an_engine_that_does_not_score_is_refused_where_it_is_asked_to():
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["models.ref.backend={type: sglang}"])
    (problem,) = (one for one in caught.value.problems if one.code == "R71")
    assert problem.what == "the backend sglang of models.ref cannot score, which graph.ref_inf asks of it"
    load_recipe("ppo_math", ["models.actor.rollout.backend=sglang"])
