"""Attention over packs: each sequence as if it were alone, forward and backward,
whatever the lengths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pretend_cuda import needs_pretend_device, pretend_cuda

from rlcli.ops import attention
from rlcli.ops.attention import CachedAttention, Scoring, packed_attention
from rlcli.ops.packing import all_but_last, cumulative, positions
from rlcli.ops.rectangles import rectangles

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=9)


@given(lengths_lists)
def test_rectangles_hold_every_sequence_once_with_little_padding(lengths):
    groups = rectangles(lengths)
    assert sorted(i for members, _ in groups for i in members) == list(range(len(lengths)))
    for members, longest in groups:
        assert longest == max(lengths[i] for i in members)
        assert longest <= 8 or all(lengths[i] * 1.5 >= longest for i in members)


def test_long_sequences_are_not_padded_as_short_ones_are():
    assert rectangles([20, 30]) == [([1, 0], 30)]
    assert rectangles([200, 300]) == [([1], 300), ([0], 200)]
    assert rectangles([296, 300]) == [([1], 300), ([0], 296)]
    assert rectangles([298, 0, 300]) == [([2, 0], 300)]


windows = st.none() | st.integers(1, 45)
scorings = st.builds(
    Scoring,
    scale=st.sampled_from([None, 0.3]),
    window=windows,
    softcap=st.sampled_from([None, 1.5]),
)


def plain_attention(query, key, value, scoring, first=0):
    """[1, T, H, D], one token at a time, by its definition.
    The queries' positions begin at `first`."""
    group = query.shape[1] // key.shape[1]
    key, value = (x[0].repeat_interleave(group, dim=0) for x in (key, value))  # [H, T, D]
    rows = []
    for position in range(first, first + query.shape[2]):
        begin = 0 if scoring.window is None else max(0, position + 1 - scoring.window)
        seen = slice(begin, position + 1)
        products = (query[0, :, position - first, None] * key[:, seen]).sum(-1)
        scores = products * (query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        rows.append((scores.softmax(-1)[..., None] * value[:, seen]).sum(1))
    return torch.stack(rows)[None]


@given(lengths_lists, st.sampled_from([1, 2, 4]), scorings)
def test_a_pack_gives_the_same_as_its_sequences_alone(lengths, kv_heads, scoring):
    torch.manual_seed(0)
    total = sum(lengths)
    shapes = [(1, 4, total, 8), (1, kv_heads, total, 8), (1, kv_heads, total, 8)]
    packed = [torch.randn(shape, requires_grad=True) for shape in shapes]
    alone = [x.detach().clone().requires_grad_() for x in packed]
    out = packed_attention(lengths, torch.device("cpu")).attend(*packed, scoring)
    parts = zip(*(x.split(lengths, dim=2) for x in alone), strict=True)
    want = torch.cat([plain_attention(*part, scoring) for part in parts], dim=1)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (want * weights).sum().backward()
    for a, b in zip(packed, alone, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 7, 8, 9, None])
def test_an_attention_window_includes_the_token_itself(window):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 8, 4)
    before = packed_attention([8], torch.device("cpu")).attend(
        query, key, value, Scoring(window=window)
    )
    key[:, :, 0] = 9.0
    after = packed_attention([8], torch.device("cpu")).attend(
        query, key, value, Scoring(window=window)
    )
    changed = (before != after).any(-1).any(-1)[0].nonzero()[:, 0].tolist()
    # the first token alone sees nothing else to weigh
    assert set(changed) <= set(range(min(window or 8, 8)))
    assert changed[-1:] == ([min(window or 8, 8) - 1] if window != 1 else [])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), scorings)
def test_a_new_token_attends_only_to_filled_slots_of_its_window(filled, scoring):
    torch.manual_seed(0)
    rows, longest = len(filled), max(filled)
    query, key, value = (
        torch.randn(rows, 4, 1, 8),
        torch.randn(rows, 2, longest, 8),
        torch.randn(rows, 2, longest, 8),
    )
    want = torch.cat(
        [
            plain_attention(
                query[i, None],
                key[i, None, :, :length],
                value[i, None, :, :length],
                scoring,
                first=length - 1,
            )
            for i, length in enumerate(filled)
        ]
    )
    for i, length in enumerate(filled):
        key[i, :, length:] = value[i, :, length:] = 99.0
    out = CachedAttention(torch.tensor(filled), longest).attend(query, key, value, scoring)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("scoring", [Scoring(), Scoring(window=40)])
def test_no_mask_is_made_for_a_window_that_covers_everything(scoring, monkeypatch):
    masks = []
    product = attention.scaled_dot_product_attention

    def recorded(*tensors, attn_mask, **others):
        masks.append(attn_mask)
        return product(*tensors, attn_mask=attn_mask, **others)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", recorded)
    query, key, value = torch.randn(3, 1, 2, 50, 4)
    packed_attention([10, 40], torch.device("cpu")).attend(query, key, value, scoring)
    assert masks == [None, None]


@pytest.mark.parametrize(("window", "before"), [(None, -1), (1, 0), (4, 3), (8, 7), (9, -1)])
def test_the_cuda_kernel_is_given_the_number_of_tokens_before_each(window, before, monkeypatch):
    """It runs on GPUs only; what it is asked for is (tokens before, tokens behind), -1 for all."""
    from torch.nn.attention import varlen

    asked = {}

    def recorded(query, *others, **settings):
        asked.update(settings)
        return query

    monkeypatch.setattr(varlen, "varlen_attn", recorded)
    tensors = torch.randn(3, 1, 2, 12, 4)
    packed_attention([9, 3], torch.device("cpu"))._varlen(*tensors, Scoring(window=window))
    assert asked == {"scale": None, "window_size": (before, 0), "enable_gqa": False}


@needs_pretend_device
def test_the_cuda_kernel_is_given_values_as_wide_as_keys(monkeypatch):
    """It takes no others; those of multi-head latent attention are narrower."""
    from torch.nn.attention import varlen

    def kernel(query, key, value, *bounds, **settings):
        assert value.shape == key.shape
        return value

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    query, key, value = torch.randn(3, 1, 2, 12, 4, dtype=torch.bfloat16)
    narrow = value[..., :3]
    with pretend_cuda() as device:
        states = (states.to(device) for states in (query, key, narrow))
        attended = packed_attention([9, 3], device).attend(*states, Scoring()).cpu()
    assert torch.equal(attended, narrow.transpose(1, 2))


def test_index_arithmetic_equals_that_worked_by_hand():
    assert cumulative([2, 1, 3]).tolist() == [0, 2, 3, 6]
    assert positions([2, 1, 3]).tolist() == [0, 1, 0, 0, 1, 2]
    assert all_but_last([2, 1, 3]).tolist() == [0, 3, 4]
    assert all_but_last([]).tolist() == []
