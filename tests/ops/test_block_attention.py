"""Attention block by block equals attention to all keys at once, forward and backward."""

import pytest
import torch
from attention_in_blocks import attended_in_blocks, expected_of, random_states
from hypothesis import given
from hypothesis import strategies as st
from pretend_cuda import needs_pretend_device, pretend_cuda
from torch.testing import assert_close

from rlcli.ops.attention import Scoring
from rlcli.ops.token_cut import TokenCut

cuts = st.builds(
    TokenCut, st.lists(st.integers(1, 24), min_size=1, max_size=6).map(tuple), st.integers(1, 4)
)
scorings = st.builds(
    Scoring,
    scale=st.sampled_from([None, 0.3]),
    window=st.none() | st.integers(1, 30),
    softcap=st.sampled_from([None, 1.5]),
)


@given(cuts, st.sampled_from([1, 2, 4]), scorings)
def test_blocks_equal_dense_attention_in_float64(cut, key_heads, scoring):
    *states, weights = random_states(cut, key_heads, torch.float64)
    actual = attended_in_blocks(states, weights, cut, scoring, torch.device("cpu"))
    for ours, theirs in zip(actual, expected_of(states, weights, cut, scoring), strict=True):
        assert_close(ours, theirs, atol=1e-12, rtol=1e-10)


def test_a_query_that_sees_nothing_gets_zeros_and_no_gradient():
    """A block outside the window, and padding."""
    cut = TokenCut((9, 2), 4)
    *states, weights = random_states(cut, 2, torch.float32)
    scoring = Scoring(window=1)
    out, *grads = attended_in_blocks(states, weights, cut, scoring, torch.device("cpu"))
    assert all(bool(x.isfinite().all()) for x in (out, *grads))
    assert_close(out, states[2].repeat_interleave(2, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@needs_pretend_device
def test_the_kernel_for_16_bits_gives_the_same_block_by_block(dtype, ranks):
    """On the pretend device, with an implementation of the kernel's interface for the host."""
    cut = TokenCut((17, 1, 6, 3), ranks)
    *states, weights = random_states(cut, 2, dtype)
    with pretend_cuda() as device:
        actual = attended_in_blocks(states, weights, cut, Scoring(scale=0.3), device, True)
    expected = expected_of(states, weights, cut, Scoring(scale=0.3))
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours.double(), theirs, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("scoring", [Scoring(scale=1.0), Scoring(scale=1.0, softcap=3.0)])
def test_states_of_16_bits_are_rounded_only_in_the_result(scoring):
    cut = TokenCut((40, 7), 2)
    *states, weights = random_states(cut, 2, torch.bfloat16)
    actual = attended_in_blocks(states, weights, cut, scoring, torch.device("cpu"))
    for ours, theirs in zip(actual, expected_of(states, weights, cut, scoring), strict=True):
        assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)
