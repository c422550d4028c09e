"""Attention in which common prefixes are computed once, compared with that of each sequence as a
whole, forward and backward."""

import pytest
import torch
from fake_flash_attn import varlen_function
from hypothesis import given
from hypothesis import strategies as st
from pretend_cuda import needs_pretend_device, pretend_cuda
from test_packed_attention import scorings
from test_shared_prefixes import always, packed, sequence_lists

from rlcli.ops.attention import Scoring, packed_attention
from rlcli.ops.flash_attention import LIBRARIES, FlashAttention
from rlcli.ops.prefix_attention import Copies, PrefixAttention
from rlcli.ops.shared_prefixes import shared_prefixes

CPU = torch.device("cpu")
TRIES = {
    "a group": [[1] * 30 + [2, 3], [1] * 30 + [3, 4], [1] * 30 + [4, 5, 6]],
    "two groups": [*([1] * 9 + [k] for k in range(3)), [2] * 30 + [7], [2] * 30 + [8, 9]],
    "turns": [[1, 2, 3, 4], [1, 2, 3, 5, 6, 7], [1, 2, 3, 5, 6, 8, 9], [1, 2, 9], [4, 4]],
    "beginnings of others": [[1, 2, 3], [1, 2], [1], [1, 2, 3], [1, 2, 3, 4]],
}


def prefixes_of(sequences):
    return shared_prefixes(packed(sequences), list(map(len, sequences)), always)


def states_of(prefixes, kv_heads, dtype=torch.float32):
    """Queries, keys and values of the rows that are computed."""
    torch.manual_seed(0)
    rows = len(prefixes.computed)
    return [torch.randn(1, heads, rows, 8).to(dtype) for heads in (4, kv_heads, kv_heads)]


def results(attend, states, weights):
    """The result for all tokens and the gradients of its product with `weights`, in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in states]
    out = attend(*leaves)
    (out * weights.to(out)).sum().backward()
    return [x.detach().cpu().double() for x in (out, *(leaf.grad for leaf in leaves))]


def shared(prefixes, states, scoring, weights, device=CPU, flash=None):
    attention = PrefixAttention(prefixes, device, flash)

    def attend(*leaves):
        return attention.gathered(attention.attend(*leaves, scoring)[0])

    return results(attend, [x.to(device) for x in states], weights)


def unshared(prefixes, states, scoring, weights):
    """Every sequence has its own copy of all of its rows."""
    attention = packed_attention(prefixes.lengths, CPU)

    def attend(*leaves):
        return attention.attend(*(x[:, :, prefixes.rows] for x in leaves), scoring)[0]

    return results(attend, states, weights)


@given(sequence_lists, st.sampled_from([1, 2, 4]), scorings)
def test_shared_prefixes_attend_as_whole_sequences_do(sequences, kv_heads, scoring):
    if (prefixes := prefixes_of(sequences)) is None:
        return
    states = states_of(prefixes, kv_heads)
    weights = torch.randn(len(prefixes.rows), 4, 8)
    expected = unshared(prefixes, states, scoring, weights)
    for mine, theirs in zip(shared(prefixes, states, scoring, weights), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@needs_pretend_device
@pytest.mark.parametrize("kernels", ["torch", *(library.name for library in LIBRARIES)])
@pytest.mark.parametrize(
    "scoring",
    [Scoring(), Scoring(scale=0.3, window=4), Scoring(softcap=1.5)],
    ids=["plain", "window", "capped"],
)
@pytest.mark.parametrize("name", TRIES)
def test_kernels_for_sequences_of_any_length_attend_to_shared_prefixes(name, scoring, kernels):
    prefixes = prefixes_of(TRIES[name])
    states = states_of(prefixes, 2, torch.bfloat16)
    weights = torch.randn(len(prefixes.rows), 4, 8).bfloat16()
    expected = unshared(prefixes, [x.double() for x in states], scoring, weights)
    (flash,) = [
        FlashAttention(library, varlen_function(library))
        for library in LIBRARIES
        if library.name == kernels
    ] or [None]
    with pretend_cuda() as device:
        computed = shared(prefixes, states, scoring, weights, device, flash)
    for mine, theirs in zip(computed, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=6e-2, rtol=3e-2)


@pytest.mark.parametrize("name", TRIES)
def test_nothing_is_computed_twice_with_the_same_past(name):
    prefixes = prefixes_of(TRIES[name])
    distinct = {tuple(s[: i + 1]) for s in TRIES[name] for i in range(len(s))}
    attention = PrefixAttention(prefixes, CPU)
    assert len(attention.mine(torch.arange(len(prefixes.rows)))) == len(distinct)
    assert not attention.is_padding.any()
    assert len(attention.is_padding) == len(distinct)


@given(st.lists(st.integers(0, 9), max_size=40))
def test_the_gradient_of_a_row_is_the_sum_over_its_copies(index):
    rows = torch.randn(10, 2, requires_grad=True)
    weights = torch.randn(len(index), 2)
    index = torch.tensor(index, dtype=torch.int64)
    copied = Copies(index, CPU).of(rows)
    assert torch.equal(copied, rows[index])
    (copied * weights).sum().backward()
    torch.testing.assert_close(rows.grad, torch.zeros(10, 2).index_add(0, index, weights))


def test_copies_are_grouped_by_how_often_their_row_occurs():
    groups = Copies(torch.tensor([0, 1, 2, 0, 1, 4, 0, 1]), CPU).groups
    assert [(rows.tolist(), places.tolist()) for rows, places in groups] == [
        ([2, 4], [[2, 5]]),
        ([0, 1], [[0, 1], [3, 4], [6, 7]]),
    ]
