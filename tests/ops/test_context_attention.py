"""Attention over tokens that are spread over ranks equals that of a single rank."""

from itertools import product

import pytest
import torch
from pretend_cuda import needs_pretend_device, pretend_cuda
from torch.testing import assert_close

from rlcli.ops.attention import Scoring, packed_attention
from rlcli.ops.context_attention import ContextAttention
from rlcli.ops.context_choice import AttentionSizes
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks

CPU = torch.device("cpu")
LENGTHS = (17, 1, 6, 3)
PACKS = [LENGTHS, (1,), (2, 1), (4, 4, 4)]
"""Ranks get one token, or none."""
SCORINGS = [Scoring(), Scoring(scale=0.3, window=3), Scoring(softcap=1.5), Scoring(None, 2, 0.7)]
KEY_HEADS = (1, 2, 4)
ALL_CASES = [*product(PACKS, SCORINGS, KEY_HEADS)]
PAIRED_CASES = [
    (lengths, scoring, KEY_HEADS[(i + j) % len(KEY_HEADS)])
    for (i, lengths), (j, scoring) in product(enumerate(PACKS), enumerate(SCORINGS))
]
"""Every two of a pack, a scoring and a number of key heads meet."""


def states_of(lengths, heads, key_heads, dtype=torch.float64):
    torch.manual_seed(0)
    counts = (heads, key_heads, key_heads)
    return [
        torch.randn(1, count, sum(lengths), 8, dtype=torch.float64).to(dtype) for count in counts
    ]


def on_one_rank(states, lengths, scoring, weights):
    states = [x.clone().requires_grad_() for x in states]
    out = packed_attention(lengths, CPU).attend(*states, scoring)
    (out * weights).sum().backward()
    return out.detach(), [x.grad for x in states]


def on_this_rank(states, weights, share, scoring):
    """The whole result, and this rank's share of the gradients: zero for tokens of others."""
    device = share.device
    states = [x.to(device).requires_grad_() for x in states]
    mine = [share.mine(x[0].transpose(0, 1)).transpose(0, 1)[None] for x in states]
    out = share.gathered(share.attend(*mine, scoring)[0])[None]
    (out * weights.to(device)).sum().backward()
    return out.detach(), [x.grad for x in states]


def group_of_all():
    return mesh_of_ranks(cp=torch.distributed.get_world_size())["cp"].get_group()


@pytest.mark.parametrize(
    "cases", [PAIRED_CASES, pytest.param(ALL_CASES, marks=pytest.mark.exhaustive)], ids=len
)
@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("choice", ["ulysses", "ring"])
def test_ranks_attend_like_one_forward_and_backward(choice, ranks, cases):
    def work(rank):
        group = group_of_all()
        return {
            f"{lengths} {scoring} {key_heads}": largest_error(
                ContextAttention(lengths, CPU, group, choice), scoring, key_heads
            )
            for lengths, scoring, key_heads in cases
        }

    for errors in run_on_ranks(ranks, work):
        assert max(errors.values()) < 1e-5, errors


def largest_error(share, scoring, key_heads):
    """Of the results and the gradients, relative to 12 query heads on one rank."""
    states = states_of(share.lengths, 12, key_heads)
    weights = torch.randn(1, sum(share.lengths), 12, 8, dtype=torch.float64)
    expected, grads = on_one_rank(states, share.lengths, scoring, weights)
    out, mine = on_this_rank(states, weights, share, scoring)
    for grad in mine:
        torch.distributed.all_reduce(grad)
    return max(
        float((ours - theirs).abs().max())
        for ours, theirs in zip((out, *mine), (expected, *grads), strict=True)
    )


@pytest.mark.parametrize("choice", ["ulysses", "ring"])
def test_values_may_be_narrower_than_keys(choice):
    """As in multi-head latent attention."""

    def work(rank):
        query, key, value = states_of(LENGTHS, 4, 2)
        states, weights = (query, key, value[..., :5]), torch.randn(1, sum(LENGTHS), 4, 5)
        expected, grads = on_one_rank(states, LENGTHS, Scoring(), weights)
        share = ContextAttention(LENGTHS, CPU, group_of_all(), choice)
        out, mine = on_this_rank(states, weights, share, Scoring())
        assert_close(out, expected)
        for ours, theirs in zip(mine, grads, strict=True):
            torch.distributed.all_reduce(ours)
            assert_close(ours, theirs)
        return {}

    run_on_ranks(2, work)


@pytest.mark.parametrize("choice", ["ulysses", "ring"])
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(window=3)], ids=["all", "window"])
@needs_pretend_device
def test_ranks_with_16_bits_on_a_device_attend_like_one(choice, scoring):
    """On the pretend device: the paths of CUDA, with kernels for the host."""

    def work(rank):
        states = states_of(LENGTHS, 4, 2, torch.bfloat16)
        weights = torch.randn(1, sum(LENGTHS), 4, 8)
        expected, grads = on_one_rank([x.float() for x in states], LENGTHS, scoring, weights)
        with pretend_cuda() as device:
            share = ContextAttention(LENGTHS, device, group_of_all(), choice)
            out, mine = on_this_rank(states, weights, share, scoring)
            out, *mine = (x.float().cpu() for x in (out, *mine))
        for grad in mine:
            torch.distributed.all_reduce(grad)
        assert_close(out, expected, atol=3e-2, rtol=3e-2)
        for ours, theirs in zip(mine, grads, strict=True):
            assert_close(ours, theirs, atol=6e-2, rtol=6e-2)
        return {}

    run_on_ranks(2, work)


@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        (AttentionSizes(32, 8, 8, 1024), "ulysses"),
        (AttentionSizes(28, 4, 8, 1024), "ring"),  # 28 heads cannot be divided
        (AttentionSizes(32, 8, 2, 16384), "ring"),  # sends 16 vectors a token, Ulysses 40
        (AttentionSizes(32, 8, 2, 1024), "ulysses"),  # too short to hide them
        (AttentionSizes(32, 8, 2, 16384, has_window=True), "ulysses"),
        (AttentionSizes(32, 32, 8, 16384), "ulysses"),  # a ring would send four times as much
    ],
)
def test_the_method_follows_from_heads_ranks_and_length(sizes, method):
    assert sizes.method == method


def test_messages_are_those_of_the_method():
    """Counted by hand for 4 heads, 2 key heads, 4 ranks with 5 slots: Ulysses keeps a quarter."""
    sizes = AttentionSizes(4, 2, 4, 5)
    assert sizes.sent_by("ulysses") == (4 + 4 + 4 + 4) * 5 * 3 // 4
    assert sizes.sent_by("ring") == (2 + 2) * 5 * 3
