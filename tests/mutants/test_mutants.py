"""The planted bugs can be planted, and `rlcli test` finds them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KINDS = ("interface", "backend", "dataset", "environment", "family", "recipe")


def _kill_rate():
    spec = importlib.util.spec_from_file_location("kill_rate", HERE / "kill_rate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kill_rate = _kill_rate()
OWN = kill_rate.mutants()
LATER = ("unseen", "second", "third", "fourth", "fifth")
"""Sets that others wrote without sight of the checks."""
SETS = [OWN, *(kill_rate.mutants(folder=HERE / name) for name in LATER)]
MUTANTS = [mutant for listed in SETS for mutant in listed]


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.kind}-{mutant.bug.replace(' ', '-')}"[:70]
)
def test_a_mutant_can_be_planted(mutant):
    origin = HERE / "unusual" / mutant.component if mutant.component else ROOT / mutant.file
    text = kill_rate.with_bug(mutant, origin.read_text(encoding="utf-8"))
    assert mutant.test.split()[0] in KINDS
    if mutant.file.endswith(".py"):
        compile(text, mutant.file, "exec")


@pytest.mark.parametrize("mutants", SETS, ids=["own", *LATER])
def test_no_bug_is_planted_twice(mutants):
    """In a set: those that are written independently may have a bug in common."""
    bugs = Counter((one.test, one.file, one.old, one.new) for one in mutants)
    assert not [bug for bug, times in bugs.items() if times > 1]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_one_mutant_of_each_kind_is_killed():
    """All of them: `python tests/mutants/kill_rate.py`."""
    command = [
        sys.executable,
        str(HERE / "kill_rate.py"),
        "--each",
        "1",
        "--first",
        "--no-baseline",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    outcomes = json.loads(done.stdout)
    assert {one["kind"] for one in outcomes} == {one.kind for one in OWN}
    assert [one for one in outcomes if one["verdict"] != "killed"] == []
    assert done.returncode == 0


@pytest.mark.long
def test_harmless_mutants_survive_and_unusable_mutants_are_invalid(tmp_path):
    """The verdict on a mutant that no check finds,
    and on mutants that cannot be planted or imported."""
    code = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("kill_rate", {str(HERE / "kill_rate.py")!r})
kill_rate = sys.modules["kill_rate"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kill_rate)
kill_rate.LOADED_ONCE = ("pytest",)
def mutant(test, file, old, new):
    return kill_rate.Mutant(test.split()[0], "x", test, file, old, new)
steps, lr = "  steps: 1200", "lr: 3e-3"
REFERENCE = "interfaces/reference.py"
chosen = [
    mutant("recipe sft_math -k validates", "recipes/sft_math.yaml", steps, "  steps: 1201"),
    mutant("recipe sft_math -k validates", "recipes/sft_math.yaml", steps, "  stepps: 1200"),
    mutant("interface reference -k none", REFERENCE, "import annotations", "import nonesuch"),
    mutant("recipe sft_math -k validates", "recipes/sft_math.yaml", "not there", ""),
]
verdicts = {{one.mutant.new: one.verdict for one in kill_rate.hunt(chosen)}}
print(json.dumps(verdicts))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)
    assert verdicts == {
        "  steps: 1201": "survived",
        "  stepps: 1200": "killed",
        "import nonesuch": "invalid",
        "": "invalid",
    }


FORK_BOMB = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("kill_rate", sys.argv[1])
kill_rate = sys.modules["kill_rate"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kill_rate)
kill_rate.MOST_PROCESSES = 20
tree = kill_rate._process_tree()
tree.adopt_orphans()
suite = os.fork()
if suite == 0:
    if os.fork() == 0:  # an orphan, in a session of its own
        os.setsid()
        for _ in range(60):
            if os.fork() == 0:
                time.sleep(100)
        time.sleep(100)
    started = time.monotonic()
    while os.waitpid(-1, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    os.fork() or time.sleep(100)  # outlives the suite
    os._exit(3 if time.monotonic() - started < 50 else 4)
print(kill_rate.watch(suite), len(tree.descendants_of(os.getpid())))
"""


def test_a_suite_that_starts_too_many_processes_loses_them_and_leaves_none():
    command = [sys.executable, "-c", FORK_BOMB, str(HERE / "kill_rate.py")]
    bomb = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert bomb.stdout.split() == ["3", "0"], bomb.stderr


def test_a_control_group_limits_the_tasks_of_a_suite(monkeypatch):
    monkeypatch.setattr(kill_rate, "MOST_TASKS", 3)
    group = kill_rate.limited_group("rlcli-test")
    if group is None:
        pytest.skip("control groups cannot be made here")
    code = (
        "import os, sys\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nfor _ "
        "in range(5): os.fork()"
    )
    command = [sys.executable, "-c", code, str(group / "cgroup.procs")]
    try:
        forks = subprocess.run(command, capture_output=True, text=True)
    finally:
        kill_rate.remove_group(group)
    assert "BlockingIOError" in forks.stderr
    assert not group.exists()


def test_a_mutant_that_has_its_suite_killed_is_found(tmp_path):
    mutant = next(iter(MUTANTS))
    for name in ("out.json", "out.json.err"):
        (tmp_path / name).write_text("")
    running = kill_rate._Running(mutant, 0, tmp_path / "out.json", 0.0, tmp_path, None)
    outcome = kill_rate._judged(running, kill_rate.BY_SIGNAL + 9)
    assert (outcome.verdict, outcome.by) == ("killed", "the suite was killed by SIGKILL")
    assert kill_rate._judged(running, 1).verdict == "invalid"
