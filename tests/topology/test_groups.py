"""The processes of a run: its ranks, and the servers that it starts."""

import sys
from pathlib import Path

from rlcli.recipe.resolve import load_recipe
from rlcli.topology import plan_topology
from rlcli.topology.groups import Group, process_groups, server_folders
from rlcli.topology.report import make_plan, plan_json
from rlcli.topology.text import plan_lines

ROLLOUT = (
    "cluster.nodes=2",
    "cluster.devices_per_node=2",
    "launch=local",
    "models.actor.devices=0-1",
    "models.actor.rollout.devices=2-3",
    "models.actor.rollout.backend.args.servers=2",
)
OURS = f"models.actor.rollout.backend.args.python={sys.executable}"
THEIRS = "models.actor.rollout.backend.args.urls=[http://a:1, http://b:2]"
RANKS = Group("ranks", "ranks", (0, 0, 1, 1))


def recipe_with(*overrides):
    return load_recipe("ppo_math", (*ROLLOUT, *overrides), ["sglang"])


def test_each_rank_of_a_role_has_its_servers_on_its_node():
    resolved = recipe_with(OURS)
    topology = plan_topology(resolved.recipe)
    servers = Group("actor_rollout-server", "server", (1, 1, 1, 1))
    assert process_groups(resolved.recipe, topology) == (RANKS, servers)
    run = Path("/runs/one")
    folders = [
        server_folders(resolved.recipe, topology, "actor_rollout", rank, run) for rank in (2, 3)
    ]
    assert [[folder.name for folder in of_rank] for of_rank in folders] == [
        ["actor_rollout-server0", "actor_rollout-server1"],
        ["actor_rollout-server2", "actor_rollout-server3"],
    ]
    plan = make_plan(resolved)
    assert "actor_rollout-server: 4 servers on node 1, outside the ranks" in list(plan_lines(plan))
    assert plan_json(plan)["servers"] == [
        {"name": "actor_rollout-server", "nodes": [1, 1, 1, 1], "processes_of_each": 1}
    ]


def test_a_server_over_two_nodes_has_a_process_on_each():
    spread = [
        f"models.actor.rollout.backend.args.{key}"
        for key in ("tp=2", "nodes=2", "weights_folder=/")
    ]
    overrides = [
        setting for setting in ROLLOUT if not setting.startswith("models.actor.rollout.devices")
    ]
    resolved = load_recipe(
        "ppo_math", (*overrides, "models.actor.rollout.devices=0-1", OURS, *spread), ["sglang"]
    )
    topology = plan_topology(resolved.recipe)
    group = Group("actor_rollout-server", "server", (0, 1) * 4, processes_of_each=2)
    assert process_groups(resolved.recipe, topology) == (RANKS, group)
    assert [group.on_node(node) for node in (0, 1)] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    folders = server_folders(resolved.recipe, topology, "actor_rollout", 1, Path("/runs/one"))
    assert [folder.name for folder in folders] == [
        f"actor_rollout-server{index}" for index in range(4, 8)
    ]
    plan = make_plan(resolved)
    assert "actor_rollout-server: 4 servers on nodes 0-1, each over 2, outside the ranks" in list(
        plan_lines(plan)
    )
    assert plan_json(plan)["memory"]["servers"][0]["devices_of_each"] == 2


def test_servers_given_by_url_are_not_started():
    resolved = recipe_with(THEIRS)
    topology = plan_topology(resolved.recipe)
    assert process_groups(resolved.recipe, topology) == (RANKS,)
    assert server_folders(resolved.recipe, topology, "actor_rollout", 2, Path("/runs/one")) == ()
    assert server_folders(resolved.recipe, topology, "actor", 0, Path("/runs/one")) == ()


def test_servers_that_would_share_devices_are_reported():
    plan = make_plan(recipe_with(OURS, "models.actor.rollout.backend.args.tp=8"), 80 << 30)
    assert "servers of actor_rollout would share devices" in " ".join(
        " ".join(plan_lines(plan)).split()
    )
    assert "servers of actor_rollout share devices, or need more than a node has" in plan.shortfalls
    on_processors = make_plan(
        recipe_with(OURS, "models.actor.rollout.backend.args.options={device: cpu}"), 80 << 30
    )
    assert on_processors.shortfalls == ()
