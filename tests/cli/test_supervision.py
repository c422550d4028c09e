"""Commands that run in a child process, supervised by the process that was started."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from warm_processes import warm_processes

from rlcli.cli.supervision import WHOLE_PROCESS, is_to_supervise

HOME = str(Path(__file__).parents[2])
STARTED = (
    "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from "
    "rlcli.__main__ import main; main()"
)
"""As started by a user, because a background job may ignore SIGINT."""
ENTIRE = SimpleNamespace(obj={WHOLE_PROCESS: True})


def start(*arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-c", STARTED, *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": HOME},
    )


@pytest.mark.parametrize(
    ("context", "no_supervisor", "expected"),
    [
        (ENTIRE, False, True),
        (ENTIRE, True, False),
        (SimpleNamespace(obj={WHOLE_PROCESS: False}), False, False),
        (SimpleNamespace(obj=None), False, False),
    ],
)
def test_a_separate_process_is_supervised_unless_disabled(context, no_supervisor, expected):
    assert is_to_supervise(context, no_supervisor) is expected


def test_a_process_in_a_debugger_is_not_supervised():
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        assert not is_to_supervise(ENTIRE, False)
    finally:
        sys.settrace(before)


@pytest.fixture
def project_with(tmp_path):
    """Writes the interface `leaves`, which runs a statement when it is loaded;
    returns the project."""

    def write(statement):
        (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
        (tmp_path / "interfaces").mkdir()
        (tmp_path / "interfaces/leaves.py").write_text(
            f"import os, signal, time\n{statement}\nfrom rlcli.api.model import ModelInterface, "
            "register_interface\n\n"
            '@register_interface("leaves")\nclass Leaves(ModelInterface): pass\n'
        )
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("os._exit(0)", "the command ended with exit code 0 during: loading interface leaves"),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            "the command was killed by SIGKILL during: loading interface leaves",
        ),
    ],
)
def test_a_component_that_exits_does_not_pass(project_with, statement, says):
    process = start("test", "interface", "leaves", cwd=project_with(statement))
    _, err = process.communicate(timeout=200)
    assert process.returncode == 7, err
    assert f"error[F01]: {says}" in err


def test_an_interrupt_of_the_supervisor_reaches_the_command(project_with):
    project = project_with("print('here', flush=True)\nwhile True: time.sleep(0.05)")
    process = start("test", "interface", "leaves", cwd=project)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 130, err


@pytest.mark.long
def test_a_run_writes_private_files_under_any_umask(tmp_path):
    arguments = ("train", "sft_math", "train.steps=1", "--run-dir", "run", "--no-check")
    before = os.umask(0)
    try:
        with warm_processes():
            running = subprocess.Popen(
                [sys.executable, "-m", "rlcli", *arguments],
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            output = running.communicate(timeout=120)
    finally:
        os.umask(before)
    assert running.returncode == 0, output
    written = [path for path in (tmp_path / "run").rglob("*") if "torchrun" not in str(path)]
    assert len(written) > 20
    assert [path for path in written if path.lstat().st_mode & 0o077] == []


def test_a_private_process_writes_no_core_dump():
    script = (
        "from rlcli.processes import keep_private; keep_private(); import resource; "
        "print(resource.getrlimit(4))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=HOME, timeout=60
    )
    assert done.stdout.strip() == "(0, 0)"
