"""Tensors whose memory is temporarily released, with their values kept on the host.

Memory is released below the tensors, so that views that share it share it again when it is
restored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from rlcli.api.block_parts import BlockPart
from rlcli.api.model import EngineState

Held = torch.Tensor | BlockPart
"""A tensor in a state: all of it, or a part."""


class PutAway:
    """Storages without memory, until `bring_back`."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    def put_away(
        self, restored: Iterable[torch.Tensor], scratch: Iterable[torch.Tensor] = ()
    ) -> None:
        """`restored` tensors are restored as they are, `scratch` as zeros.
        Those already put away are left alone."""
        for tensors, keep in ((restored, True), (scratch, False)):
            for storage in {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors
            }.values():
                if size := storage.nbytes():
                    self._away.append((storage, size, _on_host(storage) if keep else None))
                    storage.resize_(0)

    def bring_back(self) -> None:
        """Restore all of them; does nothing if none is put away."""
        while self._away:
            storage, size, copy = self._away.pop()
            storage.resize_(size)
            if copy is None:
                storage.fill_(0)  # type: ignore[attr-defined]  # torch's stubs lack it
            else:
                storage.copy_(copy)


def _on_host(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return storage.clone() if storage.device.type == "cpu" else storage.cpu()


# -- the state of tensors that are put away --------------------------------------------------------


def copied_to_host(state: EngineState) -> EngineState:
    """Copies that nothing else uses."""
    return EngineState(_copies(state.weights), _copies(state.optimizer), is_copy=True)


def copy_into(state: EngineState, copies: EngineState) -> None:
    """Copy the values of such copies into the live tensors of `state`."""
    for live, copied in ((state.weights, copies.weights), (state.optimizer, copies.optimizer)):
        for name, tensor in copied.items():
            _own(live[name]).detach().copy_(_own(tensor))


def _copies(tensors: Mapping[str, Held]) -> dict[str, Held]:
    return {name: _copy(tensor) for name, tensor in tensors.items()}


def _copy(tensor: Held) -> Held:
    copied = _own(tensor).detach().to("cpu", copy=True)
    return replace(tensor, values=copied) if isinstance(tensor, BlockPart) else copied


def _own(tensor: Held) -> torch.Tensor:
    return tensor.values if isinstance(tensor, BlockPart) else tensor
