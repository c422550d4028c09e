import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.checkpoint.tensor_dtypes import BYTES, cast, is_finite, raw_type
from rlcli.errors import ModelError

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _torch(raw, dtype):
    return torch.frombuffer(bytearray(raw.tobytes()), dtype=TORCH[dtype])


@given(
    source=st.sampled_from(sorted(TORCH)),
    target=st.sampled_from(sorted(TORCH)),
    numbers=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40),
)
def test_casts_of_any_bits_equal_those_of_torch(source, target, numbers):
    raw = np.array([n % 2 ** (8 * BYTES[source]) for n in numbers], raw_type(source))
    expected = _torch(raw, source).to(TORCH[target])
    fits = bool((~_torch(raw, source).isfinite() | expected.isfinite()).all())
    try:
        actual = _torch(cast(raw, source, target, "x"), target)
    except ModelError:
        assert not fits
        return
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[~actual.isnan()], expected[~actual.isnan()])


def test_every_bfloat16_survives_float32_and_back():
    raw = np.arange(2**16, dtype=np.uint16)
    back = cast(cast(raw, "BF16", "F32", "x"), "F32", "BF16", "x")
    numbers = _torch(raw, "BF16")
    assert (back == raw)[~numbers.isnan().numpy()].all()
    assert _torch(back, "BF16").isnan().equal(numbers.isnan())


@pytest.mark.parametrize("dtype", sorted(TORCH))
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_infinities_and_nan_are_detected(dtype, number):
    numbers = torch.tensor([1.0, number, -2.0], dtype=TORCH[dtype])
    raw = numbers.view(getattr(torch, f"int{8 * BYTES[dtype]}")).numpy().view(raw_type(dtype))
    assert not is_finite(raw, dtype)
    assert is_finite(raw[[0, 2]], dtype)


def test_a_number_beyond_the_range_of_the_dtype_is_refused():
    with pytest.raises(ModelError, match="too large"):
        cast(np.array([70000.0], np.float32).view(np.uint32), "F32", "F16", "x")
