"""The `rlcli` command as a process of its own; `python -m rlcli` is the same."""

from __future__ import annotations

import gc
import os
import sys

from rlcli import NOT_ON_WINDOWS
from rlcli.garbage import leave_garbage


def main() -> None:
    """Run the command line. Ctrl-C ends it quietly from the start; short commands run without
    garbage collection."""
    if sys.platform == "win32":
        print(f"error: {NOT_ON_WINDOWS}", file=sys.stderr)
        sys.exit(6)
    _let_waiting_threads_sleep()
    gc.disable()  # long-running commands re-enable it; the others end before garbage matters
    try:
        from rlcli.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        leave_garbage()


def _let_waiting_threads_sleep() -> None:
    """Set OpenMP variables before torch loads. Threads that spin for long slow down whatever shares
    their cores many times over; those that sleep at once wake up late after each of the thousands
    of short parallel loops of a step. So they spin for microseconds first (see
    tests/bench/neighbour.py)."""
    if os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


if __name__ == "__main__":
    main()
