"""The `rlcli` command as a process of its own; `python -m rlcli` is the same."""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it quietly from the start, and a short command is not held up by garbage."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded; see tests/bench/neighbour.py
    gc.disable()  # verbs that last enable it again; the others are over before there is any that matters
    try:
        from rlcli.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if not gc.isenabled():
            gc.freeze()  # or Python looks through everything once more while it exits


if __name__ == "__main__":
    main()
