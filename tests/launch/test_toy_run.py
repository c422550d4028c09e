"""The same toy graph in one process, on two ranks and on meshes that do not coincide:
always the same numbers."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from rlcli.errors import (
    DataError,
    HangError,
    NumericError,
    ProjectError,
    ResourceError,
    UsageError,
    WorkerError,
)
from rlcli.launch.run import run_recipe
from rlcli.messaging import zmq_master
from rlcli.messaging.control import Control
from rlcli.observe.display import PlainDisplay
from rlcli.observe.results import digest, find_result
from rlcli.observe.samples import read_samples
from rlcli.processes import STOP_SIGNALS, die_with_parent
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.worker import ModelWorker
from rlcli.runtime.worker_main import MEETING

pytestmark = pytest.mark.timeout(420)  # a start on two ranks takes a while on a slow machine

HOME = str(Path(__file__).parents[2])
TWO_RANKS = ("launch=local", "cluster.devices_per_node=2")
DISJOINT = ("models.critic.devices='1'", "models.reward.devices='0'")


@pytest.fixture
def train(project):
    """Run toy.yaml with overrides; returns the outcome and the folder."""

    def run(*overrides, name="run", recipe="toy.yaml"):
        resolved = load_recipe(recipe, overrides)
        with PlainDisplay(sys.stderr) as display:
            return run_recipe(resolved, project / name, display), project / name

    return run


def numbers(folder):
    """The records of a run, without what a clock says."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "tokens_per_second", "perf/")
    return [
        {key: value for key, value in record.items() if not key.startswith(clocks)}
        for record in records
    ]


def step_seconds(folder):
    """What each training step took."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["time/step"] for record in records if "time/step" in record]


def processes_of(folder):
    """Processes of the run that are alive."""
    records = json.loads((folder / "procs.json").read_text())
    assert records
    processes = [psutil.Process(one["pid"]) for one in records if psutil.pid_exists(one["pid"])]
    return [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]


def status(folder):
    return json.loads((folder / "status.json").read_text())


# -- one process -----------------------------------------------------------------------------------


def test_what_calls_print_in_the_process_of_a_run_is_in_its_log(train, monkeypatch, capsys):
    handle = ModelWorker.handle

    def handle_and_say(worker, request):
        print(f"asked to {request.op}")
        return handle(worker, request)

    monkeypatch.setattr(ModelWorker, "handle", handle_and_say)
    _, folder = train("train.steps=1", "log.trackers=[]")
    lines = (folder / "logs/rank0.log").read_text().splitlines()
    assert "asked to run_call" in lines
    assert [line for line in capsys.readouterr().out.splitlines() if "asked" in line] == lines


def test_a_run_in_one_process_writes_metrics_status_and_models(train):
    finished, folder = train()
    assert (finished.exit_code, finished.steps_done) == (0, 3)
    records = numbers(folder)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert ["eval/reward" in record for record in records] == [True, False, True, True]
    assert set(records[0]) == {
        "step",
        "eval/reward",
        "eval/accuracy",
        "eval/odd",
        "eval/loss",
        "eval/response_length",
    }
    last = records[-1]
    assert last["actor/samples"] == 8
    assert last["actor/calls"] == last["critic/calls"] == 3
    assert last["reward/reward"] == pytest.approx(last["actor/rewards"] / 8)
    assert last["reward/accuracy"] == pytest.approx(last["actor/solved"] / 8)
    assert status(folder)["state"] == "done"
    assert (
        json.loads((folder / "models/actor/config.json").read_text())["weight"]
        == last["actor/loss"]
    )
    assert sorted(path.name for path in (folder / "models").iterdir()) == ["actor", "critic"]


def test_a_tilde_in_log_dir_is_the_home_directory(project, monkeypatch):
    monkeypatch.setenv("HOME", str(project / "home"))
    with PlainDisplay(sys.stderr) as display:
        run_recipe(load_recipe("toy.yaml", ["log.dir='~/kept'"]), None, display)
    assert len(list((project / "home" / "kept" / "toy").glob("*/metrics.jsonl"))) == 1
    assert not (project / "~").exists()


def test_generation_uses_the_weights_of_the_previous_step(train):
    """The toy writes its version into its first token: 5, 6, 7, …, which the reward adds up."""
    _, folder = train("train.eval.every_steps=1")
    rewards = [record["eval/reward"] for record in numbers(folder)]
    assert [b - a for a, b in pairwise(rewards)] == [1, 1, 1]


def test_the_samples_are_written_with_the_ids_of_the_dataset(train):
    _, folder = train()
    samples = read_samples(folder / "samples.jsonl")
    assert [(s.step, s.phase) for s in samples] == [
        (step, phase)
        for step, phase in (
            (0, "eval"),
            (1, "train"),
            (2, "train"),
            (2, "eval"),
            (3, "train"),
            (3, "eval"),
        )
        for _ in range(2)
    ]
    first = samples[0]
    assert (first.id, first.prompt, first.answer) == ("row-0", "w3", "3")
    assert first.response == "w5 w6 w3"
    assert first.reward == 14


def test_every_row_is_trained_on_once_per_epoch(train):
    _, folder = train(
        "train.steps=null", "train.epochs=2", "log.samples_per_step=8", "train.eval.dataset=null"
    )
    ids = [sample.id for sample in read_samples(folder / "samples.jsonl")]
    assert len(ids) == 40
    assert sorted(ids[:20]) == sorted(ids[20:]) == sorted(f"row-{i}" for i in range(20))


def test_a_run_without_evaluation_writes_no_step_zero(train):
    _, folder = train("train.eval.dataset=null")
    assert [record["step"] for record in numbers(folder)] == [1, 2, 3]


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_ranks")
@pytest.mark.parametrize(("meshes", "held_out"), [((), 1), (DISJOINT, 5)], ids=["same", "disjoint"])
def test_two_ranks_give_the_same_numbers_as_one_process(train, project, meshes, held_out):
    """Bool, int64, bfloat16 and float32 tensors move wherever meshes differ. Of one held-out row
    one rank gets none."""
    rows = f"datasets.held_out.args.rows={held_out}"
    train(rows, name="one")
    train(rows, *TWO_RANKS, *meshes, name="two")
    assert numbers(project / "two") == numbers(project / "one")
    assert (project / "two/samples.jsonl").read_text() == (
        project / "one/samples.jsonl"
    ).read_text()
    assert processes_of(project / "two") == []


@pytest.mark.usefixtures("quick_ranks")
def test_stale_training_uses_samples_of_earlier_weights(train, project):
    """With one version of lag the first two steps are sampled by the first weights."""
    train("train.max_staleness=1", "train.eval.dataset=null", *TWO_RANKS, *DISJOINT, name="stale")
    train("train.eval.dataset=null", name="fresh")
    stale, fresh = numbers(project / "stale"), numbers(project / "fresh")
    assert len(stale) == 3
    assert [record["actor/staleness"] for record in stale][:2] == [0, 1]
    first, *others = [record["samples/ahead"] for record in stale]
    # by whether the critic is done before generation knows of the actor's new weights
    assert first in (8, 16)
    assert others == [8, 0]
    of_flow = ("samples/", "queue/", "staleness/", "actor/staleness")
    assert {key: value for key, value in stale[0].items() if not key.startswith(of_flow)} == fresh[
        0
    ]
    assert fresh[1]["reward/reward"] - stale[1]["reward/reward"] == pytest.approx(1)


@pytest.mark.long
def test_only_loopback_is_listened_on_and_no_secret_is_on_a_command_line(project):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rlcli",
            "train",
            "toy.yaml",
            "--run-dir",
            "run",
            *TWO_RANKS,
            "train.steps=2000",
        ],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": HOME},
        preexec_fn=die_with_parent,
    )
    try:
        wait_for(lambda: (project / "run/procs.json").exists())
        wait_for(lambda: status(project / "run")["state"] == "running")
        family = [
            psutil.Process(process.pid),
            *psutil.Process(process.pid).children(recursive=True),
        ]
        meeting = Path(
            next(p for p in family if "rlcli.launch.node" in p.cmdline()).environ()[MEETING]
        )
        control = Control.read(meeting)
        secrets = (control.token.hex(), control.key, control.client, control.secret)
        listening = [
            c.laddr.ip
            for p in family
            for c in p.net_connections()
            if c.status == psutil.CONN_LISTEN
        ]
        assert set(listening) <= {"127.0.0.1"}
        assert not any(secret in " ".join(p.cmdline()) for p in family for secret in secrets)
        assert not any(
            secret in value for p in family for value in p.environ().values() for secret in secrets
        )
        noted = json.loads((project / "run/procs.json").read_text())
        assert [entry["name"] for entry in noted] == ["node0", "rank0", "rank1"]
        for path in (project / "run").rglob("*"):
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077 or "torchrun" in str(path), path
    finally:
        process.kill()  # the master dies: no process continues without it
        process.wait()
    wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in family))


def wait_for(condition, seconds=200):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


# -- what can go wrong -----------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
def test_disjoint_placements_compute_at_the_same_time(train):
    """One rank generates for a second, the other trains for a second on what it is sent: a step
    takes one second."""
    _, folder = train(
        *TWO_RANKS,
        "models.actor.devices=0",
        "models.critic.devices=1",
        "models.reward.devices=1",
        "toy.seconds=1.0",
        "graph.value.interface={type: toy, args: {seconds: 0.5}}",
        "graph.train_actor=null",
        "graph.train_critic.interface={type: toy, args: {seconds: 0.5}}",
        "train.steps=8",
        "train.eval.dataset=null",
    )
    assert min(step_seconds(folder)[3:]) <= 1.3  # on a busy machine, at least once


def set_toy(project, **args):
    """Arguments for the toy of the actor."""
    text = (project / "toy.yaml").read_text()
    (project / "toy.yaml").write_text(
        text.replace("toy: {seconds: 0.0}", f"toy: {json.dumps(args)}")
    )


@pytest.mark.usefixtures("forked_processes")
def test_a_killed_rank_ends_the_run_and_is_named(train, project):
    set_toy(project, kill_rank=1)
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL") as raised:
        train(*TWO_RANKS)
    assert raised.value.exit_code == 7
    assert raised.value.where.startswith("rank 1 pid")
    ended = status(project / "run")
    assert (ended["state"], ended["exit_code"], ended["step"]) == ("failed", 7, 1)
    assert processes_of(project / "run") == []


@pytest.mark.long
@pytest.mark.usefixtures("forked_processes")
def test_a_frozen_rank_is_named_and_not_its_victim(train, project, monkeypatch):
    monkeypatch.setattr(zmq_master, "SILENT", 3.0)
    set_toy(project, sleep_rank=1)
    with pytest.raises(HangError, match="rank 1 has been silent") as raised:
        train(*TWO_RANKS, "launch.step_deadline=5")
    assert raised.value.where.startswith("rank 1 pid")
    assert "Current thread" in (project / "run/logs/rank0.log").read_text()
    assert processes_of(project / "run") == []


@pytest.mark.long
@pytest.mark.usefixtures("quick_ranks")
def test_a_stuck_rank_that_others_wait_for_is_named_with_its_location(train, project, components):
    set_toy(project, stuck_rank=1)
    with pytest.raises(HangError, match="no answer within 3 s: waiting for train_actor") as raised:
        train(*TWO_RANKS, "launch.step_deadline=3")
    assert f"rank 1 is at {components / 'interfaces/toy.py'}:" in raised.value.what
    assert raised.value.what.endswith(" in train_step, while rank 0 waits in a collective")


@pytest.mark.usefixtures("quick_ranks")
def test_an_error_of_a_rank_arrives_with_code_and_location(train, project):
    set_toy(project, fail_rank=1)
    with pytest.raises(DataError, match="nobody can train") as raised:
        train(*TWO_RANKS)
    assert (raised.value.code, raised.value.where, raised.value.exit_code) == (
        "F31",
        "rows.jsonl:7",
        4,
    )
    assert processes_of(project / "run") == []


def test_a_bug_in_a_users_component_is_reported_with_its_location(train, project, components):
    set_toy(project, bug=True)
    with pytest.raises(ProjectError, match="KeyError: 'nothing'") as raised:
        train()
    file, _, line = raised.value.where.partition(":")
    assert Path(file) == components / "interfaces/toy.py"
    assert 'data.data["nothing"]' in Path(file).read_text().splitlines()[int(line) - 1]
    assert "rlcli test interface toy" in raised.value.hint
    assert isinstance(raised.value.__cause__, KeyError)
    assert re.search("in call train_[a-z]+ of step 1", " ".join(raised.value.__notes__))
    frames = [frame.name for frame in raised.traceback]
    assert (
        frames.index("_call")
        < frames.index("_compute")
        < frames.index("ask")
        < frames.index("handle")
    )


@pytest.mark.usefixtures("quick_ranks")
def test_a_rank_that_cannot_start_says_why(train, project, monkeypatch):
    with pytest.raises(ResourceError, match="CUDA device"):
        train(*TWO_RANKS, "cluster.device=cuda")
    assert status(project / "run")["exit_code"] == 6


def test_nonfinite_updates_in_a_row_end_the_run_before_anything_is_saved(train, project):
    set_toy(project, poison=True)
    with pytest.raises(NumericError, match="actor/grad_norm is not finite, for 2 steps") as raised:
        train("train.max_nonfinite_streak=2", "log.plot=true")
    assert raised.value.exit_code == 9
    folder = project / "run"
    assert (folder / "curve.png").is_file()
    assert not (folder / "models").exists()
    assert [record["step"] for record in numbers(folder)] == [0, 1, 2]
    (first, second) = json.loads((folder / "crash/nonfinite.json").read_text())
    assert (first["step"], second["step"], len(second["samples"])) == (1, 2, 8)


def test_an_output_that_an_interface_does_not_produce_is_refused(train, project):
    text = (
        (project / "toy.yaml")
        .read_text()
        .replace("outputs: [values]", "outputs: [values, advantages]")
    )
    (project / "toy.yaml").write_text(text)
    with pytest.raises(UsageError, match="did not produce advantages, which call value promises"):
        train()


REWARD_FAULTS = {
    "nan": "gave rewards nan for sample row-.* \\(row .* of dataset train\\), which is not finite",
    "inf": "gave rewards inf for sample row-",
    "-inf": "gave rewards -inf for sample row-",
    "huge": "gave rewards 1e.300 for sample row-.*, which does not fit into a float32",
    "short": (
        "a batch that does not fit together: data of 'rewards' has shape "
        "\\(7,\\), expected \\(8,\\)"
    ),
    "two each": "gave rewards of lengths \\[2\\] for sample row-.*one per sequence: \\[1\\]",
    "other ids": "nothing for sample row-.* and something for 'nobody', not requested",
    "order": "returned the samples in another order",
    "text": "data of 'rewards' is a list, not a tensor",
    "nothing": "gave no tensor for rewards",
    "a dict": "returned a value of type dict, not a SequenceSample",
}


@pytest.mark.parametrize("fault", REWARD_FAULTS)
def test_an_invalid_reward_is_reported_before_training_on_it(train, project, components, fault):
    text = (project / "toy.yaml").read_text()
    (project / "toy.yaml").write_text(
        text.replace(
            "interface: toy_reward", f"interface: {{type: toy_reward, args: {{spoil: {fault}}}}}"
        )
    )
    with pytest.raises(ProjectError, match=REWARD_FAULTS[fault]) as raised:
        train("train.eval.at_start=false", "train.eval.every_steps=null")
    assert (raised.value.exit_code, raised.value.code) == (2, "F54")
    assert "call score: inference of interface toy_reward" in raised.value.what
    assert raised.value.where.startswith(str(components / "interfaces/toy_reward.py:"))
    assert "Traceback" not in str(raised.value)
    assert numbers(project / "run") == []
    assert not (project / "run/models").exists()


@pytest.mark.parametrize(("rows", "words"), [(0, "has no rows"), (5, "fewer than one step takes")])
def test_a_dataset_with_too_few_rows_is_refused(train, rows, words):
    with pytest.raises(DataError, match=words) as raised:
        train(f"datasets.train.args.rows={rows}")
    assert raised.value.code == "F80"


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)]
)
def test_a_signal_lets_the_step_end_and_saves(project, number, code):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rlcli",
            "train",
            "toy.yaml",
            "--run-dir",
            "run",
            "train.steps=100000",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": HOME},
        preexec_fn=die_with_parent,
    )
    metrics = project / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == code, err.decode()
    ended = status(project / "run")
    assert (ended["state"], ended["exit_code"]) == ("stopped", code)
    last = numbers(project / "run")[-1]
    assert last["step"] == ended["step"]
    assert (
        json.loads((project / "run/models/actor/config.json").read_text())["weight"]
        == last["actor/loss"]
    )


@pytest.mark.usefixtures("forked_processes")
def test_a_signal_to_every_process_of_a_job_lets_the_step_end_and_saves(project):
    """As a scheduler does it."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rlcli",
            "train",
            "toy.yaml",
            "--run-dir",
            "run",
            *TWO_RANKS,
            "train.steps=100000",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": HOME},
        preexec_fn=die_with_parent,
    )
    try:
        metrics = project / "run/metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3)
        (master,) = psutil.Process(process.pid).children()
        others = master.children(recursive=True)
        assert len(others) >= 3
        for number in (*STOP_SIGNALS, signal.SIGTERM):
            for child in others:
                child.send_signal(number)
        master.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 75, err.decode()
    step = status(project / "run")["step"]
    assert step > 3
    assert (project / f"run/checkpoints/step-{step:012d}/MANIFEST.json").exists()
    assert processes_of(project / "run") == []


# -- warm starts -----------------------------------------------------------------------------------


def test_results_are_found_by_the_recipe_that_made_them(train, project):
    recipe = load_recipe("toy.yaml", ())
    assert find_result(recipe, "runs", "actor") is None
    with PlainDisplay(sys.stderr, quiet=True) as display:
        finished = run_recipe(recipe, None, display)
    assert find_result(recipe, "runs", "actor") == finished.outcome.models["actor"]
    assert find_result(recipe, "runs", "nobody") is None
    assert find_result(load_recipe("toy.yaml", ["seed=6"]), "runs", "actor") is None
    assert digest(load_recipe("toy.yaml", ["launch=local", "log.plot=true"])) == digest(recipe)


def test_an_unfinished_run_is_not_a_result(train, project):
    recipe = load_recipe("toy.yaml", ())
    with PlainDisplay(sys.stderr, quiet=True) as display:
        folder = run_recipe(recipe, None, display).outcome.run_dir
    ended = status(folder)
    (folder / "status.json").write_text(json.dumps({**ended, "state": "stopped"}))
    assert find_result(recipe, "runs", "actor") is None
