"""Deltas of tensors: the same bits come out, in few bytes, and what is damaged is refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlcli.ops.weight_delta import DIGEST_ROW, apply_delta, digest, encode_delta

BITS = arrays.arrays(np.int32, st.integers(0, 40), elements=st.integers(-(2**31), 2**31 - 1))


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.copy().view(np.float32))


@given(BITS, st.data())
def test_the_new_tensor_comes_out_bit_for_bit(bits, data):
    """Also for NaN, infinities and zeros of either sign."""
    others = data.draw(
        arrays.arrays(np.int32, len(bits), elements=st.integers(-(2**31), 2**31 - 1))
    )
    is_changed = data.draw(arrays.arrays(np.bool_, len(bits)))
    new = np.where(is_changed, others, bits)
    restored = apply_delta(floats(bits), encode_delta(floats(bits), floats(new)))
    assert restored.numpy().view(np.int32).tolist() == new.tolist()


def test_the_base_is_left_as_it_is():
    base, new = torch.zeros(100), torch.ones(100)
    apply_delta(base, encode_delta(base, new))
    assert not base.any()


@pytest.mark.parametrize(
    ("learning_rate", "most"), [(1e-6, 0.03), (1e-5, 0.10)], ids=["1e-6", "1e-5"]
)
def test_a_small_step_of_bfloat16_weights_takes_few_bytes(learning_rate, most):
    """A step of AdamW moves each weight by about the learning rate. The share is of the bytes of
    the bfloat16 tensor."""
    draws = torch.Generator().manual_seed(1)
    weights = 0.05 * torch.randn(400_000, generator=draws)
    step = learning_rate * torch.randn(400_000, generator=draws).tanh()
    old, new = (tensor.bfloat16().float() for tensor in (weights, weights - step))
    assert len(encode_delta(old, new)) <= most * 2 * len(weights)


@pytest.mark.parametrize("length", [0, 7, 16, -1])
def test_a_truncated_delta_is_refused(length):
    base, new = torch.zeros(1000), torch.arange(1000.0)
    delta = encode_delta(base, new)
    with pytest.raises(ValueError, match="a delta"):
        apply_delta(base, delta[:length])


def test_a_delta_of_another_size_is_refused():
    delta = encode_delta(torch.zeros(10), torch.ones(10))
    with pytest.raises(ValueError, match="10 elements for a tensor of 11"):
        apply_delta(torch.zeros(11), delta)


def test_a_changed_byte_is_refused_or_only_changes_elements():
    """Never another exception, nor another size: the digest of the message finds the rest."""
    base, new = torch.zeros(200), torch.arange(200.0)
    delta = bytearray(encode_delta(base, new))
    sizes = set()
    for position in range(len(delta)):
        delta[position] ^= 0x41
        with contextlib.suppress(ValueError):
            sizes.add(len(apply_delta(base, bytes(delta))))
        delta[position] ^= 0x41
    assert sizes <= {200}


@pytest.mark.parametrize("count", [0, 5, DIGEST_ROW - 1, DIGEST_ROW, 20_000])
def test_a_digest_weighs_each_number_by_its_position(count):
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count))
    bits = numbers.view(torch.int32).tolist()
    expected = [sum(bits), sum(row * number for row, number in enumerate(bits))]
    assert [part % 2**64 for part in digest(numbers)] == [part % 2**64 for part in expected]
    if count:
        moved = numbers.clone()
        moved[[1, 3]] = numbers[[3, 1]]
        assert digest(moved) != digest(numbers)
