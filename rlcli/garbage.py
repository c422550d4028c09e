"""When Python looks for garbage: hardly while a process starts, as usual while it works, and not at all as it ends."""

from __future__ import annotations

import gc

USUAL = gc.get_threshold()
RARELY = 20_000
"""Objects made after which it looks while a process starts. Importing torch makes hundreds of thousands that stay: with
the usual 700 a sixth of the time goes into looking at them."""


def collect_rarely() -> None:
    """What is made now is mostly there to stay."""
    gc.set_threshold(RARELY, *USUAL[1:])
    gc.enable()


def collect_as_usual() -> None:
    """A process that began by `collect_rarely` has started: what is there now stays, and is not looked at again."""
    if gc.get_threshold()[0] == RARELY:
        gc.freeze()
        gc.set_threshold(*USUAL)


def leave_garbage() -> None:
    """The process ends: Python need not look through everything once more, which takes as long as many an import."""
    gc.freeze()
