"""Which rank works on which samples of a batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.recipe.mesh import Mesh
from rlcli.topology import RolePlacement
from rlcli.topology.placement import shares


@given(loads=st.lists(st.integers(1, 1000)), parts=st.integers(1, 9))
def test_shares_are_contiguous_and_as_equal_as_their_cuts_allow(loads, parts):
    items = list(range(len(loads)))
    cut = shares(items, loads, parts)
    assert [item for part in cut for item in part] == items
    sums = [sum(loads[item] for item in part) for part in cut]
    assert max(sums) <= sum(loads) / parts + max(loads, default=0)


@given(count=st.integers(0, 40), parts=st.integers(1, 9))
def test_equal_loads_give_equal_shares(count, parts):
    sizes = [len(part) for part in shares(range(count), [1] * count, parts)]
    assert max(sizes) - min(sizes) <= 1


def test_shares_are_balanced_by_tokens_instead_of_samples():
    assert shares("abcdef", [10, 10, 10, 10, 10, 50], 2) == [["a", "b", "c", "d", "e"], ["f"]]


@pytest.mark.parametrize(
    ("mesh", "expected", "owner"),
    [
        (Mesh(dp=2), {3: ["a", "b"], 5: ["c"]}, (3, 5)),
        (Mesh(dp=1, tp=2), {3: ["a", "b", "c"], 5: ["a", "b", "c"]}, (3,)),
    ],
)
def test_ranks_of_one_replica_get_the_same_share(mesh, expected, owner):
    placement = RolePlacement("actor", (3, 5), mesh)
    assert placement.share_out(["a", "b", "c"], [1, 1, 1]) == expected
    assert placement.owners == owner
