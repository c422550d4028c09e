"""Tensors of the pretend device, and how operations on them are executed on the CPU.

To Python such a tensor is on `cuda:0`. To torch's C++ it is on `xla:0`: a CPU build has no runtime
for either, but does not require one for XLA. It is the only device type whose tensors take part in
CUDA's autocast and need no streams in the backward pass. Python does not see that name, and C++
uses it to keep host and device apart.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretend_cuda.kernels import KERNELS
from pretend_cuda.memory import DeviceAllocation
from pretend_cuda.placement import Device, place_result
from pretend_cuda.randomness import check_generator, random_stream_of
from pretend_cuda.state import active
from pretend_cuda.storage import DeviceStorage

LABEL = "xla"
"""The device type that C++ sees."""

DATA = torch.Tensor.data
"""Torch's own property."""
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
_OWN = ("host", "allocation", "_is_param")
"""Attributes that belong to a tensor's memory, not to its user."""


class DeviceTensor(torch.Tensor):
    """A tensor on `cuda:<index>`; its numbers are in `host`."""

    host: torch.Tensor
    allocation: DeviceAllocation
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[DeviceTensor], host: torch.Tensor, index: int = 0) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device(LABEL, index),
            _extra_dispatch_keys=_AUTOCAST,
        )
        tensor.host = host
        tensor.allocation = active().memory[index].allocation_of(host)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return execute(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.get_device())

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_xla(self) -> bool:
        return False

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        replace_data(self, new)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        named: dict[str, Any] = {"dtype": self.dtype, "device": self.device} | kwargs
        return torch.tensor(data, **named)

    def untyped_storage(self) -> DeviceStorage:  # type: ignore[override]
        return DeviceStorage(self)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def pin_memory(self, *args: Any) -> torch.Tensor:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")

    def is_pinned(self, *args: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        """Work on a stream is done as soon as it is queued; memory may be released at once."""

    def type(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return super().type(*args, **kwargs)
        return self.host.type().replace("torch.", "torch.cuda.")

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{repr(self.host.detach())[:-1]}, device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.dim() else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol"
            )
        if id(self) not in memo:
            copied = DeviceTensor(self.host.clone(), self.get_device()).requires_grad_(
                self.requires_grad
            )
            vars(copied).update(users_attributes(self))
            if getattr(self, "_is_param", False):
                copied._is_param = True
            memo[id(self)] = copied
        return cast(torch.Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "a tensor of the pretend device cannot be pickled; copy it to the host first"
        )


class Operations(TorchDispatchMode):
    """Intercepts calls without any device tensor yet: factories, and copies from the host."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled below a mode; to say so for every operation takes a tenth of it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with its local tensors
        return execute(func, args, kwargs or {})


def execute(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation below autograd, or record it in the graph that is being captured."""
    graph = active().capturing
    if graph is not None and graph.captures:
        return graph.record(operation, args, kwargs, _run)
    return _run(operation, args, kwargs)


def _run(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation on the host copies, following the device's rules."""
    tensors: list[torch.Tensor] = []
    generators: list[torch.Generator] = []
    host_args = [_on_host(value, tensors, generators) for value in args]
    host_kwargs = {name: _on_host(value, tensors, generators) for name, value in kwargs.items()}
    asked, pins = _asked_device(kwargs.get("device")), bool(kwargs.get("pin_memory"))
    same = {id(tensor.host): tensor for tensor in tensors if type(tensor) is DeviceTensor}
    of_host = not (same or isinstance(asked, int))
    if of_host and not generators and not pins:
        return operation(*args, **kwargs)
    rules = _rules_of(operation)
    if rules.changes_shape and not of_host:
        raise NotImplementedError(
            f"{operation} changes a tensor's shape in place; the pretend device does not do that"
        )
    device = place_result(
        operation, args, asked, [(tensor, _device_of(tensor)) for tensor in tensors]
    )
    generator = generators[0] if generators else None
    if generator is not None:
        check_generator(generator, device)
    if host_kwargs.get("device") is not None:
        host_kwargs["device"] = torch.device("cpu")
    host_kwargs.pop("pin_memory", None)
    if rules.draws and device is not None and generator is None:
        with random_stream_of(device):
            result = rules.kernel(*host_args, **host_kwargs)
    else:
        result = rules.kernel(*host_args, **host_kwargs)
    returned = _returned(result, device, same)
    return pinned(returned) if pins else returned


class _Rules(NamedTuple):
    """What torch says of an operation; looked up once, as that takes as long as most operations."""

    kernel: Callable[..., Any]
    changes_shape: bool
    """Whether it changes the shape of its argument in place."""
    draws: bool
    """Whether its result is random."""


@functools.cache
def _rules_of(operation: Any) -> _Rules:
    tags = operation.tags
    return _Rules(
        KERNELS.get(operation, operation),
        torch.Tag.inplace_view in tags,
        torch.Tag.nondeterministic_seeded in tags,
    )


def replace_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """`tensor.data = new`: the same object takes on the memory, and the device, of another."""
    attributes = users_attributes(tensor)
    flags = {
        name: value for name in ("_is_param",) if (value := vars(tensor).get(name)) is not None
    }
    if isinstance(new, DeviceTensor) and isinstance(tensor, DeviceTensor):
        DATA.__set__(tensor, new.detach())  # type: ignore[attr-defined]
        tensor.host, tensor.allocation = new.host, new.allocation
        vars(tensor).update(attributes | flags)
        return
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    copy = new.detach().requires_grad_(tensor.requires_grad)
    swap_tensors(tensor, torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy)


_SWAP = torch.utils.swap_tensors


def swap_tensors(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """torch's way to move a parameter and keep the object; here its attributes stay with it too,
    as on a GPU.

    Only a move between host and device needs it; otherwise, as on a GPU, others may hold the
    parameter meanwhile.
    """
    if isinstance(ours, DeviceTensor) and isinstance(theirs, DeviceTensor):
        replace_data(ours, theirs)
        return
    of_host = not (isinstance(ours, DeviceTensor) or isinstance(theirs, DeviceTensor))
    # not if one of them is a meta tensor
    if of_host and torch._has_compatible_shallow_copy_type(ours, theirs):
        ours.data = theirs.data
        return
    attributes = users_attributes(ours)
    _SWAP(ours, theirs)
    vars(ours).update(attributes)


def users_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if name not in _OWN}


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a host tensor as having pinned memory."""
    tensor.is_pinned_here = True  # type: ignore[attr-defined]
    return tensor


def let_autograd_know_the_label() -> None:
    """Autograd requires a guard for each device type of its tensors. That of `meta` does nothing;
    use it for ours too.

    There is no Python function for this: it is one entry in a table that libc10 exports.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * 20).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    ours, meta = (torch._C._autograd.DeviceType.__members__[name].value for name in ("XLA", "Meta"))
    if table[ours] is None:
        table[ours] = table[meta]


def _asked_device(named: Any) -> Device | str:
    """The device named in a call, by its own name or by the label; "unnamed" if there is none."""
    if named is None:
        return "unnamed"
    device = torch.device(named)
    return active().index(device.index) if device.type in (LABEL, "cuda") else None


def labelled(device: Any) -> Any:
    """A CUDA device under the name that C++ knows; anything else unchanged."""
    if not isinstance(device, str | torch.device | int):
        return device
    if isinstance(device, int) or torch.device(device).type == "cuda":
        return torch.device(LABEL, active().index(device))
    return device


def _without_lists(index: Any) -> Any:
    """C++ would turn a list of indices into a device tensor by itself, bypassing Python."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index) if isinstance(index, list) else index


def _device_of(tensor: torch.Tensor) -> Device:
    return tensor.get_device() if isinstance(tensor, DeviceTensor) else None


_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device, torch.layout}
)
"""Types of most arguments; to find out that they are no tensors takes torch longer."""


def _on_host(value: Any, tensors: list[torch.Tensor], generators: list[torch.Generator]) -> Any:
    """An argument with the host's numbers in place of device tensors; collects all tensors and
    generators in it.

    Below autograd arguments are nested in lists and tuples only; torch's pytree takes ten times as
    long.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is DeviceTensor:
        tensors.append(value)
        return value.host
    if isinstance(value, list | tuple):
        return kind([_on_host(item, tensors, generators) for item in value])
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, torch._C.Generator):
        generators.append(value)
    return value


def _returned(output: Any, device: Device, same: Mapping[int, DeviceTensor]) -> Any:
    """A result on the device, or each item of a list or tuple."""
    if not isinstance(output, torch.Tensor):
        if isinstance(output, list | tuple) and not isinstance(output, torch.Size):
            return type(output)([_returned(item, device, same) for item in output])
        return output
    if isinstance(output, AsyncCollectiveTensor):
        output = output.wait()  # gloo has no streams to wait on later
    existing = same.get(id(output))
    if existing is None:
        return output if device is None else DeviceTensor(output, device)
    if existing.shape != output.shape:
        raise NotImplementedError(
            f"an `out=` tensor of shape {tuple(existing.shape)} became {tuple(output.shape)}"
        )
    return existing
