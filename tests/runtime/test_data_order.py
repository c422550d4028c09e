"""Which rows make up which step."""

import tracemalloc
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rlcli.runtime.data_order import DataOrder, StepSizes


def step(order, sizes, number):
    """(epoch, row) of each sample of a step."""
    return [order.at(place) for place in range(sizes.position(number), sizes.position(number + 1))]


@given(rows=st.integers(1, 40), per_step=st.integers(1, 40), seed=st.integers(0, 9))
def test_every_row_comes_once_per_epoch_and_every_step_is_full(rows, per_step, seed):
    order, sizes = DataOrder(rows, seed), StepSizes(rows, per_step)
    steps = [step(order, sizes, k) for k in range(2 * -(-rows // per_step))]
    assert all(len(step) == per_step for step in steps)
    seen = Counter(pair for step in steps for pair in step)
    assert max(seen.values()) == 1
    whole_epochs = len(steps) * per_step // rows
    assert all((epoch, row) in seen for epoch in range(whole_epochs) for row in range(rows))


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    def rows(seed, places):
        return [DataOrder(50, seed).at(place)[1] for place in places]

    assert rows(3, range(70)) == rows(3, range(70))
    assert rows(3, range(7)) != rows(4, range(7))
    first, second = rows(3, range(50)), rows(3, range(50, 100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


def test_the_order_of_many_rows_takes_four_bytes_for_each():
    rows = 100_000
    tracemalloc.start()
    DataOrder(rows, seed=12345).at(0)
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory < 5 * rows


def test_the_order_stays_the_same_from_version_to_version():
    assert step(DataOrder(8, seed=1), StepSizes(8, 8), 0) == [
        (0, row) for row in (0, 3, 4, 5, 7, 1, 6, 2)
    ]
    assert step(DataOrder(4, seed=1, shuffle=False), StepSizes(4, 3), 1) == [(0, 3), (1, 0), (1, 1)]


def test_with_an_end_the_last_step_is_smaller_and_no_row_comes_twice():
    order, sizes = DataOrder(rows=10, seed=1, shuffle=False), StepSizes(rows=10, per_step=4, end=10)
    assert [sizes.size(number) for number in range(4)] == [4, 4, 2, 0]
    assert [row for number in range(3) for _, row in step(order, sizes, number)] == list(range(10))
    assert sizes.position(3) == 10
    resumed = StepSizes(rows=10, per_step=4, first_step=2, first_position=8, end=10)
    assert step(order, resumed, 2) == step(order, sizes, 2)
