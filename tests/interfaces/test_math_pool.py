"""Processes of `math_reward` that the machine kills cost no verdict and end no run."""

import sys

import pytest

from rlcli.interfaces._answers.verdict import Comparison, Verdict
from rlcli.interfaces.rewards._math_pool import MathPool

ONE = [Comparison("x", "")]
WORKER = """\
import json, os, sys

def die_once(name):
    if not os.path.exists(name):
        open(name, "w").close()
        os.kill(os.getpid(), 9)

sys.stdin.readline()
if "starting" in sys.argv:
    die_once("starting")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    if "working" in sys.argv:
        die_once("working")
    print(json.dumps({"equal": True}), flush=True)
"""


@pytest.fixture
def pool_of(tmp_path):
    pools = []

    def make(when):
        script = f"import os\nos.chdir({str(tmp_path)!r})\n{WORKER}"
        pools.append(MathPool(1, 5.0, [sys.executable, "-c", script, when]))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("when", ["starting", "working"])
def test_a_killed_worker_is_replaced_and_its_comparison_repeated(pool_of, tmp_path, when):
    pool = pool_of(when)
    assert pool.compare(ONE * 3) == [Verdict.RIGHT] * 3
    assert (tmp_path / when).exists(), "it was killed"


def test_a_worker_killed_while_idle_is_replaced(pool_of):
    pool = pool_of("never")
    pool.compare(ONE)
    for _ in range(20):
        pool._workers[0].process.kill()  # and not waited for: the pool may still take it for alive
        assert pool.compare(ONE) == [Verdict.RIGHT]
