"""What a rank sends in an update: formulas that follow the code of the engines, and that of the
libraries that they use. Tests compare them with the collectives of real processes. Not counted are
passes in which only the load of experts is counted, and messages of a few numbers. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._deepspeed_memory import DeepSpeedMemory
    from ._fsdp_memory import FSDPMemory
    from ._megatron_memory import MegatronMemory, Stage
    from ._memory import SharedTokens

Messages = Iterator[tuple[str, float]]
"""(kind of message, bytes)"""


def total(messages: Messages) -> dict[str, int]:
    """Kind of message → bytes."""
    totals: dict[str, float] = {}
    for kind, count in messages:
        totals[kind] = totals.get(kind, 0.0) + count
    return {kind: round(count) for kind, count in totals.items() if count}


def _times(count: int, *messages: Iterable[tuple[str, float]]) -> Messages:
    """Messages that are sent `count` times."""
    yield from ((kind, count * size) for kind, size in chain(*messages))


def _to_others(ranks: int) -> float:
    """The share of what ranks gather, reduce or exchange that each sends."""
    return (ranks - 1) / ranks


# -- tokens ----------------------------------------------------------------------------------------


def _of_context(memory: SharedTokens, tokens: int, layers: int, recomputes: bool) -> Messages:
    """Heads there and back (ulysses), or keys and values around the ring, and in its backward pass
    also their float32 gradients, which return to the rank that they are from; and log-probs."""
    if memory.context == 1:
        return
    method, attention = memory.method(tokens), memory.attention_of(tokens)
    vectors = memory.width * attention.sent_by(method) * (3 if recomputes else 2)
    if method == "ring":
        vectors += 4 * 2 * attention.key_heads * attention.tokens * attention.ranks
    kind = "all-to-all" if method == "ulysses" else "ring"
    yield kind, vectors * memory.sizes.head_dim * layers
    yield "all-gather", 4 * memory.slots(tokens) * (memory.context - 1)


def _of_experts(
    memory: SharedTokens, tokens: int, layers: int, recomputes: bool, ranks: int, width: int
) -> Messages:
    """Hidden states to the experts of `layers` layers and back, in the forward pass, its
    recomputation and the backward pass, if all experts get equally many."""
    rows = 2 * (3 if recomputes else 2) * layers * memory.sizes.experts_per_token
    numbers = memory.sizes.hidden * rows * memory.slots(tokens)
    yield "all-to-all", width * numbers * _to_others(ranks)


# -- fsdp ------------------------------------------------------------------------------------------


def of_fsdp(memory: FSDPMemory, tokens: int, micro_batches: int) -> Messages:
    """For micro-batches of `tokens` tokens."""
    yield from _of_sharded_parameters(memory, micro_batches)
    layers, recomputes = memory.sizes.layers, memory.checkpointing
    sparse = sum(layer.experts > 0 for layer in layers)
    yield from _times(
        micro_batches,
        [("all-reduce", _of_tensor_parallelism(memory, tokens))],
        _of_context(memory, tokens, len(layers), recomputes),
        _of_experts(memory, tokens, sparse, recomputes, memory.expert_ranks, 4),
    )


def _of_sharded_parameters(memory: FSDPMemory, micro_batches: int) -> Messages:
    """FSDP gathers blocks for the forward and again for the backward pass, the rest once for both;
    replicas of shards exchange their gradients once."""
    experts = sum(layer.experts for layer in memory.sizes.layers)
    matrices = sum(layer.attention + layer.mlp + layer.shared for layer in memory.sizes.layers)
    replicas = memory.role.mesh["dp"] * memory.context // memory.shards
    to_others, of_experts = _to_others(memory.shards), _of_expert_weights(memory, experts)
    of_blocks = to_others * memory.width * matrices + of_experts
    reduced = to_others * 4 * (memory.parameters - experts) + of_experts
    yield "all-gather", micro_batches * (2 * of_blocks + to_others * memory.outside_blocks)
    yield "reduce-scatter", (1 if memory.defers else micro_batches) * reduced
    yield "all-reduce", 2 * _to_others(replicas) * 4 * memory.parameters / memory.shards


def _of_expert_weights(memory: FSDPMemory, experts: int) -> float:
    """Bytes of a rank's experts, to those ranks that have the same ones."""
    if memory.expert_ranks == 1:
        return _to_others(memory.shards) * 4 * experts
    same = memory.role.mesh["dp"] * memory.context // memory.expert_ranks
    return _to_others(same) * 4 * experts / memory.expert_ranks


def _of_tensor_parallelism(memory: FSDPMemory, tokens: int) -> float:
    """Attention and MLP sum their outputs over ranks, and the gradients of their float32 inputs;
    so do the embedding and the head."""
    sums = 2 * memory.width * (2 if memory.checkpointing else 1) + 2 * 4
    per_token = memory.sizes.hidden * (sums * len(memory.sizes.layers) + 2 * 4)
    return 2 * _to_others(memory.role.mesh["tp"]) * memory.slots(tokens) * per_token


# -- deepspeed -------------------------------------------------------------------------------------


def of_deepspeed(memory: DeepSpeedMemory, micro_batches: int) -> Messages:
    """All numbers are float32. Up to stage 2, buckets of gradients are reduced whole, and each rank
    keeps its part; stage 2 does so after each micro-batch."""
    to_others = _to_others(memory.ranks)
    if memory.stage == 3:
        yield "all-gather", micro_batches * to_others * _gathered_by_stage_3(memory)
        yield "reduce-scatter", micro_batches * to_others * memory.unsharded
        return
    reductions = micro_batches if memory.stage == 2 else 1
    yield "all-reduce", reductions * 2 * to_others * memory.unsharded
    if memory.stage:
        yield "all-gather", to_others * memory.unsharded


def _gathered_by_stage_3(memory: DeepSpeedMemory) -> int:
    """Bytes of parameters that are gathered in a micro-batch: for the forward pass, and again for
    the backward pass unless they stay, as two buckets of them may; likewise in a block that is
    recomputed before its backward pass."""
    stay = 2 * memory.bucket
    gathered = 2 * memory.unsharded - min(memory.unsharded, stay)
    if memory.checkpointing:
        gathered += sum(max(0, 4 * layer.parameters - stay) for layer in memory.sizes.layers)
    return gathered


# -- megatron --------------------------------------------------------------------------------------


def of_megatron(memory: MegatronMemory, stage: Stage, tokens: int, micro_batches: int) -> Messages:
    """The same for a rank of a stage."""
    yield from _of_distributed_optimizer(memory, stage)
    layers, ranks = stage.layers, memory.expert_ranks
    sparse = sum(layer.experts > 0 for layer in layers)
    recomputes = memory.recomputed != "nothing"
    yield from _times(
        micro_batches,
        [
            ("all-reduce", _of_tensor_parallel_stage(memory, stage, tokens)),
            ("pipeline", _between_stages(memory, stage) * memory.slots(tokens)),
        ],
        _of_context(memory, tokens, len(layers), recomputes),
        _of_experts(memory, tokens, sparse, recomputes, ranks, memory.width),
    )


def _of_distributed_optimizer(memory: MegatronMemory, stage: Stage) -> Messages:
    """Ranks that hold the same parameters reduce float32 gradients once, and gather what each of
    them has updated. First and last stage sum the gradients of an embedding that both have."""
    others = stage.parameters - stage.experts
    of_experts = _to_others(memory.ranks // memory.expert_ranks) * stage.experts
    numbers = _to_others(memory.ranks) * others + of_experts
    yield "reduce-scatter", 4 * numbers
    yield "all-gather", memory.width * numbers
    is_shared = memory.sizes.tied and memory.role.head == "lm" and stage.is_first != stage.is_last
    yield "all-reduce", 4 * memory.sizes.vocabulary * memory.sizes.hidden if is_shared else 0


def _of_tensor_parallel_stage(memory: MegatronMemory, stage: Stage, tokens: int) -> float:
    """Each block sums the outputs of its attention, of its MLP or experts and of a shared expert,
    and the gradients of their inputs; what is recomputed is summed again, but attention only where
    whole blocks are. The embedding sums its output, the head its float32 gradient."""
    again_of_attention = memory.recomputed == "full"
    again_of_mlp = memory.recomputed != "nothing"
    sums = 0
    for layer in stage.layers:
        parts = 1 + (layer.shared > 0 and layer.experts > 0)
        sums += 2 + again_of_attention + parts * (2 + again_of_mlp)
    at_ends = memory.width * stage.is_first + 4 * (stage.is_last and memory.role.head == "lm")
    per_token = memory.sizes.hidden * (memory.width * sums + at_ends)
    return 2 * _to_others(memory.role.mesh["tp"]) * memory.slots(tokens) * per_token


def _between_stages(memory: MegatronMemory, stage: Stage) -> int:
    """Bytes per token: each chunk of a stage sends hidden states to the next one and gradients to
    the one before, except at the ends of the model."""
    chunks = memory.chunks
    messages = 2 * chunks - stage.is_first - stage.is_last
    return messages * memory.width * memory.sizes.hidden


def fullest(by_stage: Iterator[Mapping[str, int]]) -> Mapping[str, int]:
    """The messages of the stage that sends most."""
    return max(by_stage, key=lambda sent: sum(sent.values()))
