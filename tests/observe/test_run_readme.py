"""How to repeat a run, as its README.md, its page and the card of its model state it."""

import pytest

from rlcli.api import run_folder
from rlcli.launch import memory_kills, recipe_record
from rlcli.launch.slurm import allocations, jobs, submit
from rlcli.observe import run_directory, run_overview, setup_times, trace
from rlcli.observe.results import DIGEST_FILE
from rlcli.observe.run_comparison import read_run
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_readme import README, repetition
from rlcli.runtime.worker_main import WORKER_FILE

FILES = (
    *(run_folder.STATUS, run_folder.RESOLVED_RECIPE, run_folder.ENVIRONMENT, run_folder.COMMITTED),
    *(run_folder.LOCK, run_folder.PROCESSES, run_overview.STOP, WORKER_FILE, DIGEST_FILE),
    *(run_directory.METRICS, run_directory.RESUMES, recipe_record.STARTS, memory_kills.ESTIMATE),
    *(setup_times.FILE, trace.TRACE),
    *(jobs.JOB_FILE, submit.SCRIPT, submit.VALUES, allocations.ALLOCATIONS_FILE),
)


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["/bin/rlcli", "train", "my sft.yaml"], "rlcli train 'my sft.yaml'"),
        (["/lib/rlcli/__main__.py", "train", "ppo_math"], "python -m rlcli train ppo_math"),
        (["rlcli", "train", "sft", "--run-dir", "out", "seed=2"], "rlcli train sft seed=2"),
        (["rlcli", "train", "--run-dir=out", "--", "sft"], "rlcli train -- sft"),
        (["rlcli", "train", "--", "sft", "--run-dir"], "rlcli train -- sft --run-dir"),
    ],
)
def test_a_command_is_repeated_in_a_folder_of_its_own(command, line):
    assert repetition(command) == line


def test_a_run_that_a_module_has_started_is_repeated_in_the_same_way_everywhere(tmp_path):
    command = ["/lib/rlcli/__main__.py", "train", "--json", "--run-dir", "x", "--", "sft_math"]
    with RunDirectory.create(tmp_path / "run", "sft_math", command=command) as run:
        run.write_text("recipe.resolved.yaml", "name: sft_math\n")
        run.write_text("origins.json", "{}")
        line = "python -m rlcli train --json -- sft_math"
        assert f"\n{line}\n" in run.readme.read_text()
        assert read_run(run.path).command == line


@pytest.mark.parametrize("file", FILES)
def test_each_file_of_a_run_is_listed(file):
    assert f"`{file}`" in README
