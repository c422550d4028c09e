import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.ops.minibatches import assign_minibatches


def members(batch_index, *args):
    return [sorted(batch_index[place] for place in part) for part in assign_minibatches(batch_index, *args)]


@given(st.integers(0, 30), st.integers(1, 7), st.integers(0, 5), st.integers(1, 4))
def test_any_number_of_ranks_deals_the_same_minibatches(n, n_minibatches, seed, ranks):
    whole = members(list(range(n)), n_minibatches, seed, 0)
    assert sorted(i for part in whole for i in part) == list(range(n))
    assert max(map(len, whole)) - min(map(len, whole)) <= 1
    shares = [list(range(rank, n, ranks)) for rank in range(ranks)]
    dealt = [members(share, n_minibatches, seed, 0) for share in shares]
    assert [sorted(i for share in dealt for i in share[m]) for m in range(n_minibatches)] == whole


def test_order_within_a_minibatch_does_not_depend_on_the_order_given():
    forth, back = list(range(12)), list(range(11, -1, -1))
    a, b = assign_minibatches(forth, 3, 0), assign_minibatches(back, 3, 0)
    assert [[forth[i] for i in part] for part in a] == [[back[i] for i in part] for part in b]


def test_each_stratum_is_spread_over_all_minibatches_and_epochs_differ():
    parts = members(list(range(40)), 4, 0, 0)
    assert all([i // 4 for i in part] == list(range(10)) for part in parts)
    assert parts != members(list(range(40)), 4, 0, 1)
    assert parts != members(list(range(40)), 4, 1, 0)
    assert parts == members(list(range(40)), 4, 0, 0)


def test_more_minibatches_than_samples():
    parts = members([0, 1], 5, 3, 0)
    assert sorted(map(len, parts)) == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="at least 1"):
        assign_minibatches([0], 0, 0)
