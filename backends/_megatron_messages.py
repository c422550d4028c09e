"""Messages between the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

_FORWARD, _BACKWARD = 0, 1


class StageMessages(P2PCommunicator):
    """Sends what goes to the next stage before what goes back, shapes before tensors.

    With virtual stages each of two ranks is both before and after the other, and messages between
    two ranks arrive in the order in which they are sent. Megatron's own sends what goes back first,
    but first receives what goes forward.
    """

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        **others: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        device, dtype = torch.cuda.current_device(), self.config.pipeline_dtype
        sent = tensor_send_next, tensor_send_prev
        sizes = [None if x is None else torch.tensor(x.shape, device=device) for x in sent]
        shapes = [
            torch.empty(3, dtype=torch.int64, device=device) if is_expected else None
            for is_expected in (recv_prev, recv_next)
        ]
        self._exchange(sizes, shapes)
        arriving = [
            None if shape is None else torch.empty(shape.tolist(), dtype=dtype, device=device)
            for shape in shapes
        ]
        self._exchange(sent, arriving)
        before, after = (None if x is None else x.requires_grad_() for x in arriving)
        return before, after, None

    def _exchange(self, sent: Any, arriving: Any) -> None:
        """The first of each pair goes to the next stage, the second back."""
        (onwards, back), (from_before, from_after) = sent, arriving
        messages = (
            (dist.isend, onwards, self.next_rank, _FORWARD),
            (dist.irecv, from_before, self.prev_rank, _FORWARD),
            (dist.isend, back, self.prev_rank, _BACKWARD),
            (dist.irecv, from_after, self.next_rank, _BACKWARD),
        )
        operations = [
            dist.P2POp(operation, tensor.contiguous(), rank, self.pp_group, tag)
            for operation, tensor, rank, tag in messages
            if tensor is not None
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
