"""The commands that `rlcli plan --commands` prints."""

import re
import shlex
import subprocess
import sys
import time

from rlcli.launch.commands import command_lines, node_commands
from rlcli.recipe.resolve import load_recipe
from rlcli.topology import plan_topology


def commands(*overrides, recipe="ppo_math", **options):
    resolved = load_recipe(recipe, overrides)
    return node_commands(resolved, plan_topology(resolved.recipe), recipe, **options)


def test_each_node_has_one_command_and_the_first_starts_the_master(tmp_path):
    first, second = commands(
        "launch=local", "cluster.nodes=2", "cluster.devices_per_node=2", run_dir=tmp_path / "r"
    )
    assert (first.node, first.ranks, second.node, second.ranks) == (0, (0, 1), 1, (2, 3))
    folder, _, train = first.command.partition(" && ")
    assert folder.startswith("cd ")
    assert shlex.split(train)[-5:] == [
        "ppo_math",
        "launch=local",
        "cluster.nodes=2",
        "cluster.devices_per_node=2",
        "launch.by_hand=true",
    ]
    assert shlex.split(second.command)[-6:] == [
        sys.executable,
        "-P",
        "-m",
        "rlcli.launch.node",
        str(tmp_path / "r"),
        "1",
    ]


def test_paths_with_shell_characters_are_quoted(tmp_path):
    folder = tmp_path / "a b'$(touch x);\n"
    first, second = commands("launch=local", "cluster.nodes=2", "name=x", run_dir=folder)
    assert str(folder) in shlex.split(first.command)
    assert str(folder) in shlex.split(second.command)


def in_one_line(lines):
    return re.sub(r" \\\n +", " ", "\n".join(lines))


def test_one_node_has_one_command():
    (only,) = commands()
    assert "launch.by_hand" not in only.command
    comment, *command = command_lines([only], "lo")
    assert comment == "# node 0: rank 0; and the master; there is no other node"
    assert in_one_line(command) == only.command


def test_a_slurm_job_has_one_command_that_submits_it(tmp_path):
    (only,) = commands(
        "launch=slurm", "cluster.nodes=2", "cluster.devices_per_node=8", run_dir=tmp_path / "r"
    )
    assert (only.node, only.ranks) == (None, tuple(range(16)))
    assert shlex.split(only.command)[-4:] == [
        "ppo_math",
        "launch=slurm",
        "cluster.nodes=2",
        "cluster.devices_per_node=8",
    ]
    comment, *command = command_lines([only], "eth0")
    assert comment == "# ranks 0-15; submits one job, which starts them on 2 nodes"
    assert in_one_line(command) == only.command


def test_a_comment_explains_each_command():
    lines = command_lines(commands("launch=local", "cluster.nodes=3"), "lo")
    assert [line.split(";")[0] for line in lines if line.startswith("# node")] == [
        "# node 0: rank 0",
        "# node 1: rank 1",
        "# node 2: rank 2",
    ]
    assert "name the interface between your machines" in " ".join(lines[-2:]).replace("#   ", "")
    begun = ("#", "cd ", "env ", sys.executable, "    ")
    assert all(line.startswith(begun) for line in lines if line)


def test_a_printed_command_is_broken_between_words_at_80_columns(tmp_path):
    folder = tmp_path / "two  words"
    (only,) = commands("seed=7", "log.trackers=[]", "train.steps=123", run_dir=folder)
    _, *lines = command_lines([only], "lo")
    assert len(lines) > 2
    wide = [line for line in lines if len(line) > 80]
    assert all(str(folder) in line or sys.executable in line for line in wide)
    typed = "\n".join(lines).partition(" && ")[2]
    shell = ["bash", "-c", f"printf '%s\\n' {typed}"]
    printed = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == shlex.split(only.command.partition(" && ")[2])


def test_commands_for_2048_nodes_take_less_than_two_seconds():
    began = time.process_time()
    devices = [f"models.{role}.devices=0-7" for role in ("actor", "critic", "ref", "reward")]
    assert (
        len(commands("launch=local", "cluster.nodes=2048", "cluster.devices_per_node=8", *devices))
        == 2048
    )
    assert time.process_time() - began < 2
