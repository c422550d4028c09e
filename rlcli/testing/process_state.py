"""What a component could change for the whole process: settings, and what still runs."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Set
from concurrent.futures import thread as pool_threads
from dataclasses import dataclass, fields
from multiprocessing import resource_tracker

import psutil

from rlcli.launch.orphans import name_of
from rlcli.processes import isolated

NOT_COMPARED = (
    *("PYTEST_", "PYTORCH_", "TORCH", "TRITON_", "KINETO_", "NVTE_", "DS_", "GLOO_", "CUBLAS_"),
    "KMP_",  # scikit-learn, and all that import it
    *("LD_LIBRARY_PATH", "QT_"),  # OpenCV
    "MPLCONFIGDIR",  # matplotlib
    "TIKTOKEN_CACHE_DIR",  # LiteLLM
)
"""Beginnings of the names of variables that pytest changes all the time, and libraries when they
are imported or first used."""
END_WITHIN = 2.0
"""Seconds for processes and threads to end by themselves after the last check."""

MOST_NAMES = 3
PUT_BACK = "restore it, or change it only where that is needed"
"""What a component that changes the whole process should do instead."""


@dataclass(frozen=True)
class ProcessState:
    """Settings of this process that all of its code shares."""

    working_directory: str
    umask: int
    environment: Mapping[str, str]
    default_dtype: str
    gradients: bool
    """Whether gradients are computed."""

    @classmethod
    def now(cls) -> ProcessState:
        umask = os.umask(0o077)
        os.umask(umask)
        return cls(
            _working_directory(),
            umask,
            {name: os.environ[name] for name in os.environ if not name.startswith(NOT_COMPARED)},
            *_settings_of_torch(),
        )

    def restore(self) -> None:
        """Make it that of the process again."""
        with contextlib.suppress(OSError):  # the directory may be gone
            os.chdir(self.working_directory)
        os.umask(self.umask)
        for name in ProcessState.now().environment.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_default_dtype(getattr(torch, self.default_dtype.removeprefix("torch.")))
            torch.set_grad_enabled(self.gradients)

    def changes_since(self, before: ProcessState) -> str:
        """Such as `default dtype torch.float32 → torch.float64`; empty if there are none."""
        names = [field.name for field in fields(self) if field.name != "environment"]
        changes = [
            f"{name.replace('_', ' ')} {getattr(before, name)} → {getattr(self, name)}"
            for name in names
            if getattr(before, name) != getattr(self, name)
        ]
        variables = {name for name, _ in self.environment.items() ^ before.environment.items()}
        return ", ".join(
            [*changes, *(f"environment variable {name}" for name in sorted(variables))]
        )


@dataclass(frozen=True)
class StartedTasks:
    """Processes and threads that this process has started, except those that end with it anyway."""

    processes: Set[psutil.Process]
    threads: Set[threading.Thread]
    """Threads that Python waits for before it exits, other than idle ones of a pool."""

    @classmethod
    def now(cls) -> StartedTasks:
        tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
        children = psutil.Process().children(recursive=True)
        threads = [thread for thread in threading.enumerate() if _keeps_process(thread)]
        lasting = [child for child in children if child.pid not in {tracker, *isolated}]
        return cls(frozenset(lasting), frozenset(threads))

    def left_since(self, before: StartedTasks) -> str:
        """End the processes that are left, and name them and the threads; empty if there are
        none."""
        deadline = time.monotonic() + END_WITHIN
        _, processes = psutil.wait_procs(self.processes - before.processes, timeout=END_WITHIN)
        names = [f"process {name_of(process)}" for process in processes]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        threads = self.threads - before.threads
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        names += [f"thread {thread.name}" for thread in threads if _keeps_process(thread)]
        if len(names) > MOST_NAMES:
            names[MOST_NAMES:] = [f"{len(names) - MOST_NAMES} more"]
        return ", ".join(names)


def _keeps_process(thread: threading.Thread) -> bool:
    """Whether Python waits for it before it exits. It ends those of a ThreadPoolExecutor that have
    nothing to do."""
    frame = sys._current_frames().get(thread.ident or 0)
    is_idle = frame is not None and frame.f_code is pool_threads._worker.__code__
    return thread.is_alive() and not thread.daemon and not is_idle


def _settings_of_torch() -> tuple[str, bool]:
    """Its default dtype and whether gradients are computed: those of a fresh process before it is
    imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch.float32", True
    return str(torch.get_default_dtype()), torch.is_grad_enabled()


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "(removed)"
