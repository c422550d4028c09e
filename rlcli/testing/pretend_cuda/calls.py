"""Calls of torch from Python: devices by the names that users give them, turned into those that C++ knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlcli.testing.pretend_cuda.randomness import DeviceGenerator, drawing_from_device
from rlcli.testing.pretend_cuda.state import active
from rlcli.testing.pretend_cuda.tensor import LABEL, DeviceTensor, replace_data

PINNED = "_is_pinned_here"


class Calls(TorchFunctionMode):
    """Every function and method of torch passes here first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": labelled(kwargs["device"])}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, args, kwargs)
        if isinstance(kwargs.get("generator"), DeviceGenerator):
            with drawing_from_device():
                return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            return _pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


def labelled(device: Any) -> Any:
    """`cuda`, `cuda:1` or `1` under the name that C++ knows; any other device as it is."""
    if isinstance(device, int) or torch.device(device).type == "cuda":
        return torch.device(LABEL, active().index(device))
    return device


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if rest and isinstance(rest[0], str | torch.device | int):
        rest[0] = labelled(rest[0])
    return func(tensor, *rest, **kwargs)


def _cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, *rest = args
    device = rest[0] if rest else kwargs.get("device")
    moved: torch.Tensor = tensor.to(torch.device(LABEL, active().current) if device is None else labelled(device))
    return moved


def _from_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """C++ would fill the tensor on the device by itself, past Python; so it is made on the host and moved."""
    source, *rest = args
    device = kwargs.pop("device", None)
    if isinstance(source, DeviceTensor):  # a copy, or itself
        made: torch.Tensor = func(source, *rest, **kwargs)
        return made if device is None else made.to(device)
    if device is None or torch.device(device).type != LABEL:
        return func(_numbers(source), *rest, **kwargs, **({} if device is None else {"device": device}))
    needs_grad, kwargs["pin_memory"] = kwargs.pop("requires_grad", False), False
    if func is torch.as_tensor:
        kwargs.pop("pin_memory")
    return func(_numbers(source), *rest, **kwargs).to(device).requires_grad_(needs_grad)


def _new_tensor(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor, source = args
    named = {"dtype": tensor.dtype, "device": tensor.device} | kwargs
    return torch.tensor(source, **named)


def _numbers(source: Any) -> Any:
    """Nested lists with a number in place of each tensor of the device."""
    if isinstance(source, DeviceTensor):
        return source.host.detach().numpy() if source.dim() else source.item()
    return [_numbers(one) for one in source] if isinstance(source, list | tuple) else source


def _pin(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _pinned(args[0].clone())


def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return getattr(args[0], PINNED, False)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    setattr(tensor, PINNED, True)
    return tensor


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor, new = args
    if isinstance(new, DeviceTensor):  # those of the device have their own setter
        replace_data(tensor, new)
    else:
        func(tensor, new)


def _at(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """C++ would make a list of indices a tensor of the device by itself, past Python."""
    tensor, index, *value = args
    if isinstance(tensor, DeviceTensor):
        index = tuple(map(_as_index, index)) if isinstance(index, tuple) else _as_index(index)
    return func(tensor, index, *value)


def _as_index(index: Any) -> Any:
    return torch.tensor(index) if isinstance(index, list) else index


_SPECIAL: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.tensor: _from_numbers,
    torch.as_tensor: _from_numbers,
    torch.Tensor.new_tensor: _new_tensor,
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.is_pinned: _is_pinned,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.__getitem__: _at,
    torch.Tensor.__setitem__: _at,
}
