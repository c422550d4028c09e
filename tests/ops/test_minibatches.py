import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.ops.minibatches import assign_minibatches


def members(batch_index, *args):
    return [
        sorted(batch_index[index] for index in minibatch)
        for minibatch in assign_minibatches(batch_index, *args)
    ]


@given(st.integers(0, 30), st.integers(1, 7), st.integers(0, 5), st.integers(1, 4))
def test_minibatches_do_not_depend_on_the_number_of_ranks(n, n_minibatches, seed, ranks):
    expected = members(list(range(n)), n_minibatches, seed, 0)
    assert sorted(i for minibatch in expected for i in minibatch) == list(range(n))
    assert max(map(len, expected)) - min(map(len, expected)) <= 1
    shares = [list(range(rank, n, ranks)) for rank in range(ranks)]
    dealt = [members(share, n_minibatches, seed, 0) for share in shares]
    assert [
        sorted(i for share in dealt for i in share[m]) for m in range(n_minibatches)
    ] == expected


def test_the_order_within_a_minibatch_does_not_depend_on_that_of_the_batch():
    forth, back = list(range(12)), list(range(11, -1, -1))
    a, b = assign_minibatches(forth, 3, 0), assign_minibatches(back, 3, 0)
    assert [[forth[i] for i in minibatch] for minibatch in a] == [
        [back[i] for i in minibatch] for minibatch in b
    ]


def test_neighbours_are_spread_over_all_minibatches_and_epochs_differ():
    parts = members(list(range(40)), 4, 0, 0)
    assert all([i // 4 for i in minibatch] == list(range(10)) for minibatch in parts)
    assert all(len({i % 4 for i in minibatch}) > 1 for minibatch in parts)
    assert parts != members(list(range(40)), 4, 0, 1)
    assert parts != members(list(range(40)), 4, 1, 0)
    assert parts == members(list(range(40)), 4, 0, 0)


def test_more_minibatches_than_samples_leave_some_empty():
    parts = members([0, 1], 5, 3, 0)
    assert sorted(map(len, parts)) == [0, 0, 0, 1, 1]
    with pytest.raises(ValueError, match="at least 1"):
        assign_minibatches([0], 0, 0)
