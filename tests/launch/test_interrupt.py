"""Ctrl-C in a whole process: once saves and stops, twice stops now, and both are reported,
with --quiet too."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from toy_project import make_project

pytestmark = pytest.mark.timeout(420)

HOME = str(Path(__file__).parents[2])

NewProcess = subprocess.Popen


@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_the_first_ctrl_c_saves_stops_and_is_reported(endless, project, options):
    process = endless(*options)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130
    assert (
        "Ctrl-C (SIGINT): finishing this step, then saving. Send again to stop immediately." in err
    )
    assert "To continue: rlcli resume run\n" in err
    assert ("evaluation at step" in err) != bool(options)
    assert "toy: " in out
    assert json.loads((project / "run/status.json").read_text())["state"] == "stopped"
    assert (project / "run/models/actor/config.json").exists()


def test_a_second_signal_stops_at_once_and_is_reported(endless, project):
    process = endless()
    os.kill(process.pid, signal.SIGSTOP)  # so that both arrive within one step
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    out, err = process.communicate(timeout=200)
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert "Send again to stop immediately" in err
    assert "stopped at once by SIG" in err
    assert "Traceback" not in err
    assert out == ""
    assert json.loads((project / "run/status.json").read_text())["state"] == "failed"


def test_stdout_of_an_interrupted_run_with_json_is_one_document(endless, project, monkeypatch):
    (project / "loud").mkdir()
    monkeypatch.setenv("RLCLI_PROJECT", str(make_project(project / "loud")))
    with (project / "loud/interfaces/toy_reward.py").open("a") as file:
        file.write('print("a component says something")\n')
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", NewProcess)  # a fork may have loaded another project
        process = endless("--json")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert "a component says something" in err
    document = json.loads(out)
    assert (document["ok"], document["exit_code"]) == (False, 130)
    assert document["steps"] >= 3
