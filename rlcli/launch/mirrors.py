"""Mirrors of a run in trackers, each a process of its own that reads the run's files.

Whatever becomes of one, the run only says so, once. When the run is over it waits for them, but
not for long.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rlcli.files import make_folder, open_private
from rlcli.launch.children import run_environment
from rlcli.processes import ended_how, start_time

if TYPE_CHECKING:
    from rlcli.observe.display import Display
    from rlcli.observe.json_lines import Warn

SLOW_AFTER = 60.0
"""Seconds without an answer after which a tracker counts as hanging."""
END_WITHIN = 20.0
"""Seconds for the last lines, once the run is over."""
NOTED_AFTER = 3.0
"""Seconds of waiting at the end of a run after which that is said."""
MARGIN = 2.0
"""Seconds that a mirror may take longer than END_WITHIN, in which the kernel ends it."""
LOOK_SECONDS = 0.05
"""Seconds between two checks for the exit code of a mirror that writes nothing more."""


class Mirrors:
    """The mirrors of a run. Leaving the context ends them."""

    def __init__(self, folder: Path, names: Sequence[str], display: Display):
        """`folder`: the run's; `names`: the trackers."""
        self._folder, self._names, self._display = folder, names, display
        self._running: list[MirrorProcess] = []

    def start(self) -> None:
        """Start them, unless they were started before."""
        if self._running:
            return
        for name in dict.fromkeys(self._names):
            try:
                self._running.append(MirrorProcess(self._folder, name, self._display.warning))
            except OSError as error:
                self._display.warning(f"{name} gets nothing of this run: {error}")

    def stop(self) -> None:
        """Let them write the last lines; end those that take too long."""
        end = time.monotonic() + END_WITHIN + MARGIN
        try:
            for mirror in self._running:
                mirror.finish()
            self._wait(time.monotonic() + NOTED_AFTER)
            if late := [mirror.name for mirror in self._running if mirror.is_running]:
                names = " and ".join(late)
                self._display.note(f"waiting for {names}, {END_WITHIN:g} s at most")
            self._wait(end)
        finally:
            for mirror in self._running:
                mirror.kill()

    def _wait(self, end: float) -> None:
        for mirror in self._running:
            mirror.wait(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class MirrorProcess:
    """A process that mirrors a run to one tracker (`observe/trackers/mirror_process.py`)."""

    def __init__(self, folder: Path, name: str, warn: Warn):
        """Raises OSError."""
        self.name = name
        self._folder, self._warn = folder, warn
        self._is_busy = True
        self._reason: str | None = None
        """Why it has given up."""
        self._has_warned = False
        self._reaping = threading.Lock()
        """Held while its group is ended or it is reaped: afterwards its number may be another's."""
        make_folder(folder / "trackers")
        log = open_private(folder / "trackers" / f"{name}.log", os.O_WRONLY | os.O_APPEND)
        module = "rlcli.observe.trackers.mirror_process"
        with os.fdopen(log, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(folder), name, str(max(END_WITHIN, 0.01))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**run_environment(1), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, name=name, daemon=True)
        self._listener.start()

    @property
    def is_running(self) -> bool:
        return self._listener.is_alive()

    def finish(self) -> None:
        """Ask it to write the last lines and to end."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.write(b"\n")
            self._process.stdin.close()

    def wait(self, end: float) -> None:
        """Wait for its end, until a time."""
        self._listener.join(max(0.0, end - time.monotonic()))

    def kill(self) -> None:
        """End it, and what its library has started."""
        with self._reaping:
            if self._process.returncode is None:
                self._end_group()
        self._listener.join()

    def _end_group(self) -> None:
        # macOS refuses a signal to a group of which only an exit code is left
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _listen(self) -> None:
        """Warn once, if it hangs or fails."""
        assert self._process.stdout is not None
        descriptor, heard = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while True:
            patience = SLOW_AFTER * 1000 if self._is_busy and not self._has_warned else None
            if not poll.poll(patience):
                self._warn_once(f"it has not answered for {SLOW_AFTER:g} s")
                continue
            if not (received := os.read(descriptor, 1 << 12)):
                break
            *lines, heard = (heard + received).split(b"\n")
            for line in lines:
                self._take(line.decode(errors="replace"))
        self._process.stdout.close()
        if code := self._exit_code():
            late = f"it has not finished within {END_WITHIN:g} s"
            ended = late if code == -signal.SIGALRM else ended_how(code)
            self._warn_once(self._reason or ended)

    def _exit_code(self) -> int:
        """Wait for its end, and end what its library has left behind."""
        while start_time(self._process.pid) is not None:
            time.sleep(LOOK_SECONDS)
        with self._reaping:
            self._end_group()
            return self._process.wait()

    def _take(self, line: str) -> None:
        self._is_busy = line == "busy"
        word, _, reason = line.partition(": ")
        if word == "failed":
            self._reason = reason

    def _warn_once(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            again = f"rlcli track {shlex.quote(str(self._folder))} --to {self.name}"
            self._warn(
                f"{self.name} does not have all of this run: {reason}\n"
                f"the run is not affected; its files have everything: {again}"
            )
