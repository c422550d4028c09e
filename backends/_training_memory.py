"""The memory of training transformers models under `_engine.TransformersEngine`, where sharding
does not affect it.

Parameters, gradients and AdamW's two states are float32. No torch here:
`rlcli plan` imports this file.
"""

from __future__ import annotations

from typing import Any, ClassVar

from rlcli.api.memory import PlacedRole

from ._memory import InferenceMemory, head_backward, results_of_layer, saved_by_layer


class TrainingMemory(InferenceMemory):
    """The memory of activations and of the head in the backward pass."""

    holds_casts: ClassVar[bool] = False

    def __init__(self, role: PlacedRole):
        super().__init__(role)
        self.checkpointing = bool(role.arguments.get("gradient_checkpointing"))
        self.is_selective = (
            self.checkpointing and role.arguments.get("recompute", "full") == "selective"
        )
        self.offloads = bool(role.arguments.get("offload_activations")) and role.device != "cpu"
        """Whether the inputs of recomputed layers are in host memory."""
        self.trains = "train_step" in role.calls

    def savings(self) -> list[list[dict[str, Any]]]:
        if not self.trains:
            return []
        rungs: list[dict[str, Any]] = []
        if not self.checkpointing:
            layers = {"gradient_checkpointing": True}
            rungs = [{**layers, "recompute": "selective"}, layers]
        elif self.is_selective:
            rungs = [{"recompute": "full"}]
        if self.role.device != "cpu" and not self.offloads:
            full = rungs[-1] if rungs else {}
            rungs.append({**full, "offload_activations": True})
        return [rungs] if rungs else []

    @property
    def head_matrix(self) -> int:
        """Bytes of the gradient of the head's matrix."""
        return 4 * self.sizes.vocabulary * self.sizes.hidden

    def saved_at_head(self) -> int:
        """Bytes per token that wait for the backward pass when it begins."""
        sizes, hidden = self.sizes, self.sizes.hidden
        last_norm = (8 if sizes.position_rows == 0 else 4) * hidden
        tail = last_norm + 8 * hidden + 8 * sizes.head_dim
        inputs = 4 * hidden * len(sizes.layers)
        if not self.checkpointing or self.offloads:
            inputs = 0
        return sum(self._held_by_layers()) + inputs + tail

    def _saved_by_layers(self) -> list[int]:
        """Bytes per token that the backward pass of each block needs."""
        return [
            saved_by_layer(self.sizes, layer, self.width, self.in_attention)
            for layer in self.sizes.layers
        ]

    def _held_by_layers(self) -> list[int]:
        """What of it is held from the forward pass on; a recomputed block also holds its input."""
        if self.is_selective:
            return [
                results_of_layer(self.sizes, layer, self.width, self.in_attention)
                for layer in self.sizes.layers
            ]
        return [] if self.checkpointing else self._saved_by_layers()

    def backward_of_block(self) -> int:
        """Bytes per token for gradients inside one block and, with recomputation,
        for what it saves."""
        sizes = self.sizes
        again = 0
        if self.checkpointing:
            again = max(self._saved_by_layers()) - max(self._held_by_layers(), default=0)
        return again + self.width * sizes.mlp * max(1, sizes.experts_per_token) + 8 * sizes.hidden

    def casts_at_head(self) -> int:
        return 0 if self.checkpointing else self.casts(are_kept=True)

    def head_update(self, tokens: int) -> int:
        """Chunks of logits and their gradients, and the gradient of the head's matrix."""
        if not self.has_lm_head:
            return 8 * tokens
        matrix = self.sizes.vocabulary * self.sizes.hidden
        return head_backward(tokens, self.sizes.vocabulary, matrix, self.width) + self.head_cast()

    def whole_copy_to_generate(self) -> int:
        """A copy of sharded parameters for the duration of a call; its linear layers are in the
        precision of the products."""
        sizes = self.sizes
        # gpt2's layers and experts are not `nn.Linear`
        if sizes.position_rows or sizes.experts_per_token:
            return 4 * self.parameters + super().casts(are_kept=True) + self.head_cast()
        saved = (4 - self.width) * self.linear_parameters
        has_separate_head = self.has_lm_head and not sizes.tied
        return 4 * self.parameters - saved + (0 if has_separate_head else self.head_cast())
