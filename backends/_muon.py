"""Muon: momentum whose matrices are made orthogonal (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon), with the update scale of Moonlight
(https://arxiv.org/abs/2502.16982, equation 4), so that learning rates of AdamW fit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from rlcli.api.model_source import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration; chosen by its authors so that small singular values grow fast."""
ITERATIONS = 5
LEAST_NORM = 1e-7
RMS = 0.2
"""Root mean square of the entries of an update per learning rate, as is usual with AdamW."""


def orthogonalized(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[…, m, n] matrices with the same singular vectors and singular values near 1 (about 0.7 to
    1.2), by Newton-Schulz iterations in `dtype`."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(Optimizer):
    """Updates of matrices [m, n], and of stacks [E, m, n] of them, of which ranks may hold parts.

    Each rank makes the whole matrices orthogonal, or those experts that it holds whole, and takes
    its part of the result: an update does not depend on how parameters are sharded.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        dtype: torch.dtype,
    ):
        """`groups` have a weight decay; `dtype` is that of the products."""
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})
        self._dtype = dtype

    def make_state(self) -> None:
        """Create what is missing of the state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.make_state()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        buffer = self.state[parameter]["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(buffer, group["momentum"])  # Nesterov's
        rate, (rows, columns) = group["lr"], parameter.shape[-2:]
        mine, _ = local_part(parameter)
        mine.mul_(1 - rate * group["weight_decay"])
        update = self._orthogonalized(ahead)
        mine.add_(update, alpha=-rate * RMS * math.sqrt(max(rows, columns)))

    def _orthogonalized(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of the result."""
        if not isinstance(tensor, DTensor):
            return orthogonalized(tensor, self._dtype).to(tensor.dtype)
        if tensor.dim() == 2:
            _, region = local_part(tensor)
            whole_matrix = orthogonalized(tensor.full_tensor(), self._dtype)
            return whole_matrix[region].to(tensor.dtype)
        divided = tensor.redistribute(placements=_of_whole_experts(tensor.placements))
        updates = orthogonalized(divided.to_local(), self._dtype).to(tensor.dtype)
        result = DTensor.from_local(
            updates,
            tensor.device_mesh,
            divided.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        return result.redistribute(placements=tensor.placements).to_local()


def _of_whole_experts(placements: Iterable[Any]) -> list[Any]:
    """The placements of a stack in which each rank has its experts whole."""
    return [
        placement if isinstance(placement, Shard) and placement.dim == 0 else Replicate()
        for placement in placements
    ]
