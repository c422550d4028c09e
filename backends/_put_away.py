"""Tensors whose memory is given back for a while, their numbers kept on the host.

Memory is taken from under the tensors, so that whatever views share it share it again when it returns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class PutAway:
    """Storages without memory, until `bring_back`."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    def put_away(self, kept: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()) -> None:
        """`kept` return as they are, `scratch` returns as zeros. Those that are away already are left alone."""
        for tensors, keep in ((kept, True), (scratch, False)):
            for storage in {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors
            }.values():
                if size := storage.nbytes():
                    self._away.append((storage, size, _on_host(storage) if keep else None))
                    storage.resize_(0)

    def bring_back(self) -> None:
        """Do nothing if nothing is away."""
        while self._away:
            storage, size, copy = self._away.pop()
            storage.resize_(size)
            if copy is None:
                storage.fill_(0)
            else:
                storage.copy_(copy)


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage.clone() if storage.device.type == "cpu" else storage.cpu()
