"""A run as a user starts it: whatever happens to the process that trains, its supervisor reports
it, and never as 0.

Supervisor, master and ranks are forks, except where the program is what is tested.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rlcli.launch.memory_kills import count_memory_kills
from rlcli.launch.supervisor import Facts, _stop_signal
from rlcli.processes import die_with_parent

pytestmark = pytest.mark.timeout(420)

HOME = str(Path(__file__).parents[2])
TWO_RANKS = ("launch=local", "cluster.devices_per_node=2")
ENDLESS = "train.steps=100000"


LINES = (Path(__file__).parent / "toy/interfaces-toy_trouble.txt").read_text().splitlines()


def at(text):
    """`toy_trouble.py:<line>` of the line that has this text."""
    return f"toy_trouble.py:{next(n for n, line in enumerate(LINES, 1) if text in line)}"


def trouble(kind):
    return f"graph.score.interface={{type: toy_trouble, args: {{kind: {kind!r}}}}}"


@pytest.fixture
def train(project, forked_processes):
    """Start `rlcli train toy.yaml`; what is still alive at the end is killed."""
    started = []
    command = (sys.executable, "-m", "rlcli", "train", "toy.yaml", "--run-dir", "run")

    def start(*options, is_fork=True, **keywords):
        process = subprocess.Popen(
            [*(() if is_fork else ("env",)), *command, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": HOME},
            preexec_fn=die_with_parent,
            **keywords,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def end(train, project):
    """Wait for the end of a run: (exit code, stderr, status)."""

    def see(*options, is_fork=True):
        process = train(*options, is_fork=is_fork)
        _, err = process.communicate(timeout=300)
        return process.returncode, err, json.loads((project / "run/status.json").read_text())

    return see


@pytest.fixture
def training(train, project):
    """A run that has done a few steps of very many: its supervisor, and the process that trains."""

    def start(*options, **keywords):
        process = train(ENDLESS, *options, **keywords)
        metrics, deadline = project / "run/metrics.jsonl", time.monotonic() + 200
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (child,) = psutil.Process(process.pid).children()
        return process, child

    return start


def has_ended(process, seconds=10):
    """Whether it ends within that time; a zombie has ended."""
    deadline = time.monotonic() + seconds
    # `is_running` knows a pid used again
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


PERHAPS = " (out of memory?)" if count_memory_kills() is None else ""
"""Said of a kill where the kernel does not count those for want of memory."""

# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "code", "says"),
    [
        (
            "sys.exit(0)",
            2,
            at("sys.exit(0)") + ": SystemExit: 0\n  hint: rlcli test interface toy_trouble",
        ),
        ("KeyboardInterrupt", 2, at("raise error") + ": KeyboardInterrupt\n  hint: rlcli test"),
        (
            "no Exception",
            2,
            ": Speechless: its text is unavailable (ZeroDivisionError)\n  hint: rlcli test",
        ),
        (
            "write everywhere and end",
            7,
            "the run ended with exit code 0 during score on rank 0, before its work was done",
        ),
        (
            "os._exit(0)",
            7,
            "the run ended with exit code 0 during score on rank 0, before its work was done",
        ),
        ("segmentation fault", 7, "the run was killed by SIGSEGV during score on rank 0"),
        (
            "kill -9",
            7,
            (
                f"the run was killed by SIGKILL{PERHAPS} during score on rank "
                f"0{'; it held ' if PERHAPS else ''}"
            ),
        ),
    ],
    ids=str,
)
def test_a_run_that_did_not_finish_reports_it_and_never_exits_with_0(end, kind, code, says):
    returned, err, status = end(trouble(kind))
    assert returned == code, err
    assert says in err
    assert "Traceback" not in err
    assert (status["state"], status["exit_code"]) == ("failed", code)
    assert says.replace("\n  hint", ". hint") in status["message"]  # on one line there
    if kind == "segmentation fault":
        assert at("string_at") in err
    if code == 7:
        assert "rlcli resume " in err


@pytest.mark.long
@pytest.mark.parametrize(("kind", "code", "says"), [
    ("sys.exit(0)", 2, at("sys.exit(0)") + ": SystemExit: 0"),
    ("KeyboardInterrupt", 2, ": KeyboardInterrupt"),
    ("a rank leaves", 7, "rank 1 ended with exit code 0 before the run was over"),
])  # fmt: skip
def test_a_run_on_several_ranks_that_did_not_finish_never_exits_with_0(end, kind, code, says):
    # how a rank that leaves is noticed is tested with processes as a real run has them
    is_fork = kind != "a rank leaves"
    returned, err, status = end(trouble(kind), *TWO_RANKS, is_fork=is_fork)
    assert returned == code, err
    assert says in err
    assert (status["state"], status["exit_code"]) == ("failed", code)


def test_a_killed_master_is_reported_and_leaves_no_process(training, project):
    process, master = training(*TWO_RANKS)
    others = master.children(recursive=True)
    master.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert "killed by SIGKILL" in err
    assert all(has_ended(one) for one in others)
    assert json.loads((project / "run/status.json").read_text())["state"] == "failed"


def test_the_exit_code_of_a_completed_run_is_0(end, project):
    code, _, status = end()
    assert (code, status["state"]) == (0, "done")
    again = subprocess.run(
        [sys.executable, "-m", "rlcli", "resume", "run"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": HOME},
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert "run is complete (3 steps)" in again.stdout


def test_a_run_that_cannot_record_its_completion_does_not_exit_with_0(train):
    process = train(trouble("status"), "checkpoint.every_steps=null")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 6, err
    assert "the run reports that it is done, but its status.json does not" in err


def test_a_component_that_closes_files_does_not_end_the_run(end):
    code, err, status = end(trouble("close files"), "checkpoint.every_steps=null")
    assert (code, status["state"]) == (0, "done"), err


@pytest.mark.long
def test_a_component_writing_junk_to_open_files_does_not_fail_a_completed_run(end):
    code, err, status = end(
        trouble("write everywhere"), "checkpoint.every_steps=null", is_fork=False
    )
    assert (code, status["state"], status["exit_code"]) == (0, "done", 0), err
    assert "the report leaves out samples.jsonl" in err


def test_a_process_forked_by_a_component_does_not_repeat_steps_of_the_run(end, project):
    code, err, status = end(trouble("fork"))
    assert (code, status["state"]) == (0, "done"), err
    steps = [
        json.loads(line)["step"]
        for line in (project / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [0, 1, 2, 3]


def test_exit_code_and_status_agree_when_a_signal_wakes_a_call_at_its_deadline(end):
    code, err, status = end(trouble("a sleep that a signal ends"), "launch.step_deadline=3")
    assert (code, status["state"]) in ((0, "done"), (8, "failed")), err
    assert status["exit_code"] == code


@pytest.mark.long
def test_a_call_that_passes_its_deadline_is_ended_and_named(end, project):
    code, err, status = end(trouble("hang"), "launch.step_deadline=8")
    assert code == 8, err
    assert at('"hang"') + ": no answer within 8 s: waiting for score on rank 0" in err
    assert (status["state"], status["exit_code"]) == ("failed", 8)
    assert "toy_trouble.py" in (project / "run/logs/stacks.log").read_text()


@pytest.mark.long
def test_a_breakpoint_suspends_the_deadline(train, project):
    process = train(trouble("breakpoint"), "launch.step_deadline=8", is_fork=False)
    output = ""
    while "(Pdb)" not in output:
        character = process.stdout.read(1)
        assert character, process.communicate()[1]
        output += character
    assert "pause()" in output
    time.sleep(10)
    assert process.poll() is None
    process.stdin.write("c\n")
    process.stdin.flush()
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err


def test_a_dead_run_is_resumed_up_to_the_limit(end, project):
    code, err, status = end(
        trouble("kill -9"), "launch.max_restarts=1", "checkpoint.every_steps=1", "--quiet"
    )
    assert code == 0, err
    assert "resuming the run, restart 1 of 1" in err
    assert (status["state"], status["step"]) == ("done", 3)
    steps = [
        json.loads(line)["step"]
        for line in (project / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [0, 1, 2, 3]


def test_a_resumed_run_that_dies_at_once_is_resumed_with_the_same_changes(end, project):
    code, err, _ = end(trouble("none"), "launch.max_restarts=1")
    assert code == 0, err
    changes = (
        "train.steps=5",
        f"graph.score.interface.args.dies_once={project / 'died'}",
        "--accept-changes",
    )
    again = subprocess.run(
        [sys.executable, "-m", "rlcli", "resume", "run", *changes],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": HOME},
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert "restart 1 of 1" in again.stderr
    assert json.loads((project / "run/status.json").read_text())["step"] == 5


def test_a_run_is_not_resumed_beyond_the_limit(end):
    code, err, status = end(
        trouble("os._exit(0)"), "launch.max_restarts=1", "checkpoint.every_seconds=null"
    )
    assert code == 7, err
    assert err.count("before its work was done") == 2
    assert (status["state"], status["exit_code"]) == ("failed", 7)


# -- signals ---------------------------------------------------------------------------------------


def test_the_run_does_not_outlive_a_killed_supervisor(training):
    process, child = training()
    process.kill()
    assert has_ended(child)


def test_no_process_started_by_a_component_outlives_a_killed_run(train, project):
    process = train(trouble("orphan"))
    deadline, line = time.monotonic() + 200, ""
    while not line.startswith("orphan"):
        assert time.monotonic() < deadline
        line = process.stdout.readline()
    family = [orphan := psutil.Process(int(line.split()[1]))]
    while len(family) < 2:
        family = [orphan, *orphan.children()]
    (project / "orphan-seen").touch()
    process.communicate(timeout=200)
    assert process.returncode == 7
    assert all(has_ended(one, 0) for one in family)


def test_no_process_started_by_a_component_outlives_a_completed_run(train):
    process = train(trouble("daemon"))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert not psutil.pid_exists(int(out.split("daemon ")[1].split()[0]))


@pytest.mark.long
def test_processes_started_by_the_shell_before_exec_are_left_alone(project):
    script = (
        'sleep 300 > /dev/null 2>&1 & echo $!; exec "$0" -m rlcli train '
        "toy.yaml --run-dir run --quiet"
    )
    done = subprocess.run(
        ["bash", "-c", script, sys.executable],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": HOME},
        check=False,
    )
    neighbour = psutil.Process(int(done.stdout.split()[0]))
    try:
        assert done.returncode == 0, done.stderr
        assert neighbour.status() != psutil.STATUS_ZOMBIE
    finally:
        neighbour.kill()


@pytest.mark.parametrize(
    ("number", "to"),
    [
        (signal.SIGTERM, "the supervisor"),
        (signal.SIGTERM, "every process"),
        (signal.SIGHUP, "every process"),
        (signal.SIGUSR2, "the child"),
    ],
)
def test_a_signal_counts_once_whichever_process_receives_it(training, project, number, to):
    process, child = training(start_new_session=True)
    if to == "the supervisor":
        process.send_signal(number)
    elif to == "every process":
        os.killpg(process.pid, number)
    else:
        child.send_signal(number)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    assert err.count("finishing this step, then saving") == 1
    assert json.loads((project / "run/status.json").read_text())["state"] == "stopped"


# -- the process -----------------------------------------------------------------------------------


def test_the_supervisor_is_small_and_shares_its_process_group_with_the_child(training):
    process, child = training(is_fork=False)
    supervisor = psutil.Process(process.pid)
    assert supervisor.memory_info().rss < 80 << 20
    assert not any("torch" in mapped.path for mapped in supervisor.memory_maps())
    assert os.getpgid(child.pid) == os.getpgid(process.pid)
    assert "RLCLI_SUPERVISOR" in child.environ()  # as it was started; it does not hand that on


def test_no_supervisor_means_a_single_process(train, project):
    process = train(ENDLESS, "--no-supervisor")
    metrics, deadline = project / "run/metrics.jsonl", time.monotonic() + 200
    while not metrics.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert psutil.Process(process.pid).children() == []
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    assert process.returncode == 75


def test_reaping_orphans_accepts_that_no_child_is_left():
    """Passing a signal on may have reaped the child itself."""
    code = "from rlcli.launch.orphans import reap_orphans; reap_orphans(1)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_abort_by_ctrl_c_while_libraries_are_loaded_is_that_ctrl_c():
    abort = -signal.SIGABRT
    assert _stop_signal(abort, [signal.SIGINT], Facts()) == signal.SIGINT
    assert _stop_signal(abort, [], Facts()) is None
    assert _stop_signal(abort, [signal.SIGTERM], Facts()) is None
    assert _stop_signal(abort, [signal.SIGINT], Facts(run="run")) is None, "it handles Ctrl-C then"
