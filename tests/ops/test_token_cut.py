"""The cut of a pack over context-parallel ranks, and its inverse."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.ops.packing import positions
from rlcli.ops.token_cut import TokenCut

cuts = st.builds(
    TokenCut,
    st.lists(st.integers(1, 40), min_size=1, max_size=9).map(tuple),
    st.integers(1, 6),
)


@given(cuts)
def test_every_token_has_one_slot(cut):
    total = sum(cut.lengths)
    assert sorted(cut.tokens[cut.filled].tolist()) == list(range(total))
    assert cut.tokens.flatten()[cut.slots].tolist() == list(range(total))
    assert cut.filled.flatten()[cut.slots].all()


@given(cuts)
def test_ranks_have_equally_many_tokens_of_the_pack_and_of_each_sequence(cut):
    counts = cut.filled.sum(1)
    assert cut.size == counts.max()
    assert counts.max() - counts.min() <= 1
    for sequence in zip(*cut.parts, strict=True):
        shares = [len(early) + len(late) for early, late in sequence]
        assert max(shares) - min(shares) <= 1
        assert all(0 <= len(late) - len(early) <= 1 for early, late in sequence)


@given(cuts)
def test_slots_are_in_the_order_of_positions(cut):
    """So that a causal kernel can attend within a rank by the order of slots."""
    places = positions(cut.lengths)
    for parts in cut.parts:
        for early, late in parts:
            in_slots = places[[*early, *late]]
            assert (in_slots.diff() > 0).all()


@given(cuts)
def test_pairs_are_exactly_what_causality_shows(cut):
    total = sum(cut.lengths)
    sequence = torch.repeat_interleave(torch.arange(len(cut.lengths)), torch.tensor(cut.lengths))
    expected = (sequence[:, None] == sequence[None]).tril()
    seen = torch.zeros(total, total, dtype=torch.int64)
    for rank in range(cut.ranks):
        for source in range(cut.ranks):
            for queries, keys in cut.pairs(rank, source):
                rows, columns = cut.tokens[rank, list(queries)], cut.tokens[source, list(keys)]
                block = torch.ones(len(rows), len(columns), dtype=torch.int64)
                seen[rows[:, None], columns[None]] += block.tril() if rank == source else block
    assert torch.equal(seen, expected.long())


def test_the_work_of_one_long_sequence_is_equal():
    """Contiguous quarters would give the last rank seven times the work of the first."""
    cut = TokenCut((4096,), 4)
    seen = positions(cut.lengths) + 1
    work = [int(seen[tokens].sum()) for tokens in cut.tokens]
    assert max(work) / min(work) < 1.01


def test_a_cut_equals_that_worked_by_hand():
    cut = TokenCut((5, 1, 2), 2)
    assert cut.parts[0] == [
        (range(1), range(3, 5)),
        (range(5, 5), range(5, 5)),
        ((range(6, 6)), range(7, 8)),
    ]
    assert cut.parts[1] == [
        (range(1, 2), range(2, 3)),
        (range(5, 5), range(5, 6)),
        (range(6, 6), range(6, 7)),
    ]
    assert cut.tokens.tolist() == [[0, 3, 4, 7], [1, 2, 5, 6]]
