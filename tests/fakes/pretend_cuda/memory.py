"""Accounting of device memory: each storage counts once,
as long as a tensor of the device uses it."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch


class Memory:
    """The bytes that one device has allocated."""

    def __init__(self, total: int):
        self.total = total
        self.allocated = 0
        self.peak = 0
        self.allocations = 0
        """Number of allocations so far."""
        self._in_use: WeakValueDictionary[int, DeviceAllocation] = WeakValueDictionary()

    def allocation_of(self, host: torch.Tensor) -> DeviceAllocation:
        """The allocation behind a tensor's storage. Raises torch.OutOfMemoryError if there is not
        enough memory."""
        storage = host.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        existing = self._in_use.get(address) if size else None
        if existing is not None and existing.size == size:
            return existing
        allocation = DeviceAllocation(self)
        allocation.move(address, size)
        return allocation

    def take(self, size: int) -> None:
        """Count bytes as used; there must be enough."""
        if self.allocated + size > self.total:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes. The device has {self.total} "
                f"bytes, of which {self.total - self.allocated} are free."
            )
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def know(self, address: int, allocation: DeviceAllocation) -> None:
        """Associate the storage at `address` with this allocation."""
        self._in_use[address] = allocation

    def forget(self, address: int) -> None:
        self._in_use.pop(address, None)

    def reset_peak(self) -> None:
        self.peak = self.allocated


class DeviceAllocation:
    """Bytes in use until the last tensor holding this is gone."""

    def __init__(self, memory: Memory):
        self.size = 0
        self._place = 0
        self._memory = memory
        memory.allocations += 1

    def move(self, address: int, size: int) -> None:
        """Record a new size and address of the storage."""
        if self.size:
            self._memory.forget(self._place)
        self._memory.allocated -= self.size
        self.size = 0
        self._memory.take(size)
        self.size, self._place = size, address
        if size:
            self._memory.know(address, self)

    def __del__(self) -> None:
        self._memory.allocated -= self.size
