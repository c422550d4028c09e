"""What a helper process for hostile input may do, whichever component starts it."""

import os
import signal
import sys

import pytest

from rlcli.processes import STOP_SIGNALS, start_isolated

TELL = """
import os, resource, signal, sys
from rlcli.processes import STOP_SIGNALS, isolate
isolate(parent=int(sys.argv[1]), memory_bytes=1 << 30)
assert "HF_TOKEN" not in os.environ
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (0, 0)
print("ready", flush=True)
print(sys.stdin.readline().strip(), flush=True)
"""


@pytest.fixture
def child(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    process = start_isolated([sys.executable, "-P", "-c", TELL, str(os.getpid())])
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_lets_the_child_finish_its_task(child, number):
    child.send_signal(number)
    child.stdin.write(b"the reply\n")
    child.stdin.flush()
    assert child.stdout.readline() == b"the reply\n"
    assert child.wait(30) == 0


def test_the_processor_time_limit_ends_the_child(child):
    child.send_signal(signal.SIGPROF)
    assert child.wait(30) == -signal.SIGPROF
