"""The passes of a decoding that each draw one token for every active row: as they come, or captured
as CUDA graphs.

A pass of a small model is thousands of kernels of a few microseconds, which take longer to launch
than to run. A captured pass is launched at once; what it reads from the host, such as how many rows
it computes, is the same in each replay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

LOG = logging.getLogger(__name__)
FEWEST_COLUMNS = 128
"""Of the cache that a captured pass reads."""
STATIC_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that do not look at the length of a text."""


@dataclass(frozen=True)
class PassSize:
    """The first `rows` rows, with the first `columns` columns of their cache."""

    rows: int
    columns: int


class Passes:
    """Computes each pass with the size that it needs."""

    def __init__(self, compute: Callable[[PassSize], None]):
        """`compute` writes what it draws into tensors that stay where they are."""
        self.compute = compute

    def run(self, needed: PassSize) -> None:
        self.compute(needed)


class CapturedPasses(Passes):
    """Captures a pass of each size, and replays it from then on. Sizes are rounded up to powers of
    two: rows that are not active take part, and must be harmless."""

    def __init__(
        self,
        compute: Callable[[PassSize], None],
        most: PassSize,
        context: Callable[[], AbstractContextManager[Any]],
    ):
        """`most`: what there is; `context`: in which a pass is captured."""
        super().__init__(compute)
        self._most = most
        self._context = context
        self._graphs: dict[PassSize, torch.cuda.CUDAGraph] = {}
        self._memory: Any = None
        """What all graphs allocate from: none of them runs beside another."""
        self._can_capture = True

    def run(self, needed: PassSize) -> None:
        size = self.rounded(needed)
        if self._memory is None:  # libraries prepare themselves in a pass that is not captured
            self._memory = torch.cuda.graph_pool_handle()
            self.compute(size)
            return
        if size not in self._graphs and self._can_capture:
            self._capture(size)
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            self.compute(needed)

    def rounded(self, needed: PassSize) -> PassSize:
        rows, columns = needed.rows, max(needed.columns, FEWEST_COLUMNS)
        return PassSize(
            min(_power_of_two(rows), self._most.rows),
            min(_power_of_two(columns), self._most.columns),
        )

    def _capture(self, size: PassSize) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may use the device meanwhile
            with (
                torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
                self._context(),
            ):
                self.compute(size)
        except RuntimeError as error:
            LOG.warning("decoding without CUDA graphs: %s", str(error).partition("\n")[0])
            self._can_capture = False
        else:
            self._graphs[size] = graph


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def can_be_captured(lm: Any, device: torch.device) -> bool:
    """Whether a pass of a model does the same whatever its tensors hold: experts, and some rotary
    embeddings, read them on the host."""
    if device.type != "cuda":
        return False
    rope = getattr(lm.config.get_text_config(), "rope_parameters", None) or {}
    has_experts = any("expert" in name for name, _ in lm.named_modules())
    return not has_experts and rope.get("rope_type", "default") in STATIC_ROPES
