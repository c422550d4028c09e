"""The memory of `deepspeed` under each stage of ZeRO. No torch here: `rlcli plan` imports this
file, and the engine.

The formulas follow the library's source. All stages on two ranks, with and without offload, have
been compared with the memory of processes (`tests/bench/memory.py --zero-stage`), where offloaded
tensors stay in the same memory.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rlcli.api.memory import Kept, Parts, PlacedRole

from ._messages import of_deepspeed, total
from ._training_memory import TrainingMemory

BUCKET = 2**26
"""Numbers that are reduced or gathered at once, unless a parameter is larger: 256 MB of float32."""

REDUCED_AT_ONCE = 4 * 500_000_000
"""Bytes of gradients that the library concatenates without ZeRO."""


def bucket_of(parameters: int, largest: int) -> int:
    """Size of a bucket, in numbers, for a model of `parameters`,
    `largest` of them in one tensor; an even number."""
    return 2 * -(-min(parameters, max(BUCKET, largest)) // 2)


class DeepSpeedMemory(TrainingMemory):
    """A rank's part of parameters, gradients and optimizer state under a stage, and the library's
    buffers. If devices use the host's memory, what is kept on the host also counts."""

    WITHIN_PERCENT: ClassVar[int] = 25
    dimensions: ClassVar[tuple[str, ...]] = ("dp",)

    def __init__(self, role: PlacedRole):
        super().__init__(role)
        self.stage = role.arguments.get("zero_stage", 2)
        self.ranks = role.mesh["dp"]
        self.keeps_casts = self.stage < 3
        self.unsharded = 4 * self.parameters
        self.share = self.unsharded // self.ranks
        self.largest = 4 * max(
            self.sizes.vocabulary * self.sizes.hidden,
            self.sizes.hidden * max(self.sizes.mlp, self.sizes.heads * self.sizes.head_dim),
            *(layer.experts for layer in self.sizes.layers),
        )
        """Bytes of the largest parameter."""
        self.bucket = 4 * bucket_of(self.parameters, self.largest // 4)
        self.offloads = bool(role.arguments.get("offload_optimizer"))
        self.offloads_weights = bool(role.arguments.get("offload_parameters"))
        self.on_host = 1 if role.device == "cpu" else 0
        """Weight of a byte on the host."""

    def savings(self) -> list[list[dict[str, Any]]]:
        stages = (
            [{"zero_stage": stage} for stage in range(self.stage + 1, 4)] if self.ranks > 1 else []
        )
        is_offloadable = self.trains and self.stage > 0 and not self.offloads
        return [*super().savings(), stages, [{"offload_optimizer": True}] if is_offloadable else []]

    # -- between calls -----------------------------------------------------------------------------

    def resident(self) -> Kept:
        weights = self.share if self.stage == 3 else self.unsharded
        moments = 2 * (self.unsharded if self.stage == 0 else self.share) if self.trains else 0
        buffers = 0
        if self.stage == 3:
            buffers = self.bucket + (self.on_host if self.offloads else 1) * self.share
        if self.offloads:
            moments *= self.on_host
            buffers += self.on_host * self.share * (3 if self.stage < 3 else 2)
            buffers += self.largest * (1 + self.on_host) if self.stage < 3 else 0
        if self.offloads_weights:
            weights *= self.on_host
        return Kept(weights, moments, buffers)

    def load(self) -> Parts:
        """Parameters are concatenated, which holds them twice;
        what offload needs is created after that."""
        twice = self.share if self.stage == 3 else self.unsharded if self.stage else 0
        return Parts(gathered=max(0, twice - self.resident().buffers) if self.offloads else twice)

    def sent(self, tokens: int, micro_batches: int) -> dict[str, int]:
        return total(of_deepspeed(self, micro_batches))

    # -- update ------------------------------------------------------------------------------------

    def update(self, tokens: int, micro_batches: int) -> Parts:
        saved = tokens * self.saved_at_head()
        earlier, during, at_end = self.gradients(micro_batches > 1)
        gathered = self.gathered_in_block()
        at_head = Parts(
            earlier, gathered + self.casts_at_head(), saved, 0, self.head_update(tokens)
        )
        in_blocks = Parts(
            during + (self.head_matrix if self.has_lm_head and self.stage < 2 else 0),
            gathered + self.casts(are_kept=True),
            saved + tokens * self.backward_of_block(),
        )
        return max((at_head, in_blocks, Parts(at_end, gathered)), key=lambda parts: parts.total)

    def gradients(self, several: bool) -> tuple[int, int, int]:
        """Bytes of gradients in addition to what is kept: when the last backward pass starts, while
        blocks compute it, and at most once it is done. Buckets are copied to be reduced."""
        if self.stage == 0:
            earlier = self.unsharded if several else 0
            return earlier, earlier, self.unsharded + min(self.unsharded, REDUCED_AT_ONCE)
        if self.stage == 1:
            earlier = self.unsharded if several else 0
            return earlier, earlier, self.unsharded + self.bucket + self.share
        if self.stage == 2:
            earlier = self.share if several else 0
            during = earlier + self.bucket * (2 if self.bucket < self.unsharded else 1)
            return earlier, during, max(earlier + self.share + 2 * self.bucket, 2 * self.share)
        reduced = self.bucket + self.bucket // self.ranks
        return 0, reduced, max(reduced, self.share)

    # -- forward passes ----------------------------------------------------------------------------

    def gathered_at_head(self) -> int:
        return self.gathered_in_block()

    def gathered_in_block(self) -> int:
        """What stage 3 prefetches, and what it has not released yet; twice,
        while ranks' parts are joined."""
        return 2 * min(self.unsharded, 2 * self.bucket) if self.stage == 3 and self.ranks > 1 else 0

    @property
    def copies_to_generate(self) -> bool:
        return self.stage == 3

    def gathered_to_generate(self) -> int:
        if self.copies_to_generate:
            return self.whole_copy_to_generate()
        return super().gathered_to_generate()
