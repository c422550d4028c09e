"""A CUDA device that computes in host memory, so that code for GPUs runs where there is none.

    with pretend_cuda() as device:
        weights = torch.randn(3, 4).to(device)
        weights.device, weights.is_cuda  # cuda:0, True
        weights @ torch.ones(4)  # RuntimeError: Expected all tensors to be on the same device, …

Within the context torch behaves as it does on a machine with GPUs: tensors say where they are, host and device tensors
refuse to mix, each device has its random stream and counts its memory, `torch.autocast("cuda")` casts what it casts
there. The numbers are real, so results can be compared with those of the CPU.

It does not show what kernels, streams, timing and NCCL do: everything happens at once, in order, on one thread.
torch.distributed needs nothing special; gloo moves the tensors of the device.
"""

from rlcli.testing.pretend_cuda.context import pretend_cuda
from rlcli.testing.pretend_cuda.tensor import DeviceTensor

__all__ = ["DeviceTensor", "pretend_cuda"]
