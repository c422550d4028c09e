"""When Python collects garbage: rarely while a process starts, as usual while it works, and not at all as it ends."""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
RARELY = 20_000
"""Objects created between collections while a process starts. Importing torch creates hundreds of thousands that stay:
with the usual 700, a sixth of the time goes into looking at them."""


def collect_rarely() -> None:
    """Most objects created now are there to stay."""
    gc.set_threshold(RARELY, *USUAL[1:])
    gc.enable()


def collect_as_usual() -> None:
    """A process that called `collect_rarely` has started: existing objects stay, and are not looked at again."""
    if gc.get_threshold()[0] == RARELY:
        gc.freeze()
        gc.set_threshold(*USUAL)


def leave_garbage() -> None:
    """The process ends: skip a last collection, which takes longer than many an import."""
    gc.freeze()
