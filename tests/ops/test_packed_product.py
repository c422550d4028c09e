"""Products with packed weights."""

import pytest
import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from rlcli.ops.logprobs import OutputHead
from rlcli.ops.packed_product import can_pack, packed, product

CPU = torch.device("cpu")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_same_with_packed_weights_except_for_rounding(dtype, rows, has_bias):
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN does not multiply {dtype} on this processor")
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, 1, 96), (80, 96), (80,))
    )
    bias = bias if has_bias else None
    expected = product(x.double(), weight.double(), None if bias is None else bias.double())
    actual = product(x, packed(weight), bias)
    assert actual.dtype is dtype
    within = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(actual.double(), expected, atol=within, rtol=within / 10)


def test_a_row_does_not_depend_on_the_other_rows():
    weight, x = packed(torch.randn(80, 96)), torch.randn(16, 96)
    others = torch.cat([x[:1], torch.randn(15, 96)])
    assert torch.equal(product(x, weight)[0], product(others, weight)[0])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_single_row_is_multiplied_block_by_block_where_there_are_threads(
    threads, has_bias, monkeypatch
):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x, weight, bias = torch.randn(1, 1, 96), torch.randn(4096, 96), torch.randn(4096)
    bias = bias if has_bias else None
    with FlopCounterMode(display=False) as counter:
        actual = product(x, weight, bias)
    assert ("bmm" in str(counter.get_flop_counts())) == (threads > 1)
    torch.testing.assert_close(actual, linear(x, weight, bias))


def test_a_head_may_be_packed():
    hidden, weight = torch.randn(3, 32), torch.randn(50, 32)
    plain, with_packed = (
        OutputHead(matrix, scale=0.5, softcap=20.0, temperature=0.7).logits(hidden, torch.float32)
        for matrix in (weight, packed(weight))
    )
    torch.testing.assert_close(with_packed, plain)


def test_only_a_cpu_packs():
    assert can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float64)
