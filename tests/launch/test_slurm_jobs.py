"""Slurm's answers, which the emulated cluster cannot give: every state in the accounts, and
commands that fail."""

import json
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest

from rlcli.cli import resume
from rlcli.errors import ResourceError
from rlcli.launch import run_jobs
from rlcli.launch.run import prepare_run
from rlcli.launch.slurm import allocations, commands, jobs
from rlcli.launch.slurm.jobs import Submission, look_up
from rlcli.launch.slurm.launcher import names_of_nodes
from rlcli.launch.slurm.script import TEMPLATE
from rlcli.launch.slurm.submit import VALUES, planned, submit_again
from rlcli.launch.stop_run import StopPatience
from rlcli.launch.supervisor import PARENT
from rlcli.observe.display import EVENTS
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.run_lock import read_holder
from rlcli.observe.run_overview import Overview, note_stop
from rlcli.recipe.resolve import load_recipe

OWN = ("RLCLI_", "SLURM_", "SRUN_")


@pytest.fixture
def answers(monkeypatch, tmp_path):
    """Commands that print a given text, or fail with it."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def stand_in(name, out="", errors=""):
        (tmp_path / f"{name}.out").write_text(out)
        (tmp_path / f"{name}.err").write_text(errors)
        body = (
            f'cat "{tmp_path}/{name}.out"; cat "{tmp_path}/{name}.err" >&2; '
            f"exit {1 if errors else 0}"
        )
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    return stand_in


@pytest.mark.parametrize(
    ("recorded_state", "state"),
    [
        ("COMPLETED", "done"),
        ("CANCELLED by 1000", "cancelled"),
        ("TIMEOUT", "out of time"),
        ("PREEMPTED", "preempted"),
        ("NODE_FAIL", "node failed"),
        ("OUT_OF_MEMORY", "out of memory"),
        ("FAILED", "failed"),
        ("NEW_WORD", "unknown"),
    ],
)
def test_a_job_that_left_the_queue_is_looked_up_in_the_accounts(answers, recorded_state, state):
    answers("squeue", errors="slurm_load_jobs error: Invalid job id specified")
    answers("sacct", f"7|{recorded_state}|2026-11-22T23:41:52|node[1-2]\n8|RUNNING|x\n")
    (job,) = look_up(["7", "8"]).values()
    assert (job.state, job.nodes, job.starts) == (state, "node[1-2]", "2026-11-22T23:41:52")


def test_a_job_that_left_the_queue_is_unknown_without_accounts(answers, caplog):
    answers("squeue", errors="slurm_load_jobs error: Invalid job id specified")
    answers("sacct", errors="Slurm accounting storage is disabled")
    assert look_up(["7"]) == {}
    assert not caplog.messages
    answers("sacct", errors='sacct: fatal: Invalid field requested: "Restarts"')
    assert look_up(["7"]) == look_up(["7"]) == {}
    (message,) = caplog.messages
    assert "Invalid field requested" in message


def test_a_controller_that_does_not_answer_is_an_error(answers, monkeypatch):
    answers("squeue", errors="squeue: error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(ResourceError, match=r"F66.*squeue: Unable to contact slurm controller"):
        look_up(["7"])

    def hang(*_, **__):
        raise subprocess.TimeoutExpired("squeue", 60)

    monkeypatch.setattr(commands.subprocess, "run", hang)
    with pytest.raises(ResourceError, match="has not answered within 60 s"):
        look_up(["7"])


@pytest.mark.parametrize(
    ("failure", "complaint"),
    [
        ("kill -PIPE $$", "scancel was killed by SIGPIPE"),
        (
            "echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1",
            "Socket timed out",
        ),
    ],
    ids=["hangs up", "times out"],
)
def test_a_query_that_a_busy_controller_drops_is_repeated_but_a_cancellation_is_not(
    tmp_path, monkeypatch, failure, complaint
):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    columns = f"{'7':<40}{'RUNNING':<20}{'None':<200}{'N/A':<24}{'node1':<4000}0"
    body = (
        f'[ -e "{tmp_path}/asked" ] || {{ touch "{tmp_path}/asked"; {failure}; }}; echo "{columns}"'
    )
    for name in ("squeue", "scancel"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    assert look_up(["7"])["7"].state == "running"
    (tmp_path / "asked").unlink()
    # which may have done something
    with pytest.raises(ResourceError, match=complaint):
        jobs.cancel("7")


def test_missing_slurm_commands_are_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match="there is no squeue here"):
        look_up(["7"])


def test_a_submission_survives_a_round_trip(tmp_path):
    submission = Submission("7", "alps", "2026-11-22T23:41:52+00:00", name="rlcli-x")
    submission.write(tmp_path)
    assert Submission.read(tmp_path) == submission


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"launcher": "slurm", "job_id": "--all", "submitted": ""}',
        '{"launcher": "slurm", "job_id": 7, "submitted": ""}',
        '{"launcher": "local", "job_id": "7", "submitted": ""}',
    ],
)
def test_an_invalid_job_file_is_ignored(tmp_path, content):
    (tmp_path / jobs.JOB_FILE).write_text(content)
    assert Submission.read(tmp_path) is None


def test_nodes_are_named_by_slurm(answers, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu-[16-17]")
    answers("scontrol", "gpu-16\ngpu-17\n")
    assert names_of_nodes() == {0: "gpu-16", 1: "gpu-17"}
    answers("scontrol", errors="scontrol: error: no such thing")
    assert names_of_nodes() == {}


def asked_of(monkeypatch):
    """The commands that a job gives, each of which is answered with RUNNING."""
    asked = []
    monkeypatch.setattr(
        allocations, "ask_slurm", lambda command: asked.append(command) or "RUNNING"
    )
    return asked


@pytest.mark.parametrize(("is_asked", "code", "requeued"), [(True, 0, False), (False, 75, True)])
def test_a_job_is_requeued_unless_the_user_stopped_its_run(
    tmp_path, monkeypatch, is_asked, code, requeued
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    asked = asked_of(monkeypatch)
    with RunDirectory.create(tmp_path / "run", "toy"):
        holder = read_holder(tmp_path / "run/lock")

    def work():
        if is_asked:
            note_stop(tmp_path / "run", holder)
        return 75

    assert allocations.run_in_allocation(tmp_path / "run", work, requeues=3) == code
    assert (["scontrol", "requeue", "7"] in asked) == requeued


@pytest.mark.parametrize(("code", "requeued"), [(143, True), (138, True), (137, False), (4, False)])
def test_a_job_that_a_signal_ended_while_it_started_is_requeued(
    tmp_path, monkeypatch, code, requeued
):
    """SIGTERM or SIGUSR1 may come before the run can handle them; SIGKILL is not asked for."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    asked = asked_of(monkeypatch)
    with RunDirectory.create(tmp_path / "run", "toy"):
        assert allocations.run_in_allocation(tmp_path / "run", lambda: code, requeues=3) == code
    assert (["scontrol", "requeue", "7"] in asked) == requeued


def test_a_job_of_an_array_puts_only_itself_back(tmp_path, monkeypatch):
    """Slurm gives one job of an array the number of the array."""
    for name, value in (("JOB_ID", "7"), ("ARRAY_JOB_ID", "7"), ("ARRAY_TASK_ID", "2")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    asked = asked_of(monkeypatch)
    with RunDirectory.create(tmp_path / "run", "toy"):
        assert allocations.run_in_allocation(tmp_path / "run", lambda: 75, requeues=3) == 75
    assert asked[-1] == ["scontrol", "requeue", "7_2"]
    assert all("--jobs=7_2" in command for command in asked[:-1])
    assert allocations.read_allocations(tmp_path / "run")[0].job == "7_2"


def test_a_job_that_continues_a_run_heeds_a_new_limit_of_requeues(project, monkeypatch):
    run, limits = project / "run", []
    prepare_run(load_recipe("toy.yaml", ["launch=slurm"]), run)
    monkeypatch.setattr(
        allocations, "run_in_allocation", lambda folder, work, requeues: limits.append(requeues)
    )
    resume._in_allocation(run, ["launch.slurm.requeues=0"], None, False, lambda: 0)
    assert limits == [0]


def test_a_run_is_continued_by_a_job_in_its_own_folder_and_project(
    project, components, answers, tmp_path, monkeypatch
):
    (project / "own.j2").write_text(TEMPLATE.read_text())
    run, elsewhere = project / "run", tmp_path / "other"
    settings = ["launch=slurm", "launch.slurm.template=own.j2"]
    prepare_run(load_recipe("toy.yaml", settings), run)
    elsewhere.mkdir()
    (elsewhere / "pyproject.toml").write_text("[tool.rlcli]\n")
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("RLCLI_PROJECT")
    answers("sinfo")
    answers("sbatch", "123\n")
    assert resume._submit(run, [], None, False) == "123"
    values = json.loads((run / VALUES).read_text())
    assert values["folder"] == str(project)
    assert values["environment"] == {"RLCLI_PROJECT": str(components)}
    assert Path.cwd() == elsewhere


def test_no_job_is_submitted_for_a_run_that_is_complete(train, answers):
    _, run = train("train.steps=1")
    answers("sinfo")
    answers("sbatch", "123\n")
    assert resume._submit(run, ["launch=slurm"], None, False) is None
    assert resume._submit(run, ["launch=slurm", "train.steps=2"], None, False) == "123"


@pytest.fixture
def variables_for(monkeypatch, tmp_path):
    """The variables of Slurm's and of ours that a command gets."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in [name for name in os.environ if name.startswith(OWN)]:
        monkeypatch.delenv(name)

    def look(command):
        (tmp_path / command).write_text("#!/bin/sh\nexec env\n")
        (tmp_path / command).chmod(0o755)
        lines = (line.partition("=") for line in commands.ask_slurm([command]).splitlines())
        variables = {name: value for name, _, value in lines if name.startswith(OWN)}
        del variables["SLURM_TIME_FORMAT"]
        return variables

    return look


def test_a_job_inherits_nothing_that_was_meant_for_the_process_that_submits_it(
    monkeypatch, variables_for
):
    """A run that is submitted from Python would stop at once, because its parent is gone."""
    monkeypatch.setenv("RLCLI_TEST", "inherited")
    for name in (PARENT, EVENTS):
        monkeypatch.setenv(name, "4")
    assert variables_for("sbatch") == {"RLCLI_TEST": "inherited"}


def test_a_job_inherits_nothing_of_the_job_in_which_it_is_submitted(monkeypatch, variables_for):
    """Such as one of JupyterHub; srun would take it for options."""
    of_job = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_CPU": "4000", "SRUN_CPUS_PER_TASK": "2"}
    for name, value in {**of_job, "SLURM_CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(name, value)
    assert variables_for("sbatch") == {"SLURM_CONF": "/etc/slurm.conf"}
    assert variables_for("squeue") == {**of_job, "SLURM_CONF": "/etc/slurm.conf"}


def test_a_run_is_warned_early_enough_to_write_a_checkpoint(tmp_path):
    """Checkpoints are written besides the steps, whose times do not have that."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "time/step": 10.0}\n')
    assert allocations.lead_of(tmp_path, None) == 60 + 3 * 10
    for step, seconds in ((3, 200), (6, 150)):
        checkpoint = tmp_path / "checkpoints" / f"step-{step:012}"
        checkpoint.mkdir(parents=True)
        for file, written in (("state.json", 1e9), ("MANIFEST.json", 1e9 + seconds)):
            (checkpoint / file).touch()
            os.utime(checkpoint / file, (written, written))
    (tmp_path / "checkpoints" / ".tmp-9-run").mkdir()
    assert allocations.lead_of(tmp_path, None) == 60 + 3 * 10 + 2 * 200
    assert allocations.lead_of(tmp_path, 600) == 300


@pytest.mark.parametrize("notices", ["", "-- Welcome --\n--> Verifying valid account...OK\n"])
def test_the_id_of_a_job_is_the_last_line_of_what_sbatch_prints(project, answers, notices):
    resolved = load_recipe("toy.yaml", ["launch=slurm"])
    prepare_run(resolved, project / "run")
    answers("sbatch", f"{notices}4711;alps\n")
    assert planned(resolved, project / "run").submit() == "4711"
    submission = Submission.read(project / "run")
    assert (submission.job_id, submission.cluster) == ("4711", "alps")
    answers("sbatch", f"{notices}Submitted batch job 4711\n")
    with pytest.raises(ResourceError, match="sbatch answered"):
        planned(resolved, project / "run").submit()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A run whose job is in the cluster alps, of which squeue knows only there."""
    columns = f"{'7':<40}{'RUNNING':<20}{'None':<200}{'N/A':<24}{'node1':<4000}0"
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for name in ("squeue", "sacct", "scancel", "scontrol"):
        body = f'echo "{name} $*" >> "{tmp_path}/asked"\n'
        if name == "squeue":
            body += (
                f'[ "$1" = --clusters=alps ] && echo "CLUSTER: alps" && echo "{columns}"; exit 0\n'
            )
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}")
        (tmp_path / "bin" / name).chmod(0o755)
    folder = tmp_path / "run"
    folder.mkdir()
    Submission("7", "alps", "2026-11-22T23:41:52+00:00").write(folder)
    unknown = ("last", "holder", "host", "started", "updated", "exit_code", "message")
    return Overview(folder, "running", 1, 9, job="7", **dict.fromkeys(unknown))


def test_the_job_of_another_cluster_is_asked_for_there(elsewhere, tmp_path):
    (run,) = run_jobs.with_jobs([elsewhere])
    assert (run.state, run.nodes) == ("running", "node1")
    with pytest.raises(ResourceError, match=r"F71.*job 7 of this run is running"):
        submit_again(elsewhere.folder, (), (), None)
    patience = StopPatience(0.0)
    assert run_jobs.stop_job(elsewhere, at_once=False, patience=patience, wait=False, say=print)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {line.split()[0] for line in asked} == {"squeue", "scontrol", "scancel"}
    assert all(line.split()[1] == "--clusters=alps" for line in asked)


def test_a_job_that_is_being_stopped_is_asked_for_less_and_less_often(elsewhere, monkeypatch):
    clock, pauses = mock.Mock(monotonic=lambda: sum(pauses)), []
    clock.sleep = pauses.append
    monkeypatch.setattr(run_jobs, "time", clock)
    monkeypatch.setattr(run_jobs, "look_up_one", lambda *job: mock.Mock(is_alive=sum(pauses) < 60))
    assert run_jobs.stop_job(
        elsewhere, at_once=False, patience=StopPatience(100.0), wait=True, say=print
    )
    assert pauses[:5] == [0.5, 1, 2, 4, 5]
    assert max(pauses) == run_jobs.LOOK_AGAIN


def test_the_time_of_a_partition_is_that_of_the_cluster_that_the_options_choose(
    project, tmp_path, monkeypatch
):
    lines = ['limit="infinite infinite"', '[ "$1" = --clusters=alps ] && limit="20:00 1-0"']
    body = "\n".join(["#!/bin/sh", *lines, 'echo "CLUSTER: here"; echo "long $limit"'])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sinfo").write_text(body)
    (tmp_path / "bin/sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    settings = ["launch=slurm", "launch.slurm.partition=long"]

    def script(*overrides):
        return planned(load_recipe("toy.yaml", [*settings, *overrides]), None).script()

    assert "signal=B:USR1@900\n" in script()
    assert "signal=B:USR1@300\n" in script("launch.slurm.options.clusters=alps")


def test_the_time_of_a_job_of_parts_is_the_shortest_of_their_partitions(
    project, tmp_path, monkeypatch
):
    lines = [
        'case "$*" in *long*) echo "long 20:00 1-0";; esac',
        'case "$*" in *short*) echo "short n/a 8:00";; esac',
    ]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sinfo").write_text("\n".join(["#!/bin/sh", *lines]))
    (tmp_path / "bin/sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    parts = ["launch.slurm.parts=[{nodes: 1}, {nodes: 1, partition: short}]", "cluster.nodes=2"]
    settings = ["launch=slurm", "launch.slurm.partition=long", *parts]
    script = planned(load_recipe("toy.yaml", settings), None).script()
    assert "signal=B:USR1@120\n" in script
    either = ["launch=slurm", "launch.slurm.partition='long,short'"]
    script = planned(load_recipe("toy.yaml", either), None).script()
    assert "signal=B:USR1@120\n" in script
