import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.ops.normalization import RunningMeanStd, group_moments, group_normalize, masked_normalize


def test_group_normalization_equals_that_worked_by_hand():
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.long)
    normalized = group_normalize(rewards, group)
    torch.testing.assert_close(normalized, torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=1e-4, rtol=0)
    torch.testing.assert_close(masked_normalize(rewards), normalized)


def test_group_moments_equal_those_worked_by_hand():
    """Of 1 and 5, of nothing, and of 2 alone; masked entries may be anything."""
    x = torch.tensor([1.0, float("nan"), 5.0, 2.0])
    group, mask = torch.tensor([0, 1, 0, 2]), torch.tensor([True, False, True, True])
    count, mean, variance = group_moments(x, group, mask)
    assert (count.tolist(), mean.tolist(), variance.tolist()) == ([2, 0, 1], [3, 0, 2], [4, 0, 0])


@given(
    st.lists(
        st.tuples(st.floats(-100, 100, width=32), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=20,
    )
)
def test_groups_are_normalized_independently(rows):
    x, group, mask = (list(column) for column in zip(*rows, strict=True))
    result = group_normalize(torch.tensor(x), torch.tensor(group), torch.tensor(mask))
    for i, g in enumerate(group):
        members = [v for v, h, m in zip(x, group, mask, strict=True) if h == g and m]
        expected = (
            (x[i] - statistics.fmean(members)) / (statistics.pstdev(members) + 1e-5)
            if mask[i]
            else 0.0
        )
        assert float(result[i]) == pytest.approx(expected, abs=1e-3)


def test_masked_entries_do_not_influence_the_others():
    x = torch.tensor([1.0, float("nan"), 3.0, float("inf")])
    mask = torch.tensor([True, False, True, False])
    for result in (
        masked_normalize(x, mask),
        group_normalize(x, torch.zeros(4, dtype=torch.long), mask),
    ):
        torch.testing.assert_close(result, torch.tensor([-1.0, 0.0, 1.0, 0.0]), atol=1e-4, rtol=0)


def test_statistics_cover_all_ranks():
    x = torch.tensor([1.0, 2.0, 5.0, -3.0, 4.0])
    halves = [x[:2], x[2:]]
    expected = masked_normalize(x)
    stage = {"n": 0}

    def all_reduce(value):  # plays the other rank, which holds halves[1]
        stage["n"] += 1
        remote = halves[1].double()
        if stage["n"] == 1:
            return value + torch.tensor([3.0, remote.sum()], dtype=torch.float64)
        return value + (remote - x.double().mean()).square().sum()

    torch.testing.assert_close(masked_normalize(halves[0], all_reduce=all_reduce), expected[:2])


def test_large_offsets_lose_no_precision():
    x = torch.tensor([1e6, 1e6 + 1, 1e6 + 2], dtype=torch.float64)
    expected = math.sqrt(1.5)
    torch.testing.assert_close(
        masked_normalize(x), torch.tensor([-expected, 0, expected]), atol=1e-4, rtol=0
    )


def test_an_empty_mask_gives_zeros():
    none = torch.zeros(2, dtype=torch.bool)
    assert masked_normalize(torch.tensor([1.0, 2.0]), none).tolist() == [0, 0]
    assert masked_normalize(torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize("kind", ["exp", "ma"])
def test_running_statistics_are_bias_corrected_and_survive_a_round_trip(kind):
    running = RunningMeanStd(kind, beta=0.9)
    x = torch.tensor([1.0, -2.0, 0.5])
    assert torch.equal(running.normalize(x), x), "nothing seen yet: identity"
    running.update(torch.tensor([4.0, 6.0, float("nan")]), torch.tensor([True, True, False]))
    assert running.mean == pytest.approx(5.0), "bias correction: the first batch counts in full"
    assert running.std == pytest.approx(1.0, abs=1e-4)
    torch.testing.assert_close(running.denormalize(running.normalize(x, clip=False)), x)
    assert float(running.normalize(torch.tensor(1000.0))) == RunningMeanStd.CLIP
    running.update(torch.tensor([8.0]))
    expected = (5 * 0.9 * 0.1 + 8 * 0.1) / (0.9 * 0.1 + 0.1) if kind == "exp" else 6.0
    assert running.mean == pytest.approx(expected)
    copy = RunningMeanStd(kind, beta=0.9)
    copy.load_state_dict(running.state_dict())
    assert (copy.mean, copy.std) == (running.mean, running.std)


def test_the_standard_deviation_has_a_floor():
    running = RunningMeanStd()
    running.update(torch.full((5,), 3.0))
    assert running.std == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["exp", "ma"])
def test_nonfinite_values_do_not_enter_running_statistics(kind, bad):
    running = RunningMeanStd(kind)
    running.update(torch.tensor([1.0, 3.0]))
    before = running.state_dict()
    running.update(torch.tensor([1.0, bad]))
    assert running.state_dict() == before
