"""CUDA's rules on which devices the tensors of an operation may be on,
and where its result goes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

_COPIES = frozenset(
    {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default, aten.fill_.Tensor}
)
"""They read from any device and write to that of their first argument, or to the requested one."""

_INDEXING = frozenset(
    {
        aten.index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._index_put_impl_.default,
        aten._unsafe_index.Tensor,
        aten._unsafe_index_put.default,
    }
)
"""A device tensor may be indexed by host tensors; a host tensor only by host tensors."""

_SCALARS_MAY_MIX = frozenset({aten.masked_fill.Tensor, aten.masked_fill_.Tensor})
"""In addition to pointwise operations, those that accept a zero-dimensional host tensor as a
number."""

Device = int | None
"""The index of a CUDA device; None for the host."""


def place_result(
    operation: Any,
    args: Sequence[Any],
    asked: Device | str,
    placed: Sequence[tuple[torch.Tensor, Device]],
) -> Device:
    """The device of an operation's result.

    `asked` is the device named in the call, or "unnamed"; `placed` are all tensors among the
    arguments, in order. Raises RuntimeError, as CUDA would, if the tensors are on devices that the
    operation cannot combine.
    """
    if isinstance(asked, str) and len({device for _, device in placed}) == 1:
        return placed[0][1]
    if operation in _COPIES:
        return placed[0][1] if isinstance(asked, str) else asked
    if operation in _INDEXING:
        return _place_indexing(operation, args, placed)
    devices = _devices_that_count(operation, placed)
    if len(devices) > 1:
        raise _mixed(operation, devices)
    common = devices[0] if devices else None
    if placed and _is_in_place(operation) and placed[0][1] != common:
        raise _mixed(operation, [placed[0][1], common])
    return common if isinstance(asked, str) else asked


def name_of(device: Device) -> str:
    return "cpu" if device is None else f"cuda:{device}"


def _devices_that_count(
    operation: Any, placed: Sequence[tuple[torch.Tensor, Device]]
) -> list[Device]:
    """The distinct devices, in order. To pointwise operations a zero-dimensional host tensor is
    just a number."""
    devices = _different(device for _, device in placed)
    if len(devices) < 2 or not (
        torch.Tag.pointwise in operation.tags or operation in _SCALARS_MAY_MIX
    ):
        return devices
    return _different(device for tensor, device in placed if device is not None or tensor.dim())


def _place_indexing(
    operation: Any, args: Sequence[Any], placed: Sequence[tuple[torch.Tensor, Device]]
) -> Device:
    of = {id(tensor): device for tensor, device in placed}
    indexed = of[id(args[0])]
    for index in args[1]:
        if index is not None and of[id(index)] not in (None, indexed):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor "
                f"({name_of(indexed)}); found one on {name_of(of[id(index)])} in {operation}"
            )
    values = args[2] if len(args) > 2 else None
    if values is not None and values.dim() and of[id(values)] != indexed:
        raise _mixed(operation, [indexed, of[id(values)]])
    return indexed


@functools.cache
def _is_in_place(operation: Any) -> bool:
    first = operation._schema.arguments[0] if operation._schema.arguments else None
    return first is not None and first.alias_info is not None and first.alias_info.is_write


def _different(devices: Iterable[Device]) -> list[Device]:
    return list(dict.fromkeys(devices))


def _mixed(operation: Any, devices: Sequence[Device]) -> RuntimeError:
    names = ", ".join(name_of(device) for device in devices)
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{names}! ({operation})"
    )
