"""The memory of `megatron`: of one tensor-parallel part of its fullest pipeline stage.

Parameters and products have `dtype`, gradients and the optimizer's state are float32. Sequences are
packed, without padding. Activations are those that a test has counted on the CPU; CUDA's norms save
less. No torch here: `rlcli plan` imports this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

from rlcli.api.architecture import Architecture, TransformerBlock
from rlcli.api.memory import Kept, Parts, PlacedRole, UnknownMemory

from ._memory import SharedTokens, dense_width, head_backward, logits_at_once, part_of
from ._messages import fullest, of_megatron, total


@dataclass(frozen=True)
class Stage:
    """One tensor-parallel rank's part of a pipeline stage."""

    layers: tuple[TransformerBlock, ...]
    parameters: int
    experts: int
    """Parameters that belong to experts which ranks divide."""
    waiting: Fraction
    """Most micro-batches that have passed through it when their first backward pass starts here."""
    is_first: bool
    is_last: bool


def stages_of(sizes: Architecture, head: str, count: int, chunks: int) -> tuple[Stage, ...]:
    """`count` stages of equal numbers of blocks, each with `chunks` chunks. The first also has the
    embedding, the last the norm and the head, which is a copy of the embedding if they are tied and
    this is another stage."""
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
        waiting = _waiting(number, count, chunks)
        experts = sum(layer.experts for layer in layers)
        stages.append(Stage(layers, parameters, experts, waiting, number == 0, is_last))
    return tuple(stages)


def _waiting(number: int, stages: int, chunks: int) -> Fraction:
    """Micro-batches that wait in a stage. With virtual stages some wait in a few chunks only: they
    count as parts (https://arxiv.org/abs/2104.04473, section 2.2)."""
    if chunks == 1:
        return Fraction(stages - number)
    passes = 2 * (stages - number - 1) + (chunks - 1) * stages + 1
    return Fraction(passes, chunks)


def _share_of_experts(sizes: Architecture, ranks: int) -> Architecture:
    layers = tuple(replace(layer, experts=layer.experts // ranks) for layer in sizes.layers)
    return replace(sizes, layers=layers)


def _check(mesh: Mapping[str, int], architecture: Architecture) -> None:
    """Raises UnknownMemory for what the backend cannot run, or cannot be estimated."""
    others = [
        f"{name}{size}"
        for name, size in mesh.items()
        if size > 1 and name not in ("dp", "tp", "pp", "cp", "ep")
    ]
    if others:
        raise UnknownMemory(f"the memory of a mesh with {' '.join(others)} cannot be estimated yet")
    if architecture.position_rows or not architecture.gated:
        raise UnknownMemory(f"the backend megatron runs no model of type {architecture.model_type}")
    if len(architecture.layers) % mesh["pp"]:
        raise UnknownMemory(
            f"pp={mesh['pp']} does not divide the model's {len(architecture.layers)} layers"
        )


class MegatronMemory(SharedTokens):
    """Weights and the buffer of gradients of a stage; the optimizer's state divided over
    data-parallel ranks."""

    WITHIN_PERCENT: ClassVar[int] = 20

    def __init__(self, role: PlacedRole):
        super().__init__(role)
        mesh, architecture = role.mesh, role.architecture
        _check(mesh, architecture)
        self.expert_ranks = mesh["ep"]
        self.sizes = _share_of_experts(part_of(architecture, mesh["tp"]), self.expert_ranks)
        self.context = mesh["cp"]
        self.width = 4 if role.arguments.get("dtype") == "float32" else 2
        is_recomputed = bool(role.arguments.get("gradient_checkpointing"))
        self.recomputed = role.arguments.get("recompute", "full") if is_recomputed else "nothing"
        self.ranks = mesh["dp"] * mesh["cp"]
        """Ranks that divide the optimizer's state."""
        self.chunks = role.arguments.get("virtual_stages") or 1
        self.stages = stages_of(self.sizes, role.head, mesh["pp"], self.chunks)
        number = max(range(mesh["pp"]), key=lambda stage: self.stages[stage].parameters)
        self.largest = self.stages[number].parameters
        """Parameters of the fullest stage."""
        self.share = self._share(self.stages[number])
        chunks_of_all = stages_of(self.sizes, role.head, mesh["pp"] * self.chunks, 1)
        self.last_chunk = chunks_of_all[number - mesh["pp"]]
        """The chunk of the fullest stage that is loaded when all others are."""

    def savings(self) -> list[list[dict[str, Any]]]:
        is_trained = "train_step" in self.role.calls
        return (
            [[{"gradient_checkpointing": True}]]
            if is_trained and self.recomputed == "nothing"
            else []
        )

    def remarks(self) -> list[str]:
        remarks: list[str] = []
        if self.expert_ranks > 1:
            count = self.sizes.experts // self.expert_ranks
            remarks.append(f"each rank computes {count} of {self.sizes.experts} experts")
        return remarks

    # -- between calls -----------------------------------------------------------------------------

    def resident(self) -> Kept:
        """Bfloat16 parameters have a float32 copy in the optimizer. Everything but the moments
        exists before the first step, and also for a role that nothing trains."""
        masters = 4 if self.width == 2 else 0
        moments = 8 if "train_step" in self.role.calls else 0
        return Kept(
            weights=self.width * self.largest,
            optimizer=(masters + moments) * self.share,
            buffers=4 * self.largest,
        )

    def load(self) -> Parts:
        """Parameters are copied into their buffer, those of divided experts after the others; then
        the optimizer's copies are made."""
        experts = self.last_chunk.experts if self.expert_ranks > 1 else 0
        others = self.last_chunk.parameters - experts
        copies = max(self.width * others - 4 * experts, self.width * experts)
        masters = 4 * self.share if self.width == 2 else 0
        return Parts(gathered=max(copies, masters))

    def snapshot(self) -> int:
        """Weights and moments in float32, divided over data-parallel ranks."""
        return 12 * self.share

    def sent(self, tokens: int, micro_batches: int) -> Mapping[str, int]:
        return fullest(
            total(of_megatron(self, stage, tokens, micro_batches)) for stage in self.stages
        )

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
        exchanged, tokens = self.exchanged(tokens), self.slots(tokens)
        in_block = Parts(activations=tokens * self._passing_per_token() + exchanged)
        logits = logits_at_once(tokens, self.sizes.vocabulary) if self.role.head == "lm" else 0
        at_head = Parts(activations=tokens * 2 * self.width * self.sizes.hidden, logits=8 * logits)
        return max((in_block, at_head), key=lambda parts: parts.total)

    def _share(self, stage: Stage) -> int:
        """Parameters of which a rank has the optimizer's state: ranks that hold the same divide
        it."""
        others = stage.parameters - stage.experts
        return others // self.ranks + stage.experts * self.expert_ranks // self.ranks

    @property
    def _kept_per_parameter(self) -> float:
        return self.resident().total / self.largest

    def _updating(self, stage: Stage, tokens: int, micro_batches: int) -> Iterator[Parts]:
        """Where memory may be highest: at the head, in the last of the blocks, at the embedding,
        in the optimizer."""
        sizes, width = self.sizes, self.width
        matrix = sizes.vocabulary * sizes.hidden
        exchanged, tokens = self.exchanged(tokens), self.slots(tokens)
        waiting = min(Fraction(micro_batches), stage.waiting)
        saved = int(waiting * tokens * self._saved_by_stage(stage))
        if stage.is_last:
            yield Parts(activations=saved, logits=self._at_head(tokens, matrix))
        yield Parts(activations=saved + tokens * self._backward_of_block(stage) + exchanged)
        if stage.is_first:
            yield Parts(
                gradients=width * matrix, activations=saved - tokens * self._saved_by_stage(stage)
            )
        # what AdamW computes for all parameters at once
        yield Parts(gradients=4 * self._share(stage))

    def _at_head(self, tokens: int, matrix: int) -> int:
        """Chunks of logits and their gradients, and the gradient of the head's matrix."""
        if self.role.head != "lm":
            return 8 * tokens
        return head_backward(tokens, self.sizes.vocabulary, matrix, self.width)

    def _saved_by_stage(self, stage: Stage) -> int:
        """Bytes per token that wait for the backward pass of a micro-batch."""
        hidden, width = self.sizes.hidden, self.width
        of_blocks = map(self._kept_of, stage.layers)
        ends = 8 * hidden + 2 * width * hidden + 32 if stage.is_last else width * hidden
        angles = 4 * self.sizes.head_dim
        return sum(of_blocks) + ends + angles

    def _kept_of(self, block: TransformerBlock) -> int:
        """Bytes per token of a block, before its backward pass."""
        hidden, width = self.sizes.hidden, self.width
        if self.recomputed == "full":
            return width * hidden
        saved = self._saved_by(block)
        return saved - self._computed_again(block) if self.recomputed == "selective" else saved

    def _computed_again(self, block: TransformerBlock) -> int:
        """What attention and MLP compute from their inputs."""
        queries, keys = (n * self.sizes.head_dim for n in (self.sizes.heads, self.sizes.kv_heads))
        inputs = self.width * (2 * queries + 2 * keys)
        return self._saved_by_attention() - inputs + self._saved_by_mlp(block)

    def _saved_by(self, block: TransformerBlock) -> int:
        """Norms save their input and what they compute from it in float32, attention its inputs and
        its result."""
        sizes, width = self.sizes, self.width
        queries = sizes.heads * sizes.head_dim
        norms = 2 * (8 * sizes.hidden + 4)
        if sizes.qk_norm:
            norms += 8 * (queries + sizes.kv_heads * sizes.head_dim) + 4 * (
                sizes.heads + sizes.kv_heads
            )
        inputs = 2 * width * sizes.hidden
        return norms + inputs + self._saved_by_attention() + self._saved_by_mlp(block)

    def _saved_by_mlp(self, block: TransformerBlock) -> int:
        """A router computes in float32. Rows of tokens are sorted by expert, and again where they
        arrive."""
        sizes, width = self.sizes, self.width
        if not block.experts:
            return 5 * width * dense_width(sizes, block)
        router = (4 * sizes.hidden if width == 2 else 0) + 12 * sizes.experts
        row = width * (2 * sizes.hidden + 4 * sizes.mlp) + 32
        shared = 5 * width * (block.shared // (3 * sizes.hidden))
        return router + sizes.experts_per_token * row + shared

    def _saved_by_attention(self) -> int:
        """In float32 there is no kernel for fewer heads of keys than of queries: they are
        repeated."""
        sizes, width = self.sizes, self.width
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        is_repeated = width == 4 and queries != keys
        angles = 16 * sizes.head_dim if width == 4 else 0
        return width * ((5 if is_repeated else 3) * queries + 2 * keys) + 4 * sizes.heads + angles

    def _backward_of_block(self, stage: Stage) -> int:
        """Bytes per token for gradients in a block, beyond what it has saved;
        if it is recomputed, including that."""
        sizes, width = self.sizes, self.width
        block = stage.layers[-1]
        rows = max(1, sizes.experts_per_token) if block.experts else 1
        columns = sizes.mlp if block.experts else dense_width(sizes, block)
        mlp = rows * width * (2 * sizes.hidden + 4 * columns)
        queries = sizes.heads * sizes.head_dim
        attention = width * (4 * sizes.hidden + 4 * queries) - self._saved_by_mlp(block)
        between = 0 if stage.is_last else 4 * width * sizes.hidden
        return max(mlp, attention) + between + self._saved_by(block) - self._kept_of(block)

    def _passing_per_token(self) -> int:
        """Bytes per token that one block needs at once when nothing is saved."""
        sizes, width = self.sizes, self.width
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        attention = width * (3 * sizes.hidden + 8 * queries + 8 * keys)
        rows = max(1, sizes.experts_per_token)
        return max(attention, rows * width * (4 * sizes.hidden + 5 * sizes.mlp))
