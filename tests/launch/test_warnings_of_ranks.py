"""Warnings of a rank or a pool process are shown to the user, and not only written to its log."""

import pytest

pytestmark = pytest.mark.timeout(420)

TWO_RANKS = ("launch=local", "cluster.devices_per_node=2", "train.eval.dataset=null")
# what follows has it arrive in time
WARNS = "graph.score.interface={type: toy_trouble, args: {kind: warning, at: 1}}"
POOL = "models.reward.backend=cpu_pool"
WARNING = "the toy warns in process"


@pytest.mark.long
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("layout", [(), (POOL,)], ids=["in the ranks", "in their pools"])
def test_a_warning_of_two_processes_is_shown_once_and_stays_in_their_logs(train, capfd, layout):
    finished, folder = train(*TWO_RANKS, WARNS, *layout)
    assert finished.exit_code == 0
    assert capfd.readouterr().err.count(WARNING) == 1
    logs = {log.name: log.read_text().count(WARNING) for log in (folder / "logs").glob("*.log")}
    assert sum(count > 0 for count in logs.values()) == (4 if layout else 2), logs
