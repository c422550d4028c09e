"""The batch script: what it asks Slurm for, that no value can break out of it,
and that it does what it says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.errors import RecipeError, UsageError
from rlcli.launch.slurm.allocations import LEAD
from rlcli.launch.slurm.launcher import first_to_fail, srun_command
from rlcli.launch.slurm.script import batch_script, seconds_of
from rlcli.launch.slurm.submit import VALUES, JobArray
from rlcli.recipe.resolve import load_recipe
from rlcli.topology import plan_topology

HOSTILE = 'it\'s "here"; $(touch BROKEN) `touch BROKEN` \\ \n#SBATCH --wrap=evil\n&& touch BROKEN'


def resolved(*overrides: str, with_=()):
    return load_recipe("sft_math", ["launch=slurm", *overrides], with_)


def script(*overrides: str, folder: Path = Path("/runs/1"), lead: int = 600, **options) -> str:
    recipe = resolved(*overrides).recipe
    files = {"values": folder / VALUES, "log": folder / "logs/job.log"}
    return batch_script(recipe, plan_topology(recipe), lead=lead, **files, **options)


def sbatch_options(text: str) -> dict[str, str]:
    """Options of the #SBATCH lines, as far as sbatch reads them: up to the first command."""
    options = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            option, _, value = line.removeprefix("#SBATCH --").partition("=")
            options[option] = value
    return options


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    # no Slurm to ask for limits, even where there is one
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def test_the_script_asks_for_the_nodes_and_gpus_of_the_cluster():
    options = sbatch_options(
        script("cluster.nodes=2", "cluster.devices_per_node=8", "train.prompts_per_step=16")
    )
    assert options == {
        "job-name": "sft_math",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "64",
        "gpus-per-node": "8",
        "signal": "B:USR1@600",
        "requeue": "",
    }


def test_every_slurm_setting_becomes_an_option():
    settings = {
        "partition": "gpu,long",
        "account": "me",
        "qos": "high",
        "reservation": "week-3",
        "time": "1-2:03:04",
        "gres": "gpu:h100:8",
        "constraint": "[rack1|rack2]",
        "nodelist": "node[1-4],node7",
        "exclude": "node5",
        "mail_type": "END,FAIL",
        "mail_user": "me@example.org",
        "dependency": "afterok:12?singleton",
        "cpus_per_task": 12,
        "options": {"mem": 0, "exclusive": True, "oversubscribe": False, "comment": "a trial #3"},
    }
    options = sbatch_options(script(f"launch.slurm={json.dumps(settings)}"))
    for name in (
        "partition",
        "account",
        "qos",
        "reservation",
        "gres",
        "constraint",
        "nodelist",
        "exclude",
        "mail_type",
        "mail_user",
        "dependency",
        "cpus_per_task",
    ):
        assert options.pop(name.replace("_", "-")) == str(settings[name])
    assert options == {
        "job-name": "sft_math",
        "nodes": "1",
        "ntasks-per-node": "1",
        "time": "1-02:03:04",
        "mem": "0",
        "exclusive": "",
        "comment": '"a trial #3"',
        "signal": "B:USR1@600",
        "requeue": "",
    }


def test_a_job_on_cpus_asks_for_no_gpus():
    options = sbatch_options(script("cluster.device=cpu", "cluster.devices_per_node=3"))
    assert "gpus-per-node" not in options
    assert options["cpus-per-task"] == "6"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400),
        ("2d", 172800),
        ("8:00:00", 28800),
        ("1-2:03:04", 93784),
        ("30", 1800),
        ("8:30", 510),
        ("1-12", 129600),
        ("60s", 60),
    ],
)
def test_times_are_converted_to_seconds(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("time=soon", "write 90m, 8h"),
        ("time=infinite", "null is the partition's limit"),
        ("time=8h; rm", "write 90m"),
        ("partition='a b'", "use one word"),
        ("partition=--help", "use one word"),
        ('account="x\\n#SBATCH --wrap=evil"', "use one word"),
        ("gres=gpu\\x", "use one word"),
        ("options.comment='a\"b'", ""),
        ('options.comment="a\\nb"', ""),
        ("options.Comment=x", "the long name of an option"),
        ('setup=["a\\nb"]', "use one line"),
        ('modules=["a b"]', "use one word"),
        ("requeues=-1", ""),
    ],
)
def test_settings_that_would_break_the_script_are_refused_with_the_right_form(setting, says):
    with pytest.raises(RecipeError) as caught:
        resolved(f"launch.slurm.{setting}")
    assert "launch.slurm" in str(caught.value)
    assert says in str(caught.value)
    assert "64 letters" not in str(caught.value)


@pytest.mark.parametrize(("setting", "says"), [
    ("options.nodes=3",
     "rlcli sets it itself"), ("options.mail-user=me", "launch.slurm.mail_user is the key"),
    ("options.signal=TERM", "rlcli sets it itself"), ("time=10s", "Slurm counts in minutes"),
    ("template=nowhere.j2", "the template nowhere.j2 cannot be used"),
])  # fmt: skip
def test_options_that_rlcli_sets_itself_and_impossible_values_are_refused(setting, says):
    with pytest.raises(UsageError, match=says):
        script(f"launch.slurm.{setting}")


def test_the_script_for_512_nodes_fits_on_one_screen():
    text = script("cluster.nodes=512", "cluster.devices_per_node=8", "train.prompts_per_step=4096")
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_sweep_becomes_a_job_array():
    assert sbatch_options(script(runs=6, at_once=2))["array"] == "0-5%2"
    assert sbatch_options(script(runs=6))["array"] == "0-5"


def test_different_nodes_become_parts_of_a_heterogeneous_job():
    text = script(
        "cluster.nodes=3",
        "train.prompts_per_step=8",
        "launch.slurm.partition=train",
        "launch.slurm.time=8h",
        "launch.slurm.mail_type=END",
        "launch.slurm.parts=[{nodes: 2}, {nodes: 1, partition: infer, gres: 'gpu:l40s:1'}]",
    )
    first, second = text.split("#SBATCH hetjob\n")
    assert sbatch_options(first) == {
        "job-name": "sft_math", "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "8",
        "gpus-per-node": "1", "time": "08:00:00", "partition": "train", "mail-type": "END",
        "signal": "B:USR1@600", "requeue": "",
    }  # fmt: skip
    assert sbatch_options(second) == {
        "nodes": "1",
        "ntasks-per-node": "1",
        "cpus-per-task": "8",
        "time": "08:00:00",
        "partition": "infer",
        "gres": "gpu:l40s:1",
    }
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_parts_that_do_not_match_the_nodes_or_belong_to_a_sweep_are_refused():
    with pytest.raises(
        RecipeError, match="the parts of the job have 3 nodes, but the cluster has 2"
    ):
        resolved(
            "cluster.nodes=2",
            "train.prompts_per_step=8",
            "launch.slurm.parts=[{nodes: 2}, {nodes: 1}]",
        )
    with pytest.raises(UsageError, match="Slurm has no arrays of heterogeneous jobs"):
        script(
            "cluster.nodes=2",
            "train.prompts_per_step=8",
            "launch.slurm.parts=[{nodes: 1}, {nodes: 1}]",
            runs=2,
        )


def test_a_users_own_template_is_used(tmp_path):
    (tmp_path / "mine.j2").write_text(
        "#!/bin/sh\n{% for one in parts[0] %}#SBATCH --{{ one }}\n{% endfor "
        "%}run {{ values|quote }}"
    )
    text = script("launch.slurm.template=mine.j2", folder=Path("/a b"))
    assert sbatch_options(text)["requeue"] == ""
    assert text.endswith(f"run '/a b/{VALUES}'")
    (tmp_path / "mine.j2").write_text("{{ no_such_value }}")
    with pytest.raises(UsageError, match="no_such_value"):
        script("launch.slurm.template=mine.j2")


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ cycler.__init__.__globals__.os.mkdir('made') }}",
        "{{ log.parents[1].joinpath('made').touch() }}",
        "{% for one in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_runs_no_code(tmp_path, hostile):
    (tmp_path / "mine.j2").write_text(hostile)
    with pytest.raises(UsageError, match=r"the template mine\.j2 cannot be used"):
        script("launch.slurm.template=mine.j2", folder=tmp_path)
    assert not list(tmp_path.rglob("made"))


def test_an_unmeasured_run_is_warned_at_most_a_quarter_before_its_end():
    def lead(time):
        text = JobArray(
            resolved(f"launch.slurm.time={time}").recipe, Path("/runs/1"), (Path("/runs/1"),)
        ).script()
        return sbatch_options(text)["signal"]

    assert [lead("8h"), lead("10m")] == [f"B:USR1@{LEAD}", "B:USR1@150"]


def test_a_measured_run_is_warned_three_steps_and_a_minute_before_its_end(tmp_path):
    steps = [
        {"step": 7, "time/step": 30.0, "time/checkpoint": 10.0},
        {"step": 8, "time/step": 20.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in steps))
    recipe = resolved("launch.slurm.time=8h").recipe
    assert (
        sbatch_options(JobArray(recipe, tmp_path, (tmp_path,)).script())["signal"] == "B:USR1@180"
    )


def test_slurm_warns_of_the_end_as_early_as_it_can(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step": 25000.0}\n')
    recipe = resolved("launch.slurm.time=7d").recipe
    options = sbatch_options(JobArray(recipe, tmp_path, (tmp_path,)).script())
    assert options["signal"] == "B:USR1@65535"


# -- running the script ----------------------------------------------------------------------------


def start(folder: Path, text: str, **variables) -> subprocess.CompletedProcess[str]:
    """Run a script as Slurm does."""
    return subprocess.run(
        ["bash", "-s"],
        input=text,
        text=True,
        cwd=folder,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
    )


@pytest.fixture
def stand_in_rlcli(tmp_path):
    """Make the script run an `rlcli` that prints its working directory and its arguments."""
    package = tmp_path / "stand-in/rlcli"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import json, os, signal, sys\n"
        "blocked = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "told = {'words': sys.argv[1:], 'cwd': os.getcwd(), 'project': "
        "os.environ.get('RLCLI_PROJECT')}\n"
        "array = os.environ.get('SLURM_ARRAY_TASK_ID')\n"
        "print(json.dumps(told | {'kept': blocked, 'array': array}))\n"
    )
    return str(tmp_path / "stand-in")


def write_values(folder: Path, runs: list[Path], overrides: tuple[str, ...], stand_in: str) -> None:
    for logs in (folder / "logs", *(run / "logs" for run in runs)):
        logs.mkdir(parents=True, exist_ok=True)
    batch = JobArray(resolved().recipe, folder, tuple(runs), overrides=overrides)
    values = batch._values()
    values["environment"]["PYTHONPATH"] = stand_in
    (folder / VALUES).write_text(json.dumps(values))


def test_no_value_breaks_out_of_the_script(tmp_path, monkeypatch, stand_in_rlcli):
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    run, override = (
        folder / "a run $(touch BROKEN)",
        f"models.actor.scratch.hidden_act={json.dumps(HOSTILE)}",
    )
    write_values(run, [run], (override,), stand_in_rlcli)
    text = script(folder=run)
    assert "wrap" not in sbatch_options(text)
    done = start(tmp_path, text)
    assert done.returncode == 0, done.stderr
    (report,) = map(json.loads, (run / "logs/job.log").read_text().splitlines())
    assert report.pop("words") == ["resume", "--in-job", "--", str(run), override]
    assert report == {
        "cwd": str(folder),
        "project": str(folder),
        "kept": True,
        "array": None,
    }
    assert not list(tmp_path.rglob("BROKEN"))


def test_a_script_without_its_values_names_the_missing_file(tmp_path):
    text = script(folder=tmp_path / "run")
    assert "output" not in sbatch_options(text)
    done = start(tmp_path, text)
    assert done.returncode == 2
    assert f"there is no {tmp_path / 'run' / VALUES}: rlcli train writes it" in done.stderr
    assert not (tmp_path / "run").exists()


def test_each_job_of_an_array_executes_its_own_run(tmp_path, stand_in_rlcli):
    runs = [tmp_path / "sweep" / name for name in ("1-a", "2-b")]
    write_values(tmp_path / "sweep", runs, (), stand_in_rlcli)
    assert (
        start(
            tmp_path, script(folder=tmp_path / "sweep", runs=2), SLURM_ARRAY_TASK_ID="1"
        ).returncode
        == 0
    )
    assert json.loads((runs[1] / "logs/job.log").read_text())["words"][-1] == str(runs[1])
    assert not (runs[0] / "logs/job.log").exists()


def test_a_job_submitted_by_one_of_an_array_is_not_taken_for_one(tmp_path, stand_in_rlcli):
    run = tmp_path / "run"
    write_values(run, [run], (), stand_in_rlcli)
    assert start(tmp_path, script(folder=run), SLURM_ARRAY_TASK_ID="7").returncode == 0
    assert json.loads((run / "logs/job.log").read_text())["array"] is None


def test_setup_lines_and_modules_run_first_and_stop_the_job_if_they_fail(tmp_path, stand_in_rlcli):
    write_values(tmp_path / "run", [tmp_path / "run"], (), stand_in_rlcli)
    lines = ['export MADE="by setup"', "module() { echo module $*; }"]
    text = script(
        f"launch.slurm.setup={json.dumps([*lines, 'echo $MADE'])}", folder=tmp_path / "run"
    )
    assert start(tmp_path, text).returncode == 0
    assert (tmp_path / "run/logs/job.log").read_text().startswith("by setup\n{")
    text = script('launch.slurm.modules=["cuda/12.8"]', folder=tmp_path / "run")
    done = start(tmp_path, text)
    assert done.returncode == 127
    assert "module" in (tmp_path / "run/logs/job.log").read_text().splitlines()[-1]


# -- srun ------------------------------------------------------------------------------------------


def srun(*overrides: str) -> list[str]:
    return srun_command(
        resolved("cluster.nodes=2", "train.prompts_per_step=8", *overrides).recipe,
        Path("/a run"),
        "mark",
    )


def test_srun_starts_one_task_per_node_and_ends_all_with_the_first_failure():
    words = srun()
    assert words[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} < {*words}
    # else SLURM_EXPORT_ENV decides, which `sbatch --export` sets
    assert "--export=ALL" in words
    assert words[-6:] == [sys.executable, "-P", "-m", "rlcli.launch.slurm.agent", "/a run", "mark"]


def test_the_parts_of_a_job_are_started_by_one_srun(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK_HET_GROUP_1", "3")
    words = srun("launch.slurm.parts=[{nodes: 1}, {nodes: 1, partition: infer}]")
    assert words.count("srun") == 1
    first, second = words[1 : words.index(":")], words[words.index(":") + 1 :]
    assert {"--het-group=0", "--nodes=1", "--ntasks=1"} < {*first}
    assert {"--het-group=1", "--nodes=1", "--ntasks=1", "--cpus-per-task=3"} < {*second}
    assert first[-6:] == second[-6:]


def test_tasks_can_run_in_a_container():
    pyxis = srun(
        "launch.slurm.container={engine: pyxis, image: 'nvcr.io#nvidia/pytorch', mounts: "
        "['/data:/data'], python: /venv/bin/python, options: ['--container-writable']}"
    )
    at = pyxis.index("--container-image=nvcr.io#nvidia/pytorch")
    assert pyxis[at + 1 : at + 4] == [
        "--container-mounts=/a run:/a run,/data:/data",
        "--container-writable",
        "/venv/bin/python",
    ]
    apptainer = srun(
        "launch.slurm.container={engine: apptainer, image: torch.sif, options: ['--nv']}"
    )
    at = apptainer.index("apptainer")
    assert apptainer[at : at + 7] == [
        "apptainer",
        "exec",
        "--bind",
        "/a run:/a run",
        "--nv",
        "torch.sif",
        sys.executable,
    ]


@pytest.mark.parametrize(("errors", "first"), [
    ("", None), ("srun: job 7 queued and waiting for resources\n", None),
    ("srun: error: node2: task 1: Killed\nsrun: error: node1: task 0: Terminated\n", (1, -9)),
    ("hello\nsrun: error: node[3-4]: tasks 2-3: Exited with exit code 7\n", (2, 7)),
    ("srun: error: node2: task 1: Segmentation fault (core dumped)\n", (1, -11)),
])  # fmt: skip
def test_the_first_failed_task_is_read_from_srun(errors, first):
    assert first_to_fail(errors) == first


def test_paths_in_the_script_are_quoted_for_the_shell():
    assert shlex.quote(f"/it's/{VALUES}") in script(folder=Path("/it's"))


# -- the documentation -----------------------------------------------------------------------------

DOCS = (Path(__file__).parents[2] / "docs/slurm.md").read_text()


def test_the_documented_profile_and_commands_work(tmp_path):
    profile, parts = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    (tmp_path / "two_kinds.yaml").write_text(f"extends: ppo_math\n{parts}")
    assert [part.nodes for part in load_recipe("two_kinds.yaml").recipe.launch.slurm.parts] == [
        2,
        1,
    ]
    name = re.match(r"# (recipes/\w+\.yaml)\n", profile)[1]
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "recipes").mkdir()
    (tmp_path / name).write_text(profile)
    commands = [
        shlex.split(line, comments=True)
        for block in re.findall(r"```bash\n(.*?)```", DOCS, re.DOTALL)
        for line in block.splitlines()
    ]
    for words in commands:
        options = [] if "--dry-run" in words else ["--dry-run"]
        done = subprocess.run(
            [sys.executable, "-m", *words, *options],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert done.returncode == 0, done.stderr
        assert "#SBATCH --signal=B:USR1@" in done.stdout
        assert ("mycluster" in words) == ("--partition=gpu" in done.stdout)
        assert ("--sweep" in words) == ("#SBATCH --array=0-5%4" in done.stdout)
    assert len(commands) == 4
    assert not (tmp_path / "runs").exists()
