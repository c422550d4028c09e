"""Further torch functions replaced meanwhile: those where C++ would act on a device by itself,
bypassing Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from pretend_cuda.randomness import Generator
from pretend_cuda.tensor import DATA, DeviceTensor, labelled, pinned, replace_data

_TENSOR, _AS_TENSOR, _TO = torch.tensor, torch.as_tensor, torch.Tensor.to
_FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm",
    "scalar_tensor", "zeros", "zeros_like",
)  # fmt: skip


def torch_functions() -> dict[str, Any]:
    factories = {name: _with_device(getattr(torch, name)) for name in _FACTORIES}
    return {**factories, "tensor": _tensor, "as_tensor": _as_tensor, "Generator": Generator}


def tensor_methods() -> dict[str, Any]:
    return {
        "to": _to,
        "cuda": lambda tensor, device=None, *args, **kwargs: _to(
            tensor, "cuda" if device is None else device
        ),
        "pin_memory": _pin_memory,
        "is_pinned": _is_pinned,
        "data": property(_data, _set_data),
    }


def _with_device(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """C++ cannot identify a device by its number alone."""

    @functools.wraps(make)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = labelled(kwargs["device"])
        return make(*args, **kwargs)

    return create


def _to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """C++ must see that the tensor already is where it should go."""
    if "device" in kwargs:
        kwargs["device"] = labelled(kwargs["device"])
    moved: torch.Tensor = _TO(tensor, *map(labelled, args[:1]), *args[1:], **kwargs)
    return moved


def _tensor(
    data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any
) -> torch.Tensor:
    kwargs.pop("pin_memory", None)
    return _made_on_host(_TENSOR, data, device, kwargs).requires_grad_(requires_grad)


def _as_tensor(data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data.to(
            data.device if device is None else device, data.dtype if dtype is None else dtype
        )
    return _made_on_host(_AS_TENSOR, data, device, {"dtype": dtype})


def _made_on_host(
    make: Callable[..., torch.Tensor], data: Any, device: Any, kwargs: dict[str, Any]
) -> torch.Tensor:
    """C++ would fill it on the device, so it is made on the host and moved there."""
    if device is None:
        device = data.device if isinstance(data, torch.Tensor) else _device_of_context()
    if labelled(device) == device:
        return make(_numbers(data), device=device, **kwargs)
    return make(_numbers(data), device="cpu", **kwargs).to(device)


def _device_of_context() -> Any:
    """The device set by `with torch.device(…)`; the host without it."""
    contexts = [
        mode for mode in _get_current_function_mode_stack() if isinstance(mode, DeviceContext)
    ]
    return contexts[-1].device if contexts else "cpu"


def _numbers(data: Any) -> Any:
    """Nested lists with a number in place of each device tensor."""
    if isinstance(data, DeviceTensor):
        return data.cpu() if data.dim() else data.item()
    return [_numbers(item) for item in data] if isinstance(data, list | tuple) else data


def _pin_memory(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    return pinned(tensor.clone())


def _is_pinned(tensor: torch.Tensor, *args: Any) -> bool:
    return getattr(tensor, "is_pinned_here", False)


def _data(tensor: torch.Tensor) -> torch.Tensor:
    data_of: torch.Tensor = DATA.__get__(tensor)  # type: ignore[attr-defined]
    return data_of


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    if isinstance(new, DeviceTensor):
        replace_data(tensor, new)
    else:
        DATA.__set__(tensor, new)  # type: ignore[attr-defined]
