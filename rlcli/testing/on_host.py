"""Computations on the host while there is a pretend device (`rlcli.testing.pretend_cuda`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)


class DeviceMode(TorchDispatchMode):
    """The mode in which a pretend device sees every operation, also those on host tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled below a mode; to say so for every operation takes a tenth of it."""
        return False


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Without the mode of the pretend device, if there is one: what computes on host tensors alone
    needs a fifth of the time."""
    if isinstance(_get_current_dispatch_mode(), DeviceMode):
        with _pop_mode_temporarily():
            yield
    else:
        yield
