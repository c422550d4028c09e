"""The memory of `fsdp`: what `_memory` says of forward passes and generation, and training; over dp and tp ranks.

Parameters, gradients and AdamW's two states are float32. No torch here: `rlcli plan` imports this file.
"""

from __future__ import annotations

from rlcli.api.memory import Kept, Parts, PlacedRole

from ._memory import InferenceMemory, saved_by_layer


class FSDPMemory(InferenceMemory):
    """Parameters, gradients and optimizer state of one rank; the others' parameters while they are gathered."""

    def __init__(self, role: PlacedRole):
        super().__init__(role)
        self.keeps_casts = role.mesh["tp"] == 1  # those of parts of parameters are not kept
        self.is_sharded = role.mesh["dp"] > 1
        self.shards = min(role.arguments.get("shard_size") or role.mesh["dp"], role.mesh["dp"])
        """Data-parallel ranks that share one copy of the model."""
        self.defers = self.is_sharded and bool(role.arguments.get("defer_reduction"))
        self.checkpointing = bool(role.arguments.get("gradient_checkpointing"))

    @property
    def outside_blocks(self) -> int:
        """Bytes of embedding, head and norms, which are whole from the first block of a pass to its last."""
        blocks = sum(layer.parameters - layer.norms for layer in self.sizes.layers)
        return 4 * (self.parameters - blocks) if self.is_sharded else 0

    def casts(self, kept: bool) -> int:
        """Sharded matrices are gathered in the precision of the products."""
        return 0 if self.is_sharded else super().casts(kept)

    def kept(self) -> Kept:
        calls = self.role.calls
        return Kept(
            weights=4 * self.parameters // self.shards,
            optimizer=8 * self.parameters // self.shards if "train_step" in calls else 0,
        )

    # -- update ----------------------------------------------------------------------------------------------

    def update(self, tokens: int, micro_batches: int) -> Parts:
        grads = 4 * self.parameters // self.shards
        earlier = (4 * self.parameters if self.defers else grads) if micro_batches > 1 else 0
        unsharded = self._unsharded()
        matrix = 4 * self.sizes.vocabulary * self.sizes.hidden
        at_head = Parts(
            earlier, unsharded + self._casts_at_head(), tokens * self._saved_at_head(), 0, self._head_update(tokens)
        )
        in_blocks = Parts(
            earlier + (matrix if self.has_lm_head else 0),
            unsharded + self.casts(kept=True),
            tokens * (self._saved_at_head() + self._backward_of_block()),
        )
        at_embedding = Parts(
            max(earlier, grads) + matrix * (2 if self.sizes.tied and self.has_lm_head else 1), unsharded
        )
        at_optimizer = Parts(grads * (2 if self.is_sharded else 1))
        return max((at_head, in_blocks, at_embedding, at_optimizer), key=lambda parts: parts.total)

    def _saved_at_head(self) -> int:
        """Bytes per token that wait for the backward pass when it begins."""
        sizes, hidden = self.sizes, self.sizes.hidden
        last_norm = (8 if sizes.position_rows == 0 else 4) * hidden
        tail = last_norm + 8 * hidden + 8 * sizes.head_dim
        if self.checkpointing:
            return 4 * hidden * len(sizes.layers) + tail
        return sum(saved_by_layer(sizes, layer, self.width) for layer in sizes.layers) + tail

    def _backward_of_block(self) -> int:
        """Bytes per token for gradients inside one block and, where it is computed again, for what that saves."""
        sizes = self.sizes
        again = max(saved_by_layer(sizes, layer, self.width) for layer in sizes.layers) if self.checkpointing else 0
        return again + self.width * sizes.mlp * max(1, sizes.experts_per_token) + 8 * sizes.hidden

    def _casts_at_head(self) -> int:
        return 0 if self.checkpointing else self.casts(kept=True)

    def _unsharded(self, blocks: int = 2) -> int:
        """Whole parameters under FSDP: embedding, head and norms, and so many blocks at a time."""
        largest = max(self.width * (layer.attention + layer.mlp) + 4 * layer.experts for layer in self.sizes.layers)
        return self.outside_blocks + blocks * largest if self.is_sharded else 0

    def _head_update(self, tokens: int) -> int:
        """Chunks of logits and their gradients, and the gradient of the head's matrix."""
        if not self.has_lm_head:
            return 8 * tokens
        matrix, elements = self.sizes.vocabulary * self.sizes.hidden, self.logits_at_once(tokens)
        product = 4 * matrix if self.width == 4 else 6 * matrix
        return max(20 * elements, (12 + self.width) * elements + product) + 4 * matrix + self.head_cast()

    # -- forward passes --------------------------------------------------------------------------------------

    def gathered_at_head(self) -> int:
        return self.outside_blocks

    def gathered_in_block(self) -> int:
        return self._unsharded(1)

    def gathered_to_generate(self) -> int:
        """A whole copy for the duration of the call; linear layers of it in the precision of the products."""
        if not self.is_sharded:
            return super().gathered_to_generate()
        sizes = self.sizes
        if sizes.position_rows or sizes.experts_per_token:  # gpt2's layers and experts are no `nn.Linear`
            return 4 * self.parameters + super().casts(kept=True) + self.head_cast()
        separate_head = 0 if sizes.tied or not self.has_lm_head else sizes.vocabulary * sizes.hidden
        saved = (4 - self.width) * (sizes.cast + separate_head)
        return 4 * self.parameters - saved + (0 if separate_head else self.head_cast())
