"""What a rank of `fsdp` sends in an update: formulas that follow the code of its engine. Tests
compare them with the collectives of real processes. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._fsdp_memory import FSDPMemory


def messages_of_update(memory: FSDPMemory, tokens: int, micro_batches: int) -> dict[str, int]:
    """Kind of message → bytes, for micro-batches of `tokens` tokens."""
    of_parameters = _of_parameters(memory, micro_batches)
    of_each = {
        "all-reduce": _of_tensor_parallelism(memory, tokens),
        "all-to-all": _of_experts(memory, tokens),
    }
    if memory.context > 1:
        kind = "all-to-all" if memory.method(tokens) == "ulysses" else "ring"
        of_each[kind] = of_each.get(kind, 0.0) + _of_context(memory, tokens)
        # log-probs
        of_each["all-gather"] = 4 * memory.slots(tokens) * (memory.context - 1)
    totals = dict(of_parameters)
    for kind, count in of_each.items():
        totals[kind] = totals.get(kind, 0.0) + micro_batches * count
    return {kind: round(count) for kind, count in totals.items() if count}


def _to_others(ranks: int) -> float:
    """The share of what ranks gather, reduce or exchange that each sends."""
    return (ranks - 1) / ranks


def _of_parameters(memory: FSDPMemory, micro_batches: int) -> dict[str, float]:
    """FSDP gathers blocks for the forward and again for the backward pass, the rest once for both;
    replicas of shards exchange their gradients once."""
    experts = sum(layer.experts for layer in memory.sizes.layers)
    matrices = sum(layer.attention + layer.mlp + layer.shared for layer in memory.sizes.layers)
    replicas = memory.role.mesh["dp"] * memory.context // memory.shards
    to_others, of_experts = _to_others(memory.shards), _of_expert_weights(memory, experts)
    of_blocks = to_others * memory.width * matrices + of_experts
    reduced = to_others * 4 * (memory.parameters - experts) + of_experts
    return {
        "all-gather": micro_batches * (2 * of_blocks + to_others * memory.outside_blocks),
        "reduce-scatter": (1 if memory.defers else micro_batches) * reduced,
        "all-reduce": 2 * _to_others(replicas) * 4 * memory.parameters / memory.shards,
    }


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


def _of_context(memory: FSDPMemory, tokens: int) -> float:
    """Heads there and back (ulysses), or keys and values around the ring, and in its backward pass
    also their float32 gradients, which return to the rank that they are from."""
    method, attention = memory.method(tokens), memory.attention_of(tokens)
    vectors = memory.width * attention.sent_by(method) * (3 if memory.checkpointing else 2)
    if method == "ring":
        vectors += 4 * 2 * attention.key_heads * attention.tokens * attention.ranks
    return vectors * memory.sizes.head_dim * len(memory.sizes.layers)


def _of_experts(memory: FSDPMemory, tokens: int) -> float:
    """Hidden states to the experts and back, in the forward pass, its recomputation and the
    backward pass, if all experts get equally many."""
    sparse = sum(layer.experts > 0 for layer in memory.sizes.layers)
    passes = 3 if memory.checkpointing else 2
    rows = 2 * passes * sparse * memory.sizes.experts_per_token
    return 4 * memory.sizes.hidden * rows * memory.slots(tokens) * _to_others(memory.expert_ranks)
