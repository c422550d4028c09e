"""The job script: what it asks Slurm for, that no value can break out of it, and that it does what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.errors import UsageError
from rlcli.launch.slurm.script import Job, job_script
from rlcli.recipe.resolve import load_recipe
from rlcli.topology.report import make_plan

HOSTILE = 'it\'s "here"; $(touch BROKEN) `touch BROKEN` \\ \n#SBATCH --wrap=evil\n&& touch BROKEN'


def script(*overrides: str, recipe: str = "sft_math", with_=(), nodes=None, devices=None, **job) -> str:
    plan = make_plan(load_recipe(recipe, overrides, with_), nodes=nodes, devices=devices)
    return job_script(plan.resolved, plan.topology, Job(**{"rlcli": ("rlcli",), **job}), recipe, with_)


def asked(text: str) -> dict[str, str]:
    """Options of the #SBATCH lines."""
    options = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            option, _, value = line.removeprefix("#SBATCH --").partition("=")
            options[option] = value
    return options


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)


def test_what_slurm_is_asked_for():
    options = asked(script(with_=["gpu8"], time="8h", partition="gpu", account="me"))
    assert options == {
        "job-name": "rlcli-sft_math", "nodes": "1", "ntasks-per-node": "1", "gpus-per-node": "8", "cpus-per-task": "64",
        "time": "08:00:00", "partition": "gpu", "account": "me", "signal": "B:USR1@900", "requeue": "",
        "open-mode": "append", "output": "%x-%j.log",
    }  # fmt: skip


def test_a_job_on_cpus_asks_for_no_gpus():
    options = asked(script("cluster.device=cpu", "launch=local", "cluster.devices_per_node=3"))
    assert "gpus-per-node" not in options
    assert "partition" not in options
    assert options["cpus-per-task"] == "6"


@pytest.mark.parametrize(
    ("given", "limit", "warning"),
    [("90m", "01:30:00", 900), ("2d", "2-00:00:00", 900), ("8:00:00", "08:00:00", 900),
     ("1-2:03:04", "1-02:03:04", 900), ("10m", "00:10:00", 150), ("60s", "00:01:00", 15)],
)  # fmt: skip
def test_times(given, limit, warning):
    options = asked(script(time=given))
    assert options["time"] == limit
    assert options["signal"] == f"B:USR1@{warning}"


@pytest.mark.parametrize(
    "job",
    [{"time": "soon"}, {"time": "8"}, {"time": "1s"}, {"time": "8h\n#SBATCH --x"}, {"partition": "a b"},
     {"partition": ""}, {"account": "x\n#SBATCH --wrap=evil"}, {"account": "--help"}],
)  # fmt: skip
def test_what_is_no_time_or_name_is_refused(job):
    with pytest.raises(UsageError) as caught:
        script(**job)
    assert caught.value.hint


def test_more_than_one_node_is_refused_with_what_to_set():
    with pytest.raises(UsageError, match="2 nodes; this version launches on one") as caught:
        script(nodes=2, devices=4)
    assert "cluster.nodes=1" in caught.value.hint


def test_devices_that_are_asked_for_beside_the_recipe_reach_the_run():
    text = script("cluster.devices_per_node=2", "launch.type=local", devices=4)
    assert asked(text)["gpus-per-node"] == "4"
    assert "-- sft_math cluster.nodes=1 cluster.devices_per_node=4 launch=local)" in text


def test_the_same_inputs_give_the_same_text():
    assert script(folder=Path("/a")) == script(folder=Path("/a"))


def test_the_project_goes_along(tmp_path, monkeypatch):
    assert "RLCLI_PROJECT" not in script()
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    assert f"export RLCLI_PROJECT={tmp_path}\n" in script()


# -- run with stand-ins for srun, scontrol and rlcli -------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    """Run a script as Slurm would, in a folder whose `bin` comes first: (exit code, calls as lists of words)."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()

    def stand_in(name: str, body: str) -> None:
        file = folder / name
        file.write_text(f'#!/bin/bash\nprintf "%s\\0" {name} "$@" >> {calls}; printf "\\n\\0" >> {calls}\n{body}\n')
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    stand_in("scontrol", "exit 0")
    stand_in("srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')

    def start(text: str, rlcli: str) -> subprocess.Popen[str]:
        stand_in("rlcli", rlcli)
        (tmp_path / "job.sbatch").write_text(text)
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        return subprocess.Popen(
            ["bash", "job.sbatch"], cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE
        )

    def finish(process: subprocess.Popen[str]) -> tuple[int, list[list[str]]]:
        process.communicate(timeout=30)
        words = calls.read_text().split("\0\n\0")[:-1]
        return process.returncode, [call.split("\0") for call in words]

    return start, finish


def test_the_script_starts_the_run_and_hands_on_its_exit_code(run):
    start, finish = run
    for code in (0, 4):
        status, calls = finish(start(script("train.steps=5", with_=["gpu1"]), f"exit {code}"))
        assert status == code
        assert calls[-1] == ["rlcli", "train", "--run-dir", "runs/sft_math/slurm-7", "--with", "gpu1", "--", "sft_math",
                             "train.steps=5"]  # fmt: skip
        assert calls[-2][0] == "srun"


@pytest.mark.parametrize("sign", ["status.json", "recipe.resolved.yaml"])
def test_a_run_that_was_begun_is_resumed(run, tmp_path, sign):
    start, finish = run
    folder = tmp_path / "runs" / "sft_math" / "slurm-7"
    folder.mkdir(parents=True)
    (folder / sign).write_text("{}")
    status, calls = finish(start(script(), "exit 0"))
    assert status == 0
    assert calls[-1] == ["rlcli", "resume", "runs/sft_math/slurm-7"]


def test_an_early_warning_stops_the_run_and_puts_the_job_back_into_the_queue(run):
    start, finish = run
    process = start(script(), "trap 'exit 75' USR1; echo ready; while :; do sleep 0.05; done")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(10)
    status, calls = finish(process)
    assert status == 0
    assert calls[-1] == ["scontrol", "requeue", "7"]


def test_no_value_breaks_out_of_the_script(run, tmp_path):
    start, finish = run
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    (folder / "odd name; touch BROKEN.yaml").write_text("extends: sft_math\nname: odd\n")
    override = f"models.actor.scratch.hidden_act={json.dumps(HOSTILE)}"
    os.chdir(folder)
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    resolved = load_recipe("odd name; touch BROKEN.yaml", [override, "log.dir='runs of $(touch BROKEN)'"])
    plan = make_plan(resolved)
    text = job_script(plan.resolved, plan.topology, Job(rlcli=("rlcli",), folder=folder), "odd name; touch BROKEN")
    assert "wrap" not in asked(text.split("set -euo pipefail")[0])
    status, calls = finish(start(text, "exit 0"))
    assert status == 0
    assert not list(tmp_path.rglob("BROKEN"))
    assert calls[-1][:2] == ["rlcli", "train"]
    assert calls[-1][-2:] == [override, "log.dir='runs of $(touch BROKEN)'"]
    assert calls[-1][-3] == str(folder / "odd name; touch BROKEN.yaml")
    assert calls[-1][3] == "runs of $(touch BROKEN)/odd/slurm-7"


def test_the_command_is_this_pythons():
    text = script(rlcli=Job().rlcli)
    (line,) = {re.search(r"command=\((.*) resume", line)[1] for line in text.splitlines() if " resume " in line}
    assert shlex.split(line) == [sys.executable, "-m", "rlcli"]
