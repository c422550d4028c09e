"""Sweeps: real runs, and what is started of an interrupted sweep."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcli.cli.main import main
from rlcli.cli.sweeps import _tell_end
from rlcli.cli.train import tell
from rlcli.errors import ResourceError, RlcliError, UsageError
from rlcli.inspect.devices import Gpu
from rlcli.launch.drive import Finished
from rlcli.launch.sweep import Local, Sweep, again, open_sweep, slots
from rlcli.observe.report import RunOutcome
from rlcli.processes import die_with_parent
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.sweep import sweep_runs

pytestmark = pytest.mark.timeout(300)

HOME = str(Path(__file__).parents[2])


def command(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "rlcli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": HOME},
        preexec_fn=die_with_parent,
    )


def test_commands_to_type_next_quote_the_folder(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "my runs"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    outcome = RunOutcome(recipe="toy", run_dir=folder, records=[])
    tell(Finished(outcome, exit_code=75, steps_done=1, steps=2), as_json=False)
    _tell_end(Local(Sweep("toy", (), (), ()), folder, (), print), 0, as_json=False)
    messages = capsys.readouterr().err
    assert "To continue: rlcli resume 'my runs'\n" in messages
    assert "curves: rlcli compare 'my runs'\n" in messages


@pytest.mark.long
def test_two_seeds_at_once_are_one_group(project):
    process = command(
        "train",
        "toy.yaml",
        "train.steps=2",
        "--seeds",
        "2",
        "--at-once",
        "2",
        "--run-dir",
        "runs/s",
    )
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "curves: rlcli compare runs/s" in err
    assert "1-seed-5  done at step 2" in err
    assert "±" in out
    states = [
        json.loads((project / f"runs/s/{name}/status.json").read_text())
        for name in ("1-seed-5", "2-seed-6")
    ]
    assert [one["state"] for one in states] == ["done", "done"]
    lines = [
        (project / f"runs/s/{name}/samples.jsonl").read_text() for name in ("1-seed-5", "2-seed-6")
    ]
    assert lines[0] != lines[1]
    process = command("compare", "runs/s", "--json")
    (group,) = json.loads(process.communicate(timeout=60)[0])["groups"]
    assert [Path(run).name for run in group["runs"]] == ["1-seed-5", "2-seed-6"]
    assert all(one["spread"] is not None for one in group["results"].values())


@pytest.mark.long
def test_ctrl_c_saves_the_current_run_and_starts_no_further_run(project):
    process = command(
        "train",
        "toy.yaml",
        "train.steps=100000",
        "--sweep",
        "seed=1,2",
        "--run-dir",
        "runs/s",
        "--json",
    )
    metrics, deadline = project / "runs/s/1-seed-1/metrics.jsonl", time.monotonic() + 200
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert (
        "to continue: rlcli train toy.yaml train.steps=100000 --sweep seed=1,2 "
        "--json --run-dir runs/s\n" in err
    )
    first, second = json.loads(out)["runs"]
    assert (first["state"], "state" in second) == ("stopped", False)
    assert not (project / "runs/s/2-seed-2").exists()


def test_ctrl_c_while_a_run_is_being_started_stops_that_run_too(sweep, tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    program = 'trap "exit 130" INT; touch "$0"; while :; do sleep 0.05; done'
    monkeypatch.setattr(
        "rlcli.launch.sweep.own_command", lambda arguments: ["sh", "-c", program, str(ready)]
    )
    started = []

    def start_and_interrupt(*arguments, start=subprocess.Popen, **options):
        started.append(start(*arguments, **options))
        deadline = time.monotonic() + 60
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start_and_interrupt)
    stop = threading.Timer(60, lambda: started[0].kill())  # a run that nobody stops
    stop.start()
    local = Local(sweep, tmp_path, [{}, {}], print)
    assert local.run() == 130
    stop.cancel()
    assert local.exit_codes == {"1-seed-1": 130}
    assert len(started) == 1


def test_a_stop_signal_while_another_is_being_sent_is_sent_once(sweep, tmp_path):
    local, sent = Local(sweep, tmp_path, [{}], print), []

    class Interrupted(deque):
        """A second signal arrives when the first is about to be taken."""

        is_interrupted = False

        def popleft(self):
            if not self.is_interrupted:
                self.is_interrupted = True
                self.append(signal.SIGTERM)
                local._send_signals()
            return super().popleft()

    local._busy[0] = sweep.runs[0], SimpleNamespace(send_signal=sent.append)
    local._unsent = Interrupted([signal.SIGINT])
    local._send_signals()
    assert sent == [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def sweep(tmp_path):
    return Sweep(
        "toy.yaml", ("more.yaml",), ("train.steps=2",), tuple(sweep_runs(["seed=1,2,3"], None, 1))
    )


def test_completed_runs_are_skipped_and_unfinished_runs_are_resumed(project, sweep):
    open_sweep(project / "s", sweep)
    assert Sweep.read(project / "s") == sweep
    local = Local(sweep, project / "s", [{}], print)
    for name, state in (("1-seed-1", "done"), ("2-seed-2", "stopped")):
        (project / "s" / name).mkdir()
        (project / "s" / name / "recipe.resolved.yaml").touch()
        status = {"run_id": "x", "state": state, "step": 1, "steps": 2}
        (project / "s" / name / "status.json").write_text(json.dumps(status))
    done, begun, new = sweep.runs
    assert (local._is_done(done), local._is_done(begun), local._is_done(new)) == (
        True,
        False,
        False,
    )
    assert local._arguments(begun)[0] == "resume"
    assert local._arguments(new) == [
        "train",
        "--quiet",
        "--run-dir",
        str(project / "s/3-seed-3"),
        "--with",
        "more.yaml",
        "--",
        "toy.yaml",
        "train.steps=2",
        "seed=3",
    ]
    local.is_checked = False
    assert local._arguments(new)[:3] == ["train", "--quiet", "--no-check"]
    open_sweep(project / "s", sweep)
    with pytest.raises(UsageError, match="holds another sweep"):
        open_sweep(project / "s", Sweep("toy.yaml", (), (), sweep.runs))
    with pytest.raises(ResourceError, match="F72"):
        open_sweep(project, sweep)


def test_the_command_to_continue_a_sweep_names_its_folder_once():
    words = ["train", "toy", "--run-dir", "a b", "--run-dir=c", "--seeds", "2"]
    assert again(Path("runs/s"), words) == "rlcli train toy --seeds 2 --run-dir runs/s"


def test_more_runs_at_once_than_fit_are_refused_before_a_folder_is_made(
    project, monkeypatch, capsys
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    options = ["--seeds", "4", "--at-once", "3", "--run-dir", "runs/s"]
    with pytest.raises(SystemExit) as ended:
        main(["train", "toy.yaml", "cluster.device=cuda", *options])
    assert ended.value.code == 2
    assert "3 runs at once need 3 GPUs; there are 2" in capsys.readouterr().err
    assert not Path("runs/s").exists()


def test_runs_at_once_share_the_cores_where_there_is_no_gpu(project, monkeypatch):
    monkeypatch.setattr("rlcli.launch.sweep.list_gpus", list)
    monkeypatch.setattr("rlcli.launch.sweep.available_cores", lambda: 8)
    for variable in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    for device in ("cpu", "auto"):
        recipe = load_recipe("toy.yaml", [f"cluster.device={device}"]).recipe
        assert slots([recipe], 2) == [{"OMP_NUM_THREADS": "4"}] * 2


def test_seeds_begin_at_the_one_on_the_command_line(project, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "toy.yaml", "seed=8", "--seeds", "2", "launch=slurm", "--dry-run", "--json"])
    assert ended.value.code == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [Path(run).name for run in runs] == ["1-seed-8", "2-seed-9"]


def test_gpus_are_divided_between_runs(project, monkeypatch):
    gpus = [Gpu(n, "H100", 80, 80, "1") for n in range(5)]
    monkeypatch.setattr("rlcli.launch.sweep.list_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = load_recipe(
        "toy.yaml", ["launch=local", "cluster.devices_per_node=2", "cluster.device=cuda"]
    ).recipe
    small = load_recipe("toy.yaml", ["cluster.device=cuda"]).recipe
    for runs in ([two], [small, two], [two, small]):  # each slot is for any of them
        assert slots(runs, None) == [
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            {"CUDA_VISIBLE_DEVICES": "2,3"},
        ]
    assert slots([two], 1) == [{"CUDA_VISIBLE_DEVICES": "0,1"}]
    with pytest.raises(RlcliError, match="3 runs at once need 6 GPUs; there are 5"):
        slots([two], 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-a")
    assert slots([two], None) == [{"CUDA_VISIBLE_DEVICES": "7,GPU-a"}]
    assert slots([load_recipe("toy.yaml", []).recipe], None) == [{}]


@pytest.mark.parametrize("nothing", ["", "-1", "NoDevFiles", "-1,0"])
def test_runs_at_once_share_the_cores_where_gpus_are_hidden(project, monkeypatch, nothing):
    monkeypatch.setattr("rlcli.launch.sweep.available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
    recipe = load_recipe("toy.yaml", ["cluster.device=auto"]).recipe
    assert slots([recipe], 2) == [{"OMP_NUM_THREADS": "4"}] * 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"3, 4,{nothing}")
    assert slots([recipe], 2) == [{"CUDA_VISIBLE_DEVICES": n} for n in ("3", "4")]


@pytest.mark.parametrize("values", ["slurm,local", "local,slurm", "slurm"])
def test_a_sweep_is_not_divided_between_here_and_slurm(project, capsys, values):
    with pytest.raises(SystemExit) as ended:
        main(["train", "toy.yaml", "--sweep", f"launch={values}", "--run-dir", "runs/s"])
    assert ended.value.code == 2
    assert "a sweep is submitted or runs here, as a whole" in capsys.readouterr().err
    assert not Path("runs/s").exists()


def test_an_array_of_jobs_is_for_runs_that_need_the_same_job(project, capsys):
    def submit(*swept):
        with pytest.raises(SystemExit) as ended:
            main(["train", "toy.yaml", "launch=slurm", "--dry-run", "--sweep", *swept])
        return ended.value.code, capsys.readouterr()

    code, written = submit("cluster.nodes=1,2")
    assert code == 2
    assert "2-nodes-2 needs another job than 1-nodes-1" in written.err
    assert submit("launch.slurm.time=1:00:00,2:00:00")[0] == 2
    code, written = submit("cluster.nodes=2")
    assert code == 0
    assert "on 2 nodes" in written.out
