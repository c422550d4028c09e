"""What counts as a change of the whole process, and as left running."""

import threading
from concurrent.futures import ThreadPoolExecutor

from rlcli.testing import process_state
from rlcli.testing.process_state import ProcessState, StartedTasks


def test_what_libraries_set_when_they_are_imported_is_no_change(monkeypatch):
    before = ProcessState.now()
    for name in ("KMP_INIT_AT_FORK", "LD_LIBRARY_PATH", "TIKTOKEN_CACHE_DIR"):
        monkeypatch.setenv(name, "changed")
    assert ProcessState.now().changes_since(before) == ""
    monkeypatch.setenv("OF_MINE", "1")
    assert "OF_MINE" in ProcessState.now().changes_since(before)


def test_only_busy_threads_of_a_pool_are_left_running(monkeypatch):
    monkeypatch.setattr(process_state, "END_WITHIN", 0.1)
    before, begun, done = StartedTasks.now(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
        list(pool.map(str, range(4)))
        idle = StartedTasks.now().left_since(before)
        pool.submit(lambda: (begun.set(), done.wait()))
        begun.wait()
        busy = StartedTasks.now().left_since(before)
        done.set()
    assert (idle, busy.rpartition("_")[0]) == ("", "thread pool")
