"""Properties of SequenceSample for arbitrary batches: splitting and encoding are undone by their
inverses."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.data import MicroBatchSpec, SequenceSample, SequenceSplitSpec

DTYPES = (
    torch.int64,
    torch.bool,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.uint8,
)


@st.composite
def batches(draw, min_size=0):
    """Batches of any size; each key has its own lengths (0 included), dtype and trailing shape."""
    size = draw(st.integers(min_size, 6))
    keys = draw(st.lists(st.sampled_from(["x", "y", "packed_input_ids"]), min_size=1, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    seqlens, data = {}, {}
    for key in keys:
        inner = st.lists(st.integers(0, 4), max_size=3)
        seqlens[key] = draw(st.lists(inner, min_size=size, max_size=size))
        shape = (sum(map(sum, seqlens[key])), *draw(st.sampled_from([(), (2,), (2, 0)])))
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * 50
        data[key] = numbers.abs().to(draw(st.sampled_from(DTYPES)))
    return SequenceSample(
        ids=[f"row {i}" for i in range(size)],
        seqlens=seqlens,
        data=data if draw(st.booleans()) else {**data, keys[0]: None},
        metadata={"answer": [str(i) for i in range(size)]},
    )


def assert_same(left_sample, right_sample):
    assert left_sample.ids == right_sample.ids
    assert left_sample.keys == right_sample.keys
    for field in ("seqlens", "dtypes", "trailing_shapes", "metadata"):
        assert getattr(left_sample, field) == getattr(right_sample, field)
    assert (left_sample.data is None) == (right_sample.data is None)
    for key in left_sample.keys if left_sample.data is not None else ():
        left, right = left_sample.data[key], right_sample.data[key]
        assert (left is None) == (right is None)
        if left is not None:
            assert left.dtype == right.dtype
            assert torch.equal(left, right)
    return True


@given(batches(min_size=1), st.data())
def test_gather_undoes_split(sample, data):
    parts = sample.split(data.draw(st.integers(1, sample.bs)))
    assert assert_same(SequenceSample.gather(parts), sample)


@given(batches(min_size=1), st.data())
def test_gather_undoes_split_with_spec(sample, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, sample.bs - 1)))) if sample.bs > 1 else []
    spec = SequenceSplitSpec(partitions=list(zip([0, *cuts], [*cuts, sample.bs], strict=True)))
    parts = sample.split_with_spec(spec)
    assert [part.bs for part in parts] == spec.sizes
    assert assert_same(SequenceSample.gather(parts), sample)


@given(batches(min_size=1))
def test_gather_undoes_unpack(sample):
    parts = sample.unpack()
    assert [part.bs for part in parts] == [1] * sample.bs
    assert assert_same(SequenceSample.gather(parts), sample)


@given(batches(min_size=1), st.integers(12, 40), st.integers(1, 8))
def test_micro_batches_respect_the_cap_and_can_be_reassembled(sample, cap, n_mbs):
    parts, forward, backward = sample.split(MicroBatchSpec(n_mbs=n_mbs, max_tokens_per_mb=cap))
    counted = max(sample.keys, key=lambda key: sum(sample.flat_seqlens(key)))
    assert all(sum(part.flat_seqlens(counted)) <= cap for part in parts)
    assert len(parts) >= min(n_mbs, sample.bs)
    assert all(part.bs for part in parts)
    together = SequenceSample.gather(parts)
    assert together.ids == [sample.ids[i] for i in forward]
    assert assert_same(together.reorder(backward), sample)
    for key, tensor in sample.data.items():
        if tensor is not None:
            rows = torch.cat([part.data[key] for part in parts])
            back = SequenceSample.reorder_output(rows, sample.seqlens[key], forward, backward)
            assert torch.equal(back, tensor)


@given(batches(min_size=1), st.integers(12, 40))
def test_micro_batch_indices_are_sorted_and_select_its_samples(sample, cap):
    parts, groups = sample.split_to_micro_batches(MicroBatchSpec(max_tokens_per_mb=cap))
    assert groups == sorted(sorted(group) for group in groups)
    for micro_batch, group in zip(parts, groups, strict=True):
        assert assert_same(micro_batch, sample.select_indices(group))


@given(batches(), st.randoms(use_true_random=False))
def test_a_permutation_and_its_inverse_restore_the_sample(sample, random):
    order = list(range(sample.bs))
    random.shuffle(order)
    inverse = sorted(range(sample.bs), key=order.__getitem__)
    assert sample.reorder(order).metadata["answer"] == [str(i) for i in order]
    assert assert_same(sample.reorder(order).reorder(inverse), sample)


@given(batches(), st.data())
def test_selected_samples_equal_the_unpacked_ones(sample, data):
    chosen = data.draw(st.lists(st.integers(0, sample.bs - 1), unique=True)) if sample.bs else []
    selected, single = sample.select_indices(chosen), sample.unpack()
    assert selected.keys == sample.keys
    assert selected.dtypes == sample.dtypes
    assert selected.trailing_shapes == sample.trailing_shapes
    if chosen:
        assert assert_same(selected, SequenceSample.gather([single[i] for i in chosen]))
    assert assert_same(SequenceSample.from_json(selected.as_json()), selected)


@given(batches())
def test_json_restores_every_value_and_dtype(sample):
    for form in (sample, sample.meta()):
        text = json.dumps(form.as_json(), allow_nan=False)
        assert assert_same(SequenceSample.from_json(json.loads(text)), form)


def test_json_restores_infinities_nan_negative_zero_and_subnormals():
    numbers = torch.tensor([float("inf"), float("-inf"), -0.0, 1e-45, 3.4e38])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        odd = torch.cat([numbers, torch.tensor([float("nan")])]).to(dtype)
        sample = SequenceSample(ids=[7], seqlens={"x": [6]}, data={"x": odd})
        back = SequenceSample.from_json(
            json.loads(json.dumps(sample.as_json(), allow_nan=False))
        ).data["x"]
        assert back.dtype == dtype
        assert torch.equal(back[:5], odd[:5])
        assert torch.equal(back[:5].signbit(), odd[:5].signbit())
        assert back[5].isnan()


@given(batches(min_size=2), st.data())
def test_updating_with_the_remaining_keys_restores_the_sample(sample, data):
    chosen = data.draw(st.sets(st.sampled_from(sorted(sample.keys))))
    restored = sample.select(chosen)
    restored.update_(sample.select(sample.keys - chosen))
    assert assert_same(restored, sample)
