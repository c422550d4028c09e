"""A process that must not outlive the one that started it."""

from __future__ import annotations

import signal

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask for SIGKILL once the parent is gone. It may be gone already: look who it is afterwards."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
