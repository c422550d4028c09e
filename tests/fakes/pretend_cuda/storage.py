"""Storages of the pretend device: engines release and refill their memory while tensors stay the
same objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pretend_cuda.tensor import DeviceTensor


class DeviceStorage:
    """`tensor.untyped_storage()` on the device: the storage of the host's numbers,
    counted as device memory."""

    def __init__(self, tensor: DeviceTensor):
        self.device = tensor.device
        self._host = tensor.host.untyped_storage()
        self._allocation = tensor.allocation

    def data_ptr(self) -> int:
        return self._host.data_ptr()

    def nbytes(self) -> int:
        return self._host.nbytes()

    def size(self) -> int:
        return self._host.nbytes()

    def resize_(self, size: int) -> DeviceStorage:
        self._host.resize_(size)
        self._allocation.move(self._host.data_ptr(), size)
        return self

    def fill_(self, value: int) -> DeviceStorage:
        self._host.fill_(value)  # type: ignore[attr-defined]
        return self

    def copy_(self, source: torch.UntypedStorage) -> DeviceStorage:
        self._host.copy_(source)
        return self

    def cpu(self) -> torch.UntypedStorage:
        """A copy on the host."""
        return self._host.clone()
