"""Computations on the host where the tests emulate a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Without the mode of an emulated device, which sees every operation, if there is one: what
    computes on host tensors alone needs a fifth of the time."""
    if _get_current_dispatch_mode() is None:
        yield
    else:
        with _pop_mode_temporarily():
            yield
