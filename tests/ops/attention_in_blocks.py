"""Attention block by block, and attention by its definition, on the same random states."""

import torch

from rlcli.ops.block_attention import Block, BlockAttention, BlockGradients
from rlcli.ops.packing import positions


def dense_attention(query, key, value, lengths, scoring):
    """[T, H, D] by the definition, all sequences under one mask."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = (
        q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
    )
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    weights = scores.masked_fill(~seen(lengths, scoring.window), -torch.inf).softmax(-1)
    return (weights @ v).transpose(0, 1)


def seen(lengths, window):
    """[T, T] bool: whether a query sees a key."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    causal = (sequence[:, None] == sequence[None]).tril()
    return causal if window is None else causal.triu(1 - window)


def blocks_of(cut, rank, device):
    places = positions(cut.lengths)[cut.tokens].to(device)
    return [
        Block(tuple(cut.pairs(rank, source)), places[rank], places[source], source == rank)
        for source in range(cut.ranks)
    ]


def attended_in_blocks(states, weights, cut, scoring, device, uses_kernel=False):
    """The result for all tokens, and the gradients of queries, keys and values: every rank of the
    cut computes its part, and starts with its own keys."""
    parts = [[x[tokens].to(device) for x in (*states, weights)] for tokens in cut.tokens]
    precise = torch.promote_types(states[0].dtype, torch.float32)
    grads = [[torch.zeros_like(x, dtype=precise) for x in part[:3]] for part in parts]
    settings = scoring, uses_kernel
    results = [attended_by(rank, parts, grads, cut, settings) for rank in range(cut.ranks)]
    of_ranks = (results, *zip(*grads, strict=True))
    return [torch.cat(of_each).cpu()[cut.slots] for of_each in of_ranks]


def attended_by(rank, parts, grads, cut, settings):
    """The result of a rank, which adds its share to the gradients of all."""
    blocks = blocks_of(cut, rank, parts[rank][0].device)
    order = [(rank - step) % cut.ranks for step in range(cut.ranks)]
    attention = BlockAttention(parts[rank][0], *settings)
    for source in order:
        attention.attend(*parts[source][1:3], blocks[source])
    gradients = gradients_of(attention, parts[rank], cut.filled[rank], settings)
    for source in order:
        shares = gradients.through(*parts[source][1:3], blocks[source])
        torch._foreach_add_(grads[source][1:], list(shares))
    grads[rank][0] = gradients.of_query
    return attention.out


def gradients_of(attention, of_rank, filled, settings):
    """With the gradient of a sum that is weighted, and does not count padding."""
    query, _, _, weight = of_rank
    grad = weight * filled.to(weight.device)[:, None, None]
    merged = attention.out, attention.normalizers
    return BlockGradients(grad, query, *merged, *settings)


def random_states(cut, key_heads, dtype):
    torch.manual_seed(0)
    total = sum(cut.lengths)
    heads = (4, key_heads, key_heads, 4)
    return [torch.randn(total, count, 8, dtype=torch.float64).to(dtype) for count in heads]


def expected_of(states, weights, cut, scoring):
    states = [x.double().requires_grad_() for x in states]
    out = dense_attention(*states, cut.lengths, scoring)
    (out * weights.double()).sum().backward()
    return [out.detach(), *(x.grad for x in states)]
