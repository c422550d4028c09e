"""A save that is killed at any of its system calls, or whose disk fails at any of them.

With strace, the save is killed at each call that changes or opens something; without it, at each
failpoint. In every case the folder has a valid checkpoint, and the next save removes all leftovers.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlcli.checkpoint.disk import files_under
from rlcli.checkpoint.verify import newest_verified, verify

SCRIPT = Path(__file__).with_name("one_save.py")
one_save = runpy.run_path(str(SCRIPT))
save, START = one_save["save"], one_save["START"]
ENVIRONMENT = {
    "PYTHONPATH": str(SCRIPT.parents[2]),
    "PATH": os.environ["PATH"],
    "PYTHONDONTWRITEBYTECODE": "1",
}
CALLS = (
    "openat,fsync,fdatasync,write,pwrite64,ftruncate,?rename,renameat,renameat2,"
    "?mkdir,mkdirat,?unlink,unlinkat,?rmdir"
)
NO_EXCHANGE = ("-e", "inject=renameat2:error=EINVAL")
"""A file system that cannot swap two folders, like most network file systems."""


def can_trace() -> bool:
    try:
        probe = ["strace", "-o", os.devnull, "-e", "inject=fsync:error=EIO:when=1", "true"]
        return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


needs_strace = pytest.mark.skipif(
    "not can_trace()", reason="strace is missing, or may not trace here"
)


def prepare(folder: Path, steps: tuple[int, ...]) -> Path:
    for step in steps:
        save(folder, step, "before")
    folder.mkdir(exist_ok=True)
    return folder


SCENES: dict[str, tuple[tuple[int, ...], int, tuple[str, ...]]] = {
    "first": ((), 1, ()),
    "next, and the older ones are removed": ((1, 2), 3, ()),
    "the same step again": ((1, 2), 2, ()),
    "the same step again, where nothing can be exchanged": ((1, 2), 2, NO_EXCHANGE),
    "an older step again": ((1, 2, 3), 2, ()),
}
"""Name → (steps that exist, the step that is saved, further options of strace)."""
scenes = pytest.mark.parametrize(("existing", "step", "options"), SCENES.values(), ids=SCENES)


def run_save(
    folder: Path,
    step: int,
    before: list[str] | None = None,
    environment: dict[str, str] | None = None,
):
    """A save in a separate process, which keeps only the last checkpoint."""
    command = [
        *(before or []),
        sys.executable,
        "-S",
        "-s",
        str(SCRIPT),
        str(folder),
        str(step),
        "now",
        "1",
    ]
    settings = {"env": ENVIRONMENT | (environment or {}), "cwd": folder.parent, "timeout": 60}
    return subprocess.run(command, capture_output=True, text=True, **settings)


@pytest.fixture(scope="module", autouse=True)
def bytecode(tmp_path_factory):
    """Importing a module without bytecode opens one more file,
    so bytecode is written before calls are counted."""
    (folder := tmp_path_factory.mktemp("bytecode") / "c").mkdir()
    assert run_save(folder, 1, environment={"PYTHONDONTWRITEBYTECODE": ""}).returncode == 0


def trace(folder: Path, step: int, *options: str) -> tuple[int, list[str]]:
    """Run a save under strace: (exit code, its calls with the paths of descriptors)."""
    log = folder.parent / "trace.log"
    done = run_save(
        folder,
        step,
        ["strace", "-y", "-s", "4096", "-o", str(log), "-e", f"trace={CALLS}", *options],
    )
    return done.returncode, log.read_text().splitlines()


def name_of(call: str) -> str:
    return call.partition("(")[0]


def calls_of_a_save(
    folder: Path, step: int, options: tuple[str, ...] = ()
) -> list[tuple[str, int, str]]:
    """(name, its number among the calls of that name, the full line) of each call of the save."""
    code, calls = trace(folder, step, *options)
    assert code == 0, calls
    counted: Counter[str] = Counter()
    save_calls, began = [], False
    for call in calls:
        counted[name_of(call)] += 1
        if began and "(" in call:
            save_calls.append((name_of(call), counted[name_of(call)], call))
        began = began or START in call
    return save_calls


def only_reads(name: str, call: str) -> bool:
    """Being killed before such a call or before the next one is the same."""
    return name == "openat" and "O_RDONLY" in call


def assert_loadable(folder: Path, existing: tuple[int, ...], step: int) -> str:
    """A valid checkpoint of an expected step exists; returns its content."""
    checkpoint, rejected = newest_verified(folder)
    assert rejected == []
    if checkpoint is None:
        assert not existing
        return ""
    assert checkpoint.manifest.step in ({max(existing), step} if existing else {step})
    state = json.loads((checkpoint.path / "state.json").read_text())
    assert state["step"] == checkpoint.manifest.step
    return state["content"]


def assert_next_save_is_clean(folder: Path, step: int) -> None:
    committed = save(folder, step, "next", keep_last=1)
    assert verify(committed).manifest.step == step
    assert {path.name for path in folder.iterdir()} == {committed.name, "LATEST.json"}


def try_each(
    original: Path, trial: Callable[..., Any], cases: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """`trial(folder, *case)` for each case, each with a separate copy, on all cores."""

    def run_case(number: int) -> Any:
        home = original.parent / f"trial{number}"
        home.mkdir()
        return trial(Path(shutil.copytree(original, home / "c")), *cases[number])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(run_case, range(len(cases))))


@pytest.mark.exhaustive
@needs_strace
@scenes
def test_a_save_killed_at_any_call_leaves_a_valid_checkpoint(tmp_path, existing, step, options):
    original = prepare(tmp_path / "c", existing)
    calls = calls_of_a_save(Path(shutil.copytree(original, tmp_path / "whole")), step, options)
    cases = [
        (name, nth)
        for name, nth, call in calls
        if not only_reads(name, call) and "(INJECTED)" not in call
    ]
    assert len(cases) > 20

    def trial(folder: Path, name: str, nth: int) -> str:
        code, traced = trace(folder, step, *options, "-e", f"inject={name}:signal=KILL:when={nth}")
        assert traced[-1] == "+++ killed by SIGKILL +++", (name, nth, code)
        content = assert_loadable(folder, existing, step)
        assert_next_save_is_clean(folder, max((step, *existing)) + 1)
        return content

    assert set(try_each(original, trial, cases)) == {"before" if existing else "", "now"}


FAULTS = {
    "EIO": ("F29", ("fsync",)),
    "ENOSPC": ("F28", ("write", "openat", "mkdir", "rename")),
    "EDQUOT": ("F76", ("write",)),
}
"""errno → (id of the fault, calls that may fail with it)."""


@pytest.mark.exhaustive
@needs_strace
@pytest.mark.parametrize("fault", FAULTS)
def test_a_disk_error_at_any_call_is_reported_and_keeps_checkpoints(tmp_path, fault):
    """Older checkpoints stay, the incomplete one is removed,
    and the fault is reported without a crash."""
    existing, step = (1, 2), 3
    code, names = FAULTS[fault]
    original = prepare(tmp_path / "c", existing)
    calls = calls_of_a_save(Path(shutil.copytree(original, tmp_path / "whole")), step)
    cases = [
        (name, nth) for name, nth, call in calls if name in names and not only_reads(name, call)
    ]
    before = contents_of(original / "step-000000000002")

    def trial(folder: Path, name: str, nth: int) -> bool:
        done = run_save(
            folder,
            step,
            ["strace", "-o", os.devnull, "-e", f"inject={name}:error={fault}:when={nth}"],
        )
        failed = done.returncode == 6
        assert failed or done.returncode == 0, done.stderr
        assert (f"error[{code}]" in done.stdout) == failed, done.stdout
        assert ("quota" in done.stdout) == (failed and fault == "EDQUOT")
        assert not list(folder.glob(".tmp-*"))
        if failed and not (folder / f"step-{step:012d}").exists():
            assert contents_of(folder / "step-000000000002") == before
        assert_loadable(folder, existing, step)
        assert_next_save_is_clean(folder, step + 1)
        return failed

    assert sum(try_each(original, trial, cases)) >= 5


def contents_of(checkpoint: Path) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files_under(checkpoint).items()}


@pytest.mark.exhaustive
@needs_strace
def test_a_stale_file_handle_is_retried(tmp_path):
    existing, step = (1, 2), 3
    original = prepare(tmp_path / "c", existing)
    calls = calls_of_a_save(Path(shutil.copytree(original, tmp_path / "whole")), step)
    cases = [(nth,) for name, nth, call in calls if only_reads(name, call)]

    def trial(folder: Path, nth: int) -> bool:
        log = folder.parent / "trace.log"
        done = run_save(
            folder, step, ["strace", "-o", str(log), "-e", f"inject=openat:error=ESTALE:when={nth}"]
        )
        (failed,) = [call for call in log.read_text().splitlines() if "(INJECTED)" in call]
        is_file = "O_NOFOLLOW" in failed
        assert done.returncode == 0 if is_file else done.returncode in (0, 6), (
            done.stdout + done.stderr
        )
        assert done.returncode == 0 or "error[F27]" in done.stdout
        assert_loadable(folder, existing, step)
        return is_file

    assert sum(try_each(original, trial, cases)) >= 6


@needs_strace
@scenes
def test_calls_are_ordered_to_survive_a_power_failure(tmp_path, existing, step, options):
    """By the order of calls: files and folders are synced before a checkpoint gets its name; that
    name is synced before LATEST refers to it and before an older checkpoint is deleted."""
    folder = prepare(tmp_path / "c", existing)
    code, calls = trace(folder, step, *options)
    assert code == 0
    synced: set[str] = set()
    appeared = parent_synced = False
    temporary = f".tmp-{step}-"
    for call in calls:
        path = match[1] if (match := re.match(r"fsync\(\d+<([^>]*)>\)\s+= 0", call)) else None
        if path:
            synced.add(path)
            parent_synced = parent_synced or (appeared and path == str(folder))
        if name_of(call).startswith("rename") and temporary in call and call.endswith("= 0"):
            written = {path for path in _opened_for_writing(calls) if temporary in path}
            assert len(written) == 6
            folders = {
                str(parent)
                for file in written
                for parent in Path(file).relative_to(folder).parents[:-1]
            }
            folders = {str(folder / parent) for parent in folders}
            assert written | folders <= synced
            appeared = True
        tells = name_of(call) == "openat" and ".LATEST" in call and "O_WRONLY" in call
        deletes = name_of(call) in ("unlink", "unlinkat", "rmdir") and ".LATEST" not in call
        if tells or deletes or (name_of(call) == "rename" and ".del-" in call):
            assert parent_synced, call
    assert parent_synced


def _opened_for_writing(calls: list[str]) -> Iterator[str]:
    for call in calls:
        if match := re.match(r'openat\([^"]*"([^"]*)", [A-Z_|]*O_WRONLY.*= \d+<(.*)>$', call):
            yield match[2]


# -- without strace: the same with failpoints ------------------------------------------------------


def with_faults(folder: Path, step: int, faults: str):
    """(the save in a separate process, the events that it recorded)."""
    log = folder.parent / "events.jsonl"
    settings = {
        "RLCLI_FAILPOINTS": faults,
        "RLCLI_ENABLE_FAILPOINTS": "1",
        "RLCLI_FAILPOINT_EVENTS": str(log),
    }
    done = run_save(folder, step, environment=settings)
    return done, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.long
@pytest.mark.parametrize(("existing", "step"), [((), 1), ((1, 2), 3), ((1, 2), 2)])
def test_a_save_killed_at_any_failpoint_leaves_a_valid_checkpoint(tmp_path, existing, step):
    original = prepare(tmp_path / "c", existing)
    done, failpoints = with_faults(
        Path(shutil.copytree(original, tmp_path / "whole")), step, "*:note"
    )
    assert done.returncode == 0
    assert len(failpoints) >= 10

    def trial(folder: Path, number: int) -> str:
        done, events = with_faults(folder, step, f"*:kill@{number}")
        assert done.returncode == -9
        assert [event["failpoint"] for event in events] == [failpoints[number - 1]["failpoint"]]
        content = assert_loadable(folder, existing, step)
        assert_next_save_is_clean(folder, max((step, *existing)) + 1)
        return content

    cases = [(number,) for number in range(1, len(failpoints) + 1)]
    assert set(try_each(original, trial, cases)) == {"before" if existing else "", "now"}


def test_a_checkpoint_is_found_if_the_save_is_killed_before_latest(tmp_path):
    """A checkpoint with its final name is found, whatever LATEST says."""
    folder = prepare(tmp_path / "c", (1,))
    done, events = with_faults(folder, 2, "checkpoint.appeared:kill")
    assert (done.returncode, len(events)) == (-9, 1)
    assert json.loads((folder / "LATEST.json").read_text())["step"] == 1
    assert newest_verified(folder)[0].manifest.step == 2


def test_a_save_killed_while_deleting_leaves_a_valid_checkpoint(tmp_path):
    folder = prepare(tmp_path / "c", (1,))
    done, events = with_faults(folder, 2, "checkpoint.doomed:kill")
    assert (done.returncode, len(events)) == (-9, 1)
    half_deleted = next(folder.glob(".del-*"))
    (half_deleted / "state.json").unlink()
    assert newest_verified(folder)[0].manifest.step == 2
    assert_next_save_is_clean(folder, 3)


@pytest.mark.parametrize(("fault", "code"), [("ENOSPC", "F28"), ("EDQUOT", "F76"), ("EIO", "F29")])
def test_a_disk_error_while_sealing_keeps_the_older_checkpoint(tmp_path, fault, code):
    folder = prepare(tmp_path / "c", (1,))
    done, events = with_faults(folder, 2, f"checkpoint.sealed:{fault}@3")
    assert (done.returncode, len(events)) == (6, 1)
    assert f"error[{code}]" in done.stdout
    assert {path.name for path in folder.iterdir()} == {"step-000000000001", "LATEST.json"}
    verify(folder / "step-000000000001")
