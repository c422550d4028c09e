"""Which tokens of a pack are computed once, compared with all pairs of prefixes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.ops.shared_prefixes import Work, counted_tokens, shared_prefixes

sequence_lists = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9
)
"""Of three tokens, so that many begin alike, and some are the beginnings of others."""


def always(length, shared):
    return True


def packed(sequences):
    return torch.tensor([token for sequence in sequences for token in sequence])


def pasts(sequences):
    """Of every token of the pack, itself and all before it in its sequence."""
    return [tuple(sequence[: i + 1]) for sequence in sequences for i in range(len(sequence))]


@given(sequence_lists)
def test_a_row_is_computed_for_every_distinct_past(sequences):
    past_of = pasts(sequences)
    prefixes = shared_prefixes(packed(sequences), list(map(len, sequences)), always)
    if prefixes is None:
        assert len(set(past_of)) == len(past_of)
        return
    assert prefixes.computed.tolist() == sorted(prefixes.computed.tolist())
    of_rows = [past_of[token] for token in prefixes.computed.tolist()]
    assert sorted(of_rows) == sorted(set(past_of))
    assert [of_rows[row] for row in prefixes.rows.tolist()] == past_of


@given(sequence_lists)
def test_every_action_is_scored_by_the_row_before_it_against_its_own_token(sequences):
    tokens, past_of = packed(sequences), pasts(sequences)
    prefixes = shared_prefixes(tokens, list(map(len, sequences)), always)
    if prefixes is None:
        return
    of_rows = [past_of[token] for token in prefixes.computed.tolist()]
    after = [*tokens[1:].tolist(), None]
    pairs = [(past_of[token], after[token]) for token in prefixes.computed.tolist()]
    branches = zip(prefixes.predictors.tolist(), prefixes.branches.tolist(), strict=True)
    pairs += [(of_rows[row], int(tokens[token])) for row, token in branches]
    scored = [pairs[slot] for slot in prefixes.scores.tolist()]
    actions = [(tuple(s[:i]), s[i]) for s in sequences for i in range(1, len(s))]
    assert scored == actions


@given(sequence_lists, st.randoms(use_true_random=False))
def test_what_does_not_pay_is_computed_for_each_sequence(sequences, random):
    """Any choice of sequences that share gives rows with the same past."""
    lengths, past_of = list(map(len, sequences)), pasts(sequences)
    prefixes = shared_prefixes(
        packed(sequences), lengths, lambda length, shared: random.random() < 0.5
    )
    if prefixes is None:
        return
    of_rows = [past_of[token] for token in prefixes.computed.tolist()]
    assert [of_rows[row] for row in prefixes.rows.tolist()] == past_of
    assert sum(prefixes.shared) == len(past_of) - len(of_rows) > 0


def test_nothing_is_shared_if_it_does_not_pay():
    assert shared_prefixes(torch.tensor([1, 2, 1, 2]), [2, 2], lambda *sizes: False) is None
    assert shared_prefixes(torch.tensor([1, 2, 2, 1]), [2, 2], always) is None


def test_copies_of_keys_and_values_count_an_eighth_of_a_token():
    sequences = torch.tensor([7] * 20 + [8, 9] + [7] * 20), [22, 20], always
    assert len(shared_prefixes(*sequences).computed) == 22
    assert counted_tokens(*sequences) == 22 + 3


SMOLLM2 = {"of_token": 3_540_000, "of_key": 1152}


@pytest.mark.parametrize(
    ("length", "shared", "masked", "skipped"),
    [
        (76, 45, True, True),
        (76, 6, True, True),
        (76, 5, False, True),
        (76, 4, False, False),
        (2000, 100, False, False),
        (2000, 200, False, True),
        (2000, 1500, True, True),
        (20000, 19000, True, True),
        (20000, 5000, False, True),
        (20000, 3000, False, False),
    ],
)
def test_sharing_pays_where_it_saves_more_than_a_mask_costs(length, shared, masked, skipped):
    assert Work(**SMOLLM2, skips_hidden=False).pays(length, shared) is masked
    assert Work(**SMOLLM2, skips_hidden=True).pays(length, shared) is skipped
