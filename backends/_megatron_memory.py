"""The memory of `megatron`: of one tensor-parallel part of its fullest pipeline stage.

Parameters and products have `dtype`, gradients and the optimizer's state are float32. Attention
holds the scores of a sequence's tokens with each other, so memory grows with tokens times the
longest sequence. A plan for the longest sequences has no padding. Activations are those that a test
has counted on the CPU; CUDA's norms save less. No torch here: `rlcli plan` imports this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rlcli.api.architecture import Architecture, TransformerBlock
from rlcli.api.memory import Kept, MemoryModel, Parts, PlacedRole, UnknownMemory

from ._memory import logits_at_once, part_of


@dataclass(frozen=True)
class Stage:
    """One tensor-parallel rank's part of a pipeline stage."""

    layers: tuple[TransformerBlock, ...]
    parameters: int
    waiting: int
    """Most micro-batches that have passed through it when their first backward pass starts here."""
    is_first: bool
    is_last: bool


def stages_of(sizes: Architecture, head: str, count: int) -> tuple[Stage, ...]:
    """`count` stages of equal numbers of blocks. The first also has the embedding, the last the
    norm and the head, which is a copy of the embedding if they are tied and this is another
    stage."""
    each, matrix = len(sizes.layers) // count, sizes.vocabulary * sizes.hidden
    stages = []
    for number in range(count):
        layers, is_last = sizes.layers[number * each : (number + 1) * each], number == count - 1
        parameters = sum(layer.parameters for layer in layers)
        if number == 0:
            parameters += matrix
        if is_last and head == "value":
            parameters += sizes.final_norm + sizes.hidden + 1
        elif is_last:
            parameters += sizes.final_norm + (0 if sizes.tied and number == 0 else matrix)
        stages.append(Stage(layers, parameters, count - number, number == 0, is_last))
    return tuple(stages)


class MegatronMemory(MemoryModel):
    """Weights and the buffer of gradients of a stage; the optimizer's state divided over
    data-parallel ranks."""

    WITHIN_PERCENT: ClassVar[int] = 20

    def __init__(self, role: PlacedRole):
        super().__init__(role)
        mesh, architecture = role.mesh, role.architecture
        others = [
            f"{name}{size}"
            for name, size in mesh.items()
            if size > 1 and name not in ("dp", "tp", "pp")
        ]
        if others:
            raise UnknownMemory(
                f"the memory of a mesh with {' '.join(others)} cannot be estimated yet"
            )
        if architecture.position_rows or architecture.experts_per_token or not architecture.gated:
            raise UnknownMemory(
                f"the backend megatron runs no model of type {architecture.model_type}"
            )
        if len(architecture.layers) % mesh["pp"]:
            raise UnknownMemory(
                f"pp={mesh['pp']} does not divide the model's {len(architecture.layers)} layers"
            )
        self.sizes = part_of(architecture, mesh["tp"])
        self.width = 4 if role.arguments.get("dtype") == "float32" else 2
        """Bytes of a parameter, and of a number in matrix products;
        `auto` is treated as bfloat16."""
        self.recomputes = bool(role.arguments.get("gradient_checkpointing"))
        self.ranks = mesh["dp"]
        self.stages = stages_of(self.sizes, role.head, mesh["pp"])
        self.largest = max(self.stages, key=lambda stage: stage.parameters).parameters
        """Parameters of the fullest stage."""

    def savings(self) -> list[list[dict[str, Any]]]:
        is_trained = "train_step" in self.role.calls
        return [[{"gradient_checkpointing": True}]] if is_trained and not self.recomputes else []

    def remarks(self) -> list[str]:
        longest = self.role.longest
        scores = self._scores_saved_per_token() * longest >> 20
        return [
            (
                f"its attention is quadratic in memory: {scores} MiB per layer for the "
                f"scores of a sequence of {longest} tokens with each other, four times as "
                "much for twice the length"
            )
        ]

    # -- between calls -----------------------------------------------------------------------------

    def resident(self) -> Kept:
        """Bfloat16 parameters have a float32 copy in the optimizer. Everything but the moments
        exists before the first step, and also for a role that nothing trains."""
        masters = 4 if self.width == 2 else 0
        moments = 8 if "train_step" in self.role.calls else 0
        return Kept(
            weights=self.width * self.largest,
            optimizer=(masters + moments) * self.largest // self.ranks,
            buffers=4 * self.largest,
        )

    def load(self) -> Parts:
        """Parameters are copied into their buffer; then the optimizer's copies are made."""
        masters = 4 * self.largest // self.ranks if self.width == 2 else 0
        return Parts(gathered=max(self.width * self.largest, masters))

    def snapshot(self) -> int:
        """Weights and moments in float32, divided over data-parallel ranks."""
        return 12 * self.largest // self.ranks

    # -- passes ------------------------------------------------------------------------------------

    def update(self, tokens: int, micro_batches: int) -> Parts:
        def memory(stage_and_parts: tuple[Stage, Parts]) -> float:
            stage, parts = stage_and_parts
            return stage.parameters * self._kept_per_parameter + parts.total

        candidates = (
            (stage, parts)
            for stage in self.stages
            for parts in self._updating(stage, tokens, micro_batches)
        )
        return max(candidates, key=memory)[1]

    def inference(self, tokens: int) -> Parts:
        in_block = Parts(
            activations=tokens * (self._scores_kept_for_attention + self._passing_per_token())
        )
        logits = logits_at_once(tokens, self.sizes.vocabulary) if self.role.head == "lm" else 0
        at_head = Parts(activations=tokens * 2 * self.width * self.sizes.hidden, logits=8 * logits)
        return max((in_block, at_head), key=lambda parts: parts.total)

    @property
    def _kept_per_parameter(self) -> float:
        return self.resident().total / self.largest

    def _updating(self, stage: Stage, tokens: int, micro_batches: int) -> Iterator[Parts]:
        """Where memory may be highest: at the head, in the last of the blocks, at the embedding,
        in the optimizer."""
        sizes, width = self.sizes, self.width
        matrix = sizes.vocabulary * sizes.hidden
        waiting = min(micro_batches, stage.waiting)
        saved = (
            waiting * tokens * self._saved_by_stage(stage)
            + tokens * self._scores_kept_for_attention
        )
        if stage.is_last:
            yield Parts(activations=saved, logits=self._at_head(tokens, matrix))
        yield Parts(activations=saved + tokens * self._backward_of_block(stage))
        if stage.is_first:
            yield Parts(
                gradients=width * matrix, activations=saved - tokens * self._saved_by_stage(stage)
            )
        # what AdamW computes for all parameters at once
        yield Parts(gradients=4 * stage.parameters // self.ranks)

    def _at_head(self, tokens: int, matrix: int) -> int:
        """Chunks of logits and their gradients, and the gradient of the head's matrix."""
        if self.role.head != "lm":
            return 8 * tokens
        elements = logits_at_once(tokens, self.sizes.vocabulary)
        product = 4 * matrix if self.width == 4 else 6 * matrix
        return max(20 * elements, (12 + self.width) * elements + product) + 4 * matrix

    def _saved_by_stage(self, stage: Stage) -> int:
        """Bytes per token that wait for the backward pass of a micro-batch."""
        hidden, width = self.sizes.hidden, self.width
        each = width * hidden if self.recomputes else self._saved_by_block()
        ends = 8 * hidden + 2 * width * hidden + 32 if stage.is_last else width * hidden
        return each * len(stage.layers) + ends

    def _saved_by_block(self) -> int:
        """Norms save their input and what they compute from it in float32,
        attention the scores after softmax."""
        sizes, width = self.sizes, self.width
        queries = sizes.heads * sizes.head_dim
        norms = 2 * (8 * sizes.hidden + 4)
        if sizes.qk_norm:
            norms += 8 * (queries + sizes.kv_heads * sizes.head_dim) + 4 * (
                sizes.heads + sizes.kv_heads
            )
        scores = self._scores_saved_per_token()
        return (
            norms + 2 * width * sizes.hidden + 4 * width * queries + scores + 5 * width * sizes.mlp
        )

    def _scores_saved_per_token(self) -> int:
        return (4 if self.width == 4 else 6) * self.sizes.heads * self.role.longest

    def _backward_of_block(self, stage: Stage) -> int:
        """Bytes per token for gradients in a block, beyond what it has saved;
        if it is recomputed, including that."""
        sizes, width = self.sizes, self.width
        mlp = width * (2 * sizes.hidden + 4 * sizes.mlp)
        scores = (8 + width if width == 4 else 12 + width) * sizes.heads * self.role.longest
        attention = (
            width * (4 * sizes.hidden + 4 * sizes.heads * sizes.head_dim)
            + scores
            - 5 * width * sizes.mlp
        )
        between = 0 if stage.is_last else 4 * width * sizes.hidden
        return max(mlp, attention) + between + (self._saved_by_block() if self.recomputes else 0)

    @property
    def _scores_kept_for_attention(self) -> int:
        """Bytes per token of the memory that attention multiplies into;
        it is kept until a pass ends."""
        return self.width * self.sizes.heads * self.role.longest

    def _passing_per_token(self) -> int:
        """Bytes per token that one block needs at once when nothing is saved."""
        sizes, width = self.sizes, self.width
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        scores = (8 if width == 4 else 8 + width) * sizes.heads * self.role.longest
        attention = width * (3 * sizes.hidden + 8 * queries + 8 * keys) + scores
        return max(attention, width * (4 * sizes.hidden + 5 * sizes.mlp))
