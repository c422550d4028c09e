"""The memory of `fsdp` over dp, tp, cp and ep ranks. No torch here: `rlcli plan` imports it."""

from __future__ import annotations

from typing import ClassVar

from rlcli.api.memory import Kept, Parts, PlacedRole

from ._messages import of_fsdp, total
from ._training_memory import TrainingMemory


class FSDPMemory(TrainingMemory):
    """Parameters, gradients and optimizer state of one rank;
    the others' parameters while they are gathered."""

    dimensions: ClassVar[tuple[str, ...]] = ("dp", "tp", "cp", "ep")

    def __init__(self, role: PlacedRole):
        super().__init__(role)
        self.keeps_casts = role.mesh["tp"] == 1  # casts of parts of parameters are not kept
        ranks = role.mesh["dp"] * self.context
        self.is_sharded = ranks > 1
        self.shards = min(role.arguments.get("shard_size") or ranks, ranks)
        """Data- and context-parallel ranks that share one copy of the model."""
        self.expert_ranks = role.mesh.get("ep", 1)
        """Data- and context-parallel ranks among which the experts are divided."""
        self.has_muon = role.arguments.get("optimizer") == "muon"
        self.defers = self.is_sharded and bool(role.arguments.get("defer_reduction"))

    @property
    def in_blocks(self) -> int:
        """Parameters in the matrices of blocks, which Muon trains if it is chosen; their biases,
        which it does not, are few."""
        return sum(layer.parameters - layer.norms for layer in self.sizes.layers)

    @property
    def outside_blocks(self) -> int:
        """Bytes of embedding, head and norms, which stay gathered from the first block of a pass to
        its last."""
        return 4 * (self.parameters - self.in_blocks) if self.is_sharded else 0

    def in_iterations(self) -> int:
        """Bytes for making the largest matrix orthogonal: its momentum, whole, and four matrices in
        the precision of the products; of experts, those of a rank at once."""
        if not self.has_muon:
            return 0
        experts = max(layer.experts for layer in self.sizes.layers) // self.expert_ranks
        matrix = 2 * experts // 3 if experts else self.sizes.hidden * self.sizes.mlp
        ranks = 1 if experts else self.role.mesh["tp"]
        return ranks * matrix * (8 + 4 * self.width)

    def casts(self, are_kept: bool) -> int:
        """Sharded matrices are gathered in the precision of the products."""
        return 0 if self.is_sharded else super().casts(are_kept)

    def resident(self) -> Kept:
        moments = 8 * self.parameters - (4 * self.in_blocks if self.has_muon else 0)
        optimizer = moments // self.shards if self.trains else 0
        return Kept(4 * self.parameters // self.shards, optimizer=optimizer)

    def sent(self, tokens: int, micro_batches: int) -> dict[str, int]:
        return total(of_fsdp(self, tokens, micro_batches))

    def backward_of_block(self) -> int:
        is_divided = self.expert_ranks > 1  # rows and gradients that are sent or have arrived
        in_transit = 8 * self.sizes.hidden * self.sizes.experts_per_token if is_divided else 0
        return super().backward_of_block() + in_transit

    # -- update ------------------------------------------------------------------------------------

    def update(self, tokens: int, micro_batches: int) -> Parts:
        saved, in_block = self._activations(tokens)
        grads = 4 * self.parameters // self.shards
        earlier = (4 * self.parameters if self.defers else grads) if micro_batches > 1 else 0
        unsharded = self._unsharded()
        matrix = self.head_matrix
        at_head = Parts(
            earlier,
            unsharded + self.casts_at_head(),
            saved,
            0,
            self.head_update(self.slots(tokens)),
        )
        in_blocks = Parts(
            earlier + (matrix if self.has_lm_head else 0),
            unsharded + self.casts(are_kept=True),
            in_block,
        )
        at_embedding = Parts(
            max(earlier, grads) + matrix * (2 if self.sizes.tied and self.has_lm_head else 1),
            unsharded,
        )
        at_optimizer = Parts(grads * (2 if self.is_sharded else 1), self.in_iterations())
        return max((at_head, in_blocks, at_embedding, at_optimizer), key=lambda parts: parts.total)

    def _activations(self, tokens: int) -> tuple[int, int]:
        """Bytes at the head and in a block, for a micro-batch that context-parallel ranks share."""
        saved = self.slots(tokens) * self.saved_at_head()
        of_block = self.slots(tokens) * self.backward_of_block()
        return saved, saved + of_block + self.exchanged(tokens)

    def _unsharded(self, blocks: int = 2) -> int:
        """Gathered parameters under FSDP: embedding, head and norms,
        and those of `blocks` blocks."""
        largest = max(
            self.width * (layer.attention + layer.mlp + layer.shared)
            + 4 * layer.experts // self.expert_ranks
            for layer in self.sizes.layers
        )
        return self.outside_blocks + blocks * largest if self.is_sharded else 0

    # -- forward passes ----------------------------------------------------------------------------

    def gathered_at_head(self) -> int:
        """FSDP keeps the buffer in which the last block's parameters were gathered."""
        return self._unsharded(1)

    def gathered_in_block(self) -> int:
        return self._unsharded()

    @property
    def copies_to_generate(self) -> bool:
        return self.is_sharded

    def gathered_to_generate(self) -> int:
        """A whole copy for the duration of the call; its linear layers are in the precision of the
        products."""
        if not self.is_sharded:
            return super().gathered_to_generate()
        return self.whole_copy_to_generate()
