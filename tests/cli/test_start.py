"""The start and the end of a command: Ctrl-C ends it quietly,
and garbage is collected where it matters."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def python(*words, path=(), cwd):
    search = ":".join(map(str, [*path, REPOSITORY]))
    return subprocess.run(
        [sys.executable, *words],
        env={"PYTHONPATH": search},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("library", ["typer", "pydantic", "yaml"])
def test_ctrl_c_while_libraries_are_loaded_ends_quietly(tmp_path, library):
    (tmp_path / f"{library}.py").write_text("raise KeyboardInterrupt\n")
    done = python("-m", "rlcli", "validate", "ppo_math", path=[tmp_path], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_ctrl_c_while_a_class_is_created_ends_quietly(tmp_path):
    maker = (
        "class A:\n    def __set_name__(self, owner, name):\n        raise KeyboardInterrupt\n"
        "class B:\n    a = A()\n"
    )
    (tmp_path / "yaml.py").write_text(maker)
    done = python("-m", "rlcli", "validate", "ppo_math", path=[tmp_path], cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize(("policy", "expected"), [("", "PASSIVE 10000"), ("ACTIVE", "ACTIVE None")])
def test_waiting_threads_sleep_unless_configured_otherwise(tmp_path, policy, expected):
    code = f"""
import atexit, os, sys
from rlcli.__main__ import main
os.environ.update({{"OMP_WAIT_POLICY": given}} if (given := {policy!r}) else {{}})
atexit.register(lambda: print(os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")))
sys.argv[1:] = ["--version"]
main()
"""
    assert python("-c", code, cwd=tmp_path).stdout.splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("arguments", "collects"),
    [
        (["ls", "--help"], "False"),
        (["__complete", "zsh", "train", ""], "False"),
        (["train", "--help"], "True 20000"),
    ],
)
def test_only_long_running_verbs_collect_garbage(tmp_path, arguments, collects):
    script = f"""
import gc, sys
from rlcli.__main__ import main
sys.argv = ["rlcli", *{arguments!r}]
try:
    main()
except SystemExit:
    print(gc.isenabled(), *gc.get_threshold()[: gc.isenabled()], file=sys.stderr)
"""
    assert python("-c", script, cwd=tmp_path).stderr.strip() == collects


@pytest.mark.parametrize(
    ("statement", "frozen"), [("collect_rarely()", "True True"), ("pass", "True False")]
)
def test_a_process_that_has_started_collects_garbage_as_usual(tmp_path, statement, frozen):
    script = f"""
import gc
from rlcli.garbage import collect_as_usual, collect_rarely
usual = gc.get_threshold()
{statement}
collect_as_usual()
print(gc.get_threshold() == usual, gc.get_freeze_count() > 1000)
"""
    assert python("-c", script, cwd=tmp_path).stdout.strip() == frozen


def test_windows_is_refused_with_the_supported_systems(tmp_path):
    code = "import sys; sys.platform = 'win32'; from rlcli.__main__ import main; main()"
    done = python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr == "error: rlcli runs on Linux, macOS or WSL, and not on Windows itself\n"


def test_windows_is_refused_where_the_contracts_are_imported(tmp_path):
    code = "import sys; sys.platform = 'win32'; from rlcli.api import data"
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 1
    expected = "ImportError: rlcli runs on Linux, macOS or WSL, and not on Windows itself"
    assert done.stderr.splitlines()[-1] == expected
