"""The arguments that a dataset is built with."""

import pytest

from rlcli.api.data import DatasetUtility


def test_a_dp_rank_beyond_the_world_size_is_refused():
    assert DatasetUtility(1, 0, 2, None).world_size == 2
    with pytest.raises(ValueError, match="dp_rank is 2"):
        DatasetUtility(1, 2, 2, None)
