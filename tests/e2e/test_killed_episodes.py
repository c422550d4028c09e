"""Whichever process of a run is killed while its policy plays episodes, the environments' included:
it goes on or is resumed, and ends as if nothing had happened, or trains on no row twice."""

import pytest
from kill_anywhere import EPISODES, outcomes_of

KILLS = 7
"""Of each case: more than 50 in all."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3000)]  # all runs of all cases


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Case → the outcome of its runs."""
    return outcomes_of(KILLS, 1, tmp_path_factory.mktemp("killed"), *EPISODES)


@pytest.mark.parametrize("case", EPISODES)
def test_runs_survive_kills_of_all_their_processes(case, outcomes):
    outcome = outcomes[case]
    assert "failure" not in outcome, outcome["failure"]
    assert outcome["kills"] >= KILLS
    assert outcome["differing"] == []
    assert outcome["forks"] == ("forks" in case)


def test_all_kinds_of_processes_are_killed(outcomes):
    kinds = {kind for outcome in outcomes.values() for kind in outcome["killed"]}
    assert kinds == {"master", "node", "rank", "pool", "server", "environments", "environment"}
