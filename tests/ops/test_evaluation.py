"""pass@k and majority votes: numbers worked by hand, by enumeration, and general properties."""

from collections import Counter
from itertools import combinations
from math import comb

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.ops.evaluation import answer_classes, majority, pass_at_k


def estimate(n, c, k):
    return float(pass_at_k(torch.tensor([n]), torch.tensor([c]), k))


def test_pass_at_k_equals_that_worked_by_hand():
    """Of 5 responses 2 are right: of the 10 pairs, 3 hold none of them."""
    assert estimate(5, 2, 1) == pytest.approx(2 / 5)
    assert estimate(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert estimate(5, 2, 4) == 1
    assert estimate(5, 0, 5) == 0
    assert estimate(1, 1, 1) == 1


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(drawn):
    n, c, k = drawn
    subsets = [any(index < c for index in subset) for subset in combinations(range(n), k)]
    assert estimate(n, c, k) == pytest.approx(sum(subsets) / len(subsets))


def test_pass_at_k_of_many_responses_is_exact():
    """Binomials of this size have 59 digits; their ratio is exact to rounding."""
    exact = 1 - comb(200 - 3, 100) / comb(200, 100)
    assert estimate(200, 3, 100) == pytest.approx(exact, rel=1e-12)


def test_pass_at_k_is_computed_for_several_prompts():
    estimates = pass_at_k(torch.tensor([4, 4, 2]), torch.tensor([0, 1, 2]), 2)
    assert estimates.tolist() == pytest.approx([0, 1 / 2, 1])
    assert estimates.dtype == torch.float64
    assert pass_at_k(
        torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 3
    ).shape == (0,)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 2), (3, -1, 2)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError, match="responses"):
        estimate(n, c, k)


def test_the_most_frequent_answer_wins():
    assert majority([0, 1, 1, 2]) == 1
    assert majority([-1, -1, -1, 0]) == 3  # no answer is no vote
    assert majority([-1, -1]) is None
    assert majority([]) is None


def test_the_first_of_equally_frequent_answers_wins():
    assert majority([0, 1, 1, 0]) == 0
    assert majority([-1, 0, 1]) == 1
    assert majority([1, 0]) == 0


@given(st.lists(st.integers(-1, 3), max_size=12))
def test_the_winner_is_the_first_occurrence_of_a_most_frequent_answer(answers):
    winner, votes = majority(answers), Counter(answer for answer in answers if answer >= 0)
    if not votes:
        assert winner is None
        return
    assert votes[answers[winner]] == max(votes.values())
    assert answers[winner] not in answers[:winner]
    earlier = set(answers[:winner]) - {-1}
    assert all(votes[answer] < votes[answers[winner]] for answer in earlier)


def test_answers_are_numbered_by_first_appearance():
    classes = answer_classes([["b", None, "a", "b"], [], [None], ["a", "a"]])
    assert classes.tolist() == [0, -1, 1, 0, -1, 0, 0]
    assert classes.dtype == torch.int64
    assert answer_classes([]).dtype == torch.int64
