"""Where the ranks of a hanging run are, by the stacks in their logs."""

import pytest

from rlcli.launch.stacks import where_ranks_are
from rlcli.messaging import zmq_worker
from rlcli.runtime import worker_main

COLLECTIVE = "/python/torch/distributed/distributed_c10d.py"
REWARD = "/project/interfaces/slow_reward.py"
SOCKET = "/python/zmq/sugar/socket.py"


def write_stack(folder, rank, *files):
    """The stack of a rank's main thread, innermost frame first."""
    frames = [f'  File "{file}", line 7 in wait\n' for file in files]
    log = folder / f"rank{rank}.log"
    log.write_text("Current thread 0x00007f00 (most recent call first):\n" + "".join(frames))


def test_the_rank_that_others_wait_for_is_named(tmp_path):
    write_stack(tmp_path, 0, COLLECTIVE)
    write_stack(tmp_path, 1, REWARD)
    assert where_ranks_are(tmp_path, [0, 1]) == (
        f"; rank 1 is at {REWARD}:7 in wait, while rank 0 waits in a collective"
    )


@pytest.mark.parametrize("waiting", [zmq_worker, worker_main], ids=["request", "run"])
def test_a_rank_that_waits_for_the_master_is_not_what_others_wait_for(tmp_path, waiting):
    write_stack(tmp_path, 0, COLLECTIVE)
    write_stack(tmp_path, 1, SOCKET, waiting.__file__)
    assert where_ranks_are(tmp_path, [0, 1]) == ""
