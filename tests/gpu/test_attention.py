"""Attention over packed sequences on a GPU, by torch's kernels for sequences of any length
(FlashAttention) and by its fused kernels, equals attention by its definition in float64."""

from __future__ import annotations

import pytest
import torch
from attention_in_blocks import attended_in_blocks, expected_of, random_states
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlcli.ops.attention import CachedAttention, PackedAttention, Scoring, packed_attention
from rlcli.ops.flash_attention import flash_attention
from rlcli.ops.prefix_attention import Copies
from rlcli.ops.token_cut import TokenCut

LENGTHS = ((1, 1, 1), (128,), (5, 1, 300, 64, 33), (127, 128, 129))
SCORINGS = {
    "plain": Scoring(),
    "scaled": Scoring(scale=0.3),
    "window": Scoring(window=16),
    "window of one": Scoring(window=1),
}
HEADS, HEAD_DIM = 4, 64
NAMES = ("output", "query", "key", "value")
WITHIN = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}
"""Largest relative error of outputs and gradients, in the 2-norm: rounding of the dtype."""


def by_definition(query, key, value, lengths, scoring):
    """[1, T, H, D] in float64, by a mask over all pairs of tokens."""
    scale = HEAD_DIM**-0.5 if scoring.scale is None else scoring.scale
    return attended(query, key, value, visible(lengths, scoring.window), scale)


def visible(lengths, window):
    """[T, T] bool: whether a token of a pack sees another."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(owner))[:, None] - torch.arange(len(owner))
    seen = (owner[:, None] == owner) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def attended(query, key, value, seen, scale):
    """[1, T, H, D] in float64, of tensors [1, H, T, D]; keys and values may have fewer heads."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


def inputs(total, kv_heads, dtype):
    """Query, key, value on the CPU, with the rounding of `dtype`."""
    torch.manual_seed(0)
    shapes = [(1, heads, total, HEAD_DIM) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(shape).to(dtype).float() for shape in shapes]


def gradients(attend, tensors, weights):
    """(output, gradients of the sum of its products with `weights`), on the CPU in float64."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = attend(*leaves)
    (out * weights.to(out)).sum().backward()
    return [x.detach().cpu().double() for x in (out, *(leaf.grad for leaf in leaves))]


def assert_close(computed, exact, within):
    """Errors count relative to the entries' size, or to 1/4 where that is less: the gradient of a
    query that sees one key is 0, and a kernel's is the rounding of the output."""
    for name, approximate, reference in zip(NAMES, computed, exact, strict=False):
        scale = max(float(reference.norm()), reference.numel() ** 0.5 / 4)
        error = float((approximate - reference).norm()) / scale
        assert error <= within, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
def test_packed_attention_equals_its_definition(
    dtype, lengths, scoring, kv_heads, cuda, monkeypatch
):
    used = []
    varlen = PackedAttention._varlen
    monkeypatch.setattr(
        PackedAttention, "_varlen", lambda *args: used.append("varlen") or varlen(*args)
    )
    tensors = inputs(sum(lengths), kv_heads, dtype)
    weights = torch.randn(1, sum(lengths), HEADS, HEAD_DIM)
    exact = gradients(
        lambda *qkv: by_definition(*qkv, lengths, SCORINGS[scoring]), tensors, weights
    )
    on_gpu = [tensor.to(cuda, dtype) for tensor in tensors]
    attention = packed_attention(lengths, cuda)
    computed = gradients(lambda *qkv: attention.attend(*qkv, SCORINGS[scoring]), on_gpu, weights)
    assert_close(computed, exact, WITHIN[dtype])
    assert bool(used) == (dtype is not torch.float32), "16 bits use the kernel for packed sequences"


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_by_flash_attn_equals_its_definition(dtype, scoring, kv_heads, cuda):
    flash = flash_attention("auto", cuda, True, HEAD_DIM)
    if flash is None:
        pytest.skip("flash-attn is not installed for this device")
    lengths = LENGTHS[2]
    tensors = inputs(sum(lengths), kv_heads, dtype)
    weights = torch.randn(1, sum(lengths), HEADS, HEAD_DIM)
    exact = gradients(
        lambda *qkv: by_definition(*qkv, lengths, SCORINGS[scoring]), tensors, weights
    )
    on_gpu = [tensor.to(cuda, dtype) for tensor in tensors]
    attention = packed_attention(lengths, cuda, flash)
    computed = gradients(lambda *qkv: attention.attend(*qkv, SCORINGS[scoring]), on_gpu, weights)
    assert_close(computed, exact, WITHIN[dtype])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_in_blocks_equals_its_definition(dtype, ranks, cuda):
    """As the ranks of a ring attend: the kernel's results merge by their log-sum-exp."""
    cut, scoring = TokenCut(LENGTHS[2], ranks), Scoring(scale=0.3)
    *states, weights = random_states(cut, 2, dtype)
    computed = attended_in_blocks(states, weights, cut, scoring, cuda, uses_kernel=True)
    exact = expected_of(states, weights, cut, scoring)
    assert_close([part.double() for part in computed], exact, WITHIN[dtype])


def test_gradients_of_copied_rows_have_the_same_bits_each_time(cuda):
    """As those of a prefix that many sequences have: the order of addition must not change."""
    torch.manual_seed(0)
    index = torch.randint(0, 500, (20_000,))
    weights = torch.randn(len(index), HEADS, HEAD_DIM).to(cuda)

    def gradient():
        rows = torch.zeros(500, HEADS, HEAD_DIM, device=cuda, requires_grad=True)
        (Copies(index, cuda).of(rows) * weights).sum().backward()
        return rows.grad.cpu()

    first = gradient()
    assert all(torch.equal(gradient(), first) for _ in range(5))
    expected = torch.zeros(500, HEADS, HEAD_DIM, dtype=torch.float64)
    expected.index_add_(0, index, weights.cpu().double())
    torch.testing.assert_close(first.double(), expected, rtol=1e-5, atol=1e-4)


def test_packed_attention_takes_memory_in_proportion_to_its_tokens(cuda, device_name):
    """A mask or scores of all pairs of tokens would grow with their square."""
    if device_name == "cpu":
        pytest.skip("the emulated kernel holds all scores")
    short, long = (peak_of_attention(tokens, cuda) for tokens in (4096, 16384))
    assert long < 5 * short


def peak_of_attention(tokens, device):
    """Bytes on the device beyond its inputs, forward and backward."""
    tensors = [x.to(device, torch.bfloat16) for x in inputs(tokens, HEADS, torch.bfloat16)]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    packed_attention((tokens,), device).attend(*leaves, Scoring()).sum().backward()
    return torch.cuda.max_memory_allocated(device) - before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_a_new_token_attends_to_the_filled_slots_of_a_cache(window, dtype, cuda):
    torch.manual_seed(0)
    filled, longest = torch.tensor([1, 9, 64, 40]), 64
    query = torch.randn(len(filled), HEADS, 1, HEAD_DIM).to(dtype)
    key, value = torch.randn(2, len(filled), 2, longest, HEAD_DIM).to(dtype)
    seen = latest_slots(filled, longest, window or longest)
    exact = attended(query, key, value, seen, HEAD_DIM**-0.5)
    on_gpu = [tensor.to(cuda) for tensor in (query, key, value)]
    out = CachedAttention(filled.to(cuda), longest).attend(*on_gpu, Scoring(window=window))
    assert_close([out.cpu().double()], [exact], WITHIN[dtype])


def latest_slots(filled, longest, window):
    """[B, 1, 1, longest] bool: the last `window` filled slots of each row."""
    slots = torch.arange(longest)
    is_filled, is_recent = slots < filled[:, None], slots >= filled[:, None] - window
    return (is_filled & is_recent)[:, None, None]


def test_torchs_flash_attention_equals_the_definition(cuda, device_name):
    if device_name == "cpu":
        pytest.skip("there is no such kernel on an emulated device")
    lengths = (256,)
    query, key, value = inputs(256, HEADS, torch.bfloat16)
    exact = by_definition(query, key, value, lengths, Scoring())
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.to(cuda, torch.bfloat16) for x in (query, key, value)), is_causal=True
        )
    computed = out.transpose(1, 2).cpu().double()
    assert_close([computed], [exact], WITHIN[torch.bfloat16])
