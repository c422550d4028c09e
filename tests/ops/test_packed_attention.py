"""Attention over packs: each sequence as if it were alone, forward and backward, whatever the lengths."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from rlcli.ops.attention import CachedAttention, packed_attention
from rlcli.ops.packing import all_but_last, cumulative, positions, rectangles

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@given(lengths_lists)
def test_rectangles_hold_every_sequence_once_and_waste_little(lengths):
    groups = rectangles(lengths)
    assert sorted(i for members, _ in groups for i in members) == list(range(len(lengths)))
    for members, longest in groups:
        assert longest == max(lengths[i] for i in members)
        assert longest <= 8 or all(lengths[i] * 1.5 >= longest for i in members)


@given(lengths_lists, st.sampled_from([1, 2, 4]))
@settings(max_examples=25, deadline=None)
def test_a_pack_equals_its_sequences_alone(lengths, kv_heads):
    torch.manual_seed(0)
    total = sum(lengths)
    shapes = [(1, 4, total, 8), (1, kv_heads, total, 8), (1, kv_heads, total, 8)]
    packed = [torch.randn(shape, requires_grad=True) for shape in shapes]
    alone = [x.detach().clone().requires_grad_() for x in packed]
    out = packed_attention(lengths, torch.device("cpu")).attend(*packed, None)
    want = torch.cat(
        [
            scaled_dot_product_attention(*part, is_causal=True, enable_gqa=kv_heads != 4).transpose(1, 2)
            for part in zip(*(x.split(lengths, dim=2) for x in alone), strict=True)
        ],
        dim=1,
    )
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (want * weights).sum().backward()
    for a, b in zip(packed, alone, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


def test_one_new_token_sees_the_filled_slots_only():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    out = CachedAttention(torch.tensor([5, 3]), 5).attend(query, key, value, None)
    short = scaled_dot_product_attention(query[1:], key[1:, :, :3], value[1:, :, :3], enable_gqa=True)
    torch.testing.assert_close(out[1:], short.transpose(1, 2))
    key[1, :, 3:] = 99.0
    torch.testing.assert_close(CachedAttention(torch.tensor([5, 3]), 5).attend(query, key, value, None), out)


def test_index_arithmetic_by_hand():
    assert cumulative([2, 1, 3]).tolist() == [0, 2, 3, 6]
    assert positions([2, 1, 3]).tolist() == [0, 1, 0, 0, 1, 2]
    assert all_but_last([2, 1, 3]).tolist() == [0, 3, 4]
    assert all_but_last([]).tolist() == []
