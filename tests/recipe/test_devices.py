"""Which devices and engines roles get, and what does not fit."""

import sys

import pytest

from rlcli.errors import RecipeError
from rlcli.inspect.constructors import component_faults
from rlcli.recipe.resolve import load_recipe
from rlcli.topology import plan_topology


def test_roles_are_placed_on_their_devices():
    overrides = [
        "launch=local",
        "cluster.devices_per_node=4",
        "models.ref.devices=2-3",
        "models.critic.mesh.dp=4",
        "models.reward.devices=0",
        "train.prompts_per_step=6",
    ]
    plan = plan_topology(load_recipe("ppo_math", overrides).recipe)
    assert plan.world_size == 4
    assert plan.placement("ref").ranks == (2, 3)
    assert plan.placement("ref").mesh.dp == 2
    assert plan.roles_on(0) == ("actor", "critic", "reward")
    assert [(group.ranks, group.roles) for group in plan.groups] == [
        ((0, 1, 2, 3), ("actor", "critic")),
        ((2, 3), ("ref",)),
        ((0,), ("reward",)),
    ]
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
    overrides = ["launch=local", "cluster.devices_per_node=2", "train.prompts_per_step=1"]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", [*overrides, *(f"models.{role}.devices=0" for role in on_one)])
    message = f"train.prompts_per_step is 1, but {who} 2 data-parallel ranks"
    assert [(problem.what, problem.hint) for problem in caught.value.problems] == [(message, hint)]


def test_too_few_prompts_for_roles_of_different_sizes_are_one_problem():
    overrides = [
        "launch=local",
        "cluster.devices_per_node=4",
        "train.prompts_per_step=1",
        "models.ref.devices=0-1",
    ]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", overrides)
    message = (
        "train.prompts_per_step is 1, but actor, critic, ref and reward have "
        "up to 4 data-parallel ranks"
    )
    assert [problem.what for problem in caught.value.problems] == [message]


def test_a_mistake_in_one_role_does_not_hide_too_few_prompts_for_another():
    overrides = [
        "launch=local",
        "cluster.devices_per_node=2",
        "train.prompts_per_step=1",
        "models.ref.devcies=0",
    ]
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", overrides)
    messages = [problem.what for problem in caught.value.problems]
    assert "unknown key models.ref.devcies" in messages
    assert any(message.startswith("train.prompts_per_step is 1, but actor") for message in messages)


@pytest.mark.parametrize(
    ("backend", "dimension", "hint"),
    [
        (
            "deepspeed",
            "cp",
            "it supports dp; cp works with the backend fsdp or inference or megatron",
        ),
        ("deepspeed", "ep", "it supports dp; ep works with the backend fsdp or megatron"),
        (
            "inference",
            "ep",
            "it supports dp, tp, cp; ep works with the backend fsdp or megatron",
        ),
    ],
)
def test_a_dimension_that_an_engine_does_not_support_is_refused(backend, dimension, hint):
    """The refusal is at the number in the recipe, and names the engines that support it."""
    others = ["launch=local", "cluster.devices_per_node=2", "models.critic.mesh.dp=2"]
    layout = [f"models.ref.backend.type={backend}", f"models.ref.mesh={{{dimension}: 2}}"]
    problem = only_problem("ppo_math", [*others, *layout])
    assert (problem.code, problem.hint) == ("R49", hint)
    setting = f"models.ref.mesh.{dimension}=2"
    assert problem.what == f"the backend {backend} of ref does not support {dimension} ({setting})"
    assert f"{dimension}: 2" in (problem.excerpt or "")


def test_a_trained_role_is_offered_engines_that_train():
    layout = ["launch=local", "cluster.devices_per_node=2", "models.critic.backend.type=deepspeed"]
    problem = only_problem("ppo_math", [*layout, "models.critic.mesh={cp: 2}"])
    assert problem.hint == "it supports dp; cp works with the backend fsdp or megatron"


def only_problem(*recipe):
    """The only problem of a recipe."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(*recipe)
    (problem,) = caught.value.problems
    return problem


def test_an_engine_that_cannot_generate_is_refused_for_generating_calls():
    problem = only_problem("ppo_math", ["models.actor.backend.type=megatron"])
    assert problem.what == (
        "the backend megatron of models.actor cannot generate, which graph.actor_gen and "
        "train.eval.graph.eval_gen ask of it"
    )
    assert problem.hint == "for example models.actor.backend=fsdp"
    load_recipe("ppo_math", ["models.critic.backend.type=megatron"])


def test_an_engine_that_cannot_score_is_refused_for_inference_calls():
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["models.ref.backend={type: sglang}"])
    (problem,) = (candidate for candidate in caught.value.problems if candidate.code == "R71")
    assert (
        problem.what
        == "the backend sglang of models.ref cannot score, which graph.ref_inf asks of it"
    )
    load_recipe(
        "ppo_math", ["models.actor.rollout.backend={type: sglang, args: {urls: ['http://h:1']}}"]
    )


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ("{}", "python or urls is needed"),
        ("{urls: []}", "python or urls is needed"),
        ("{python: p, urls: ['http://h:1']}", "python and urls are given; keep one"),
    ],
)
def test_servers_need_either_python_or_urls_and_the_hint_names_the_users_key(args, problem):
    only = only_problem(
        "ppo_math", [f"models.actor.rollout.backend={{type: sglang, args: {args}}}"]
    )
    assert (only.code, only.what) == ("R39", f"models.actor.rollout.backend (sglang): {problem}")
    assert only.hint.startswith("models.actor.rollout.backend.args.python=")


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        (
            "rm_arithmetic",
            "models.reward.head=lm",
            "graph.reward_train (reward_model) needs the head value",
        ),
        ("ppo_math", "models.critic.head=lm", "graph.critic_inf (ppo_critic) needs the head value"),
        ("ppo_math", "models.ref.head=value", "graph.ref_inf (reference) needs the head lm"),
        ("sft_math", "models.actor.head=value", "graph.sft_train (sft) needs the head lm"),
    ],
)
def test_a_role_with_the_wrong_head_is_one_problem_with_the_right_hint(recipe, override, message):
    problem = only_problem(recipe, [override])
    key, _, head = override.partition("=")
    assert (problem.code, problem.hint) == ("R71", f"{key}={'value' if head == 'lm' else 'lm'}")
    assert problem.what.endswith(message)


def test_a_judge_without_weights_is_one_problem():
    problem = only_problem("grpo_math", (), ["judge"])
    assert (problem.code, problem.where) == ("R39", "recipes/profiles/judge.yaml:4:3")
    assert problem.what == "models.judge has no weights, which graph.reward_inf (inference) needs"
    assert "models.judge.path" in problem.hint


def test_a_reference_without_weights_needs_its_store():
    dropped = ["models.ref={init: null, backend: null}"]
    with pytest.raises(
        RecipeError, match=r"models\.ref has no weights, which graph\.ref_inf \(inference\) needs"
    ):
        load_recipe("dpo_arithmetic", dropped)
    load_recipe("dpo_arithmetic", [*dropped, "graph.ref_inf.interface.args.store=logprobs"])


@pytest.mark.parametrize(
    ("container", "key"),
    [
        ("{image: a.sif}", "image"),
        ("{mounts: ['/d:/d']}", "mounts"),
        ("{python: /p}", "python"),
        ("{engine: pyxis}", "engine"),
    ],
)
def test_a_container_needs_an_engine_and_an_image(container, key):
    problem = only_problem("ppo_math", [f"launch.slurm.container={container}"])
    assert problem.code == "R39"
    assert problem.what.startswith(f"launch.slurm.container.{key} is ")


def test_all_options_of_a_job_that_rlcli_sets_are_refused():
    with pytest.raises(RecipeError) as caught:
        load_recipe("ppo_math", ["launch.slurm.options={nodes: 3, mem: 0, mail-type: END}"])
    assert [(p.where, p.what, p.hint) for p in caught.value.problems] == [
        ("command line", "launch.slurm.options cannot have nodes", "rlcli sets it itself"),
        (
            "command line",
            "launch.slurm.options cannot have mail-type",
            "launch.slurm.mail_type is the key for it",
        ),
    ]


SERVERS = [
    "launch=local",
    "cluster.device=cuda",
    "cluster.devices_per_node=8",
    "cluster.nodes=2",
    f"models.actor.rollout.backend.args.python={sys.executable}",
]
OVER_TWO_NODES = ["backend.args.nodes=2", "backend.args.weights_folder=/"]


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (
            ["backend.args.tp=8"],
            "16 servers of 8 devices, and 8 of them would share device 7 of node 0",
            "devices=0,8",
        ),
        (
            ["backend.args.tp=4", "devices=0-1"],
            "2 servers of 4 devices, and 2 of them would",
            "devices=0,4,8,12 ",
        ),
        (
            ["backend.args.servers=2"],
            "32 servers of 1 device, and 2 of them would share",
            "devices=0,2,4,6,… leaves",
        ),
        (
            ["backend.args.tp=16", "devices=0"],
            "1 server of 16 devices, beginning at that of its rank",
            "models.actor.rollout.backend.args.nodes=2 spreads each server over 2 nodes",
        ),
        (
            ["backend.args.tp=32", "devices=0"],
            "1 server of 32 devices, beginning at that of its rank",
            "lower tp",
        ),
        (
            ["backend.args.tp=16", "devices=0,1", *OVER_TWO_NODES],
            (
                "2 servers of 8 devices on each of 2 nodes, and 2 of them would "
                "share device 1 of node 0"
            ),
            "devices=0 leaves",
        ),
        (
            ["backend.args.tp=8", "devices=0,8", *OVER_TWO_NODES],
            (
                "each server of actor_rollout is spread over 2 nodes, beginning at that of its "
                "rank, but the run has 2 nodes"
            ),
            "or give actor_rollout ranks on earlier ones: models.actor.rollout.devices",
        ),
        (
            ["devices=2-3", 'backend.args.environment={CUDA_VISIBLE_DEVICES: "4"}'],
            "2 servers of 1 device, and 2 of them would share device 4 of node 0",
            "or use other devices",
        ),
    ],
)
def test_servers_that_would_share_a_device_are_refused(overrides, message, hint):
    problem = only_problem(
        "ppo_math", [*SERVERS, *(f"models.actor.rollout.{key}" for key in overrides)], ["sglang"]
    )
    assert problem.code == "R49"
    assert message in problem.what
    assert hint in (problem.hint or "")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["backend.args.tp=16", "devices=0", *OVER_TWO_NODES],
        ["backend.args.tp=8", "devices='0,4'", *OVER_TWO_NODES],
        ["backend.args.tp=8", "devices='0,8'"],
        ["backend.args.tp=4", "devices='0,4,8,12'"],
        ["backend.args.servers=2", "backend.args.options={device: cpu}"],
    ],
)
def test_servers_on_separate_devices_are_accepted(overrides):
    load_recipe(
        "ppo_math", [*SERVERS, *(f"models.actor.rollout.{key}" for key in overrides)], ["sglang"]
    )


def test_a_server_over_nodes_on_processors_needs_these_nodes_too():
    overrides = [
        f"models.actor.rollout.{key}" for key in ("backend.args.tp=2", "devices=0", *OVER_TWO_NODES)
    ]
    one_node = [*SERVERS[:1], "cluster.device=cpu", *SERVERS[4:], *overrides]
    problem = only_problem("ppo_math", one_node, ["sglang"])
    assert problem.what.endswith("but the run has 1 node")
    load_recipe("ppo_math", [*one_node, "cluster.nodes=2"], ["sglang"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["tp=3", "nodes=2", "weights_folder=/"],
            "3 devices per server cannot be divided among nodes: 2",
        ),
        (
            ["tp=4", "nodes=2"],
            "nodes is 2, so weights_folder must name a folder that all nodes see",
        ),
    ],
)
def test_a_server_over_nodes_that_cannot_start_is_refused(overrides, message):
    arguments = [f"models.actor.rollout.backend.args.{key}" for key in overrides]
    resolved = load_recipe(
        "ppo_math", [*SERVERS, "models.actor.rollout.devices=0", *arguments], ["sglang"]
    )
    (fault,) = component_faults(resolved)
    assert message in fault.what


def test_tensor_parallelism_is_refused_for_a_client_of_servers():
    with pytest.raises(
        RecipeError, match="the backend sglang of actor_rollout does not support tp"
    ):
        load_recipe("ppo_math", [*SERVERS, "models.actor.rollout.mesh.tp=8"], ["sglang"])


def test_each_rank_needs_its_own_server():
    two_ranks = ["launch=local", "cluster.devices_per_node=2", "models.actor.rollout.devices=0-1"]
    urls = "models.actor.rollout.backend={{type: sglang, args: {{urls: {}}}}}"
    load_recipe("ppo_math", [*two_ranks, urls.format("['http://h:1', 'http://h:2']")])
    problem = only_problem("ppo_math", [*two_ranks, urls.format("['http://h:1']")])
    assert problem.code == "R49"
    assert (
        problem.what
        == "actor_rollout has 2 ranks, each of which needs an entry of urls, but there are 1"
    )
    assert "models.actor.rollout.devices" in problem.hint
