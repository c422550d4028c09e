"""A CUDA device that computes in host memory, so that GPU code runs on machines without a GPU.

    with pretend_cuda() as device:
        weights = torch.randn(3, 4).to(device)
        weights.device, weights.is_cuda  # cuda:0, True
        weights @ torch.ones(4)  # RuntimeError: Expected all tensors to be on the same device, …

Within the context torch behaves as on a machine with GPUs: tensors report their device, host and
device tensors refuse to mix, each device has its own random stream and counts its memory,
`torch.autocast("cuda")` casts the same operations. The numbers are real, so results can be compared
with those of the CPU.

It does not model kernels, streams, timing or NCCL: everything happens immediately, in order, on one
thread. torch.distributed needs no special handling; gloo transfers the device's tensors.
"""

from pretend_cuda.context import (
    CANNOT_PRETEND,
    IS_BUILT_FOR_GPUS,
    needs_pretend_device,
    pretend_cuda,
)
from pretend_cuda.tensor import DeviceTensor

__all__ = [
    "CANNOT_PRETEND",
    "IS_BUILT_FOR_GPUS",
    "DeviceTensor",
    "needs_pretend_device",
    "pretend_cuda",
]
