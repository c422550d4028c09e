"""`pretend_cuda()`: inside it, this process has CUDA devices."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._device import _device_constructors

from pretend_cuda.answers import torch_accelerator, torch_cuda, torch_cuda_nvtx
from pretend_cuda.calls import tensor_methods, torch_functions
from pretend_cuda.memory import Memory
from pretend_cuda.randomness import DeviceGenerator
from pretend_cuda.state import Devices, close_devices, open_devices
from pretend_cuda.tensor import Operations, let_autograd_know_the_label, swap_tensors

_GIB = 1 << 30
IS_BUILT_FOR_GPUS = torch.version.cuda is not None or torch.version.hip is not None
CANNOT_PRETEND = "its GPU is emulated, for which torch must be a CPU build"

needs_pretend_device = pytest.mark.skipif(IS_BUILT_FOR_GPUS, reason=CANNOT_PRETEND)
"""Marks tests that cannot run where torch is built for GPUs."""


@contextlib.contextmanager
def pretend_cuda(
    devices: int = 1, memory: int = 80 * _GIB, capability: tuple[int, int] = (8, 0)
) -> Iterator[torch.device]:
    """Give this thread `devices` CUDA devices of `memory` bytes each; the value is the first one.
    Threads started inside the context have them too.

    Raises RuntimeError if torch is built for GPUs.
    """
    if IS_BUILT_FOR_GPUS:
        raise RuntimeError(CANNOT_PRETEND)
    let_autograd_know_the_label()
    # `with torch.device(…)` remembers torch's own functions, not their replacements
    _device_constructors()
    generators = tuple(DeviceGenerator.on(index) for index in range(devices))
    open_devices(Devices([Memory(memory) for _ in range(devices)], generators, capability))
    try:
        with _torch_answers(), _threads_of_autograd(), _new_threads(), Operations():
            yield torch.device("cuda", 0)
    finally:
        close_devices()


@contextlib.contextmanager
def _torch_answers() -> Iterator[None]:
    cuda = torch_cuda()
    with contextlib.ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
            stack.enter_context(_replaced(module, cuda, only_known=module is not torch.cuda))
        stack.enter_context(_replaced(torch.cuda.nvtx, torch_cuda_nvtx()))
        stack.enter_context(_replaced(torch.accelerator, torch_accelerator()))
        stack.enter_context(_replaced(torch, torch_functions()))
        stack.enter_context(_replaced(torch.Tensor, tensor_methods()))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", swap_tensors))
        stack.enter_context(
            mock.patch.object(DTensor, "device", property(_device_of_part), create=True)
        )
        yield


def _device_of_part(tensor: DTensor) -> torch.device:
    return tensor._local_tensor.device


def _replaced(module: Any, answers: dict[str, Any], only_known: bool = False) -> Any:
    replacements = {
        name: answer for name, answer in answers.items() if not only_known or hasattr(module, name)
    }
    return mock.patch.multiple(module, create=True, **replacements)


@contextlib.contextmanager
def _threads_of_autograd() -> Iterator[None]:
    """The backward pass runs on this thread, where the device is known; modules keep their
    parameters when moved."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


@contextlib.contextmanager
def _new_threads() -> Iterator[None]:
    """Make the devices known to new threads: a torch mode applies to a single thread."""
    run = threading.Thread.run

    def run_there(thread: threading.Thread) -> None:
        with Operations():
            run(thread)

    with mock.patch.object(threading.Thread, "run", run_there):
        yield
