"""A rank as a process: whose child it is."""

import os
import subprocess
import sys
from pathlib import Path

HOME = str(Path(__file__).parents[2])


def test_a_rank_whose_agent_died_before_it_was_up_ends_before_it_loads_anything(tmp_path):
    """Also where orphans are adopted by a process other than 1, as under `systemd --user`."""
    (tmp_path / "logs").mkdir()
    not_its_parent = str(os.getppid())
    environment = {**os.environ, "PYTHONPATH": HOME, "RANK": "0", "LOCAL_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rlcli.runtime.worker_main", str(tmp_path)],
        env=environment | {"RLCLI_AGENT": not_its_parent},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert not (tmp_path / "logs/rank0.log").exists()
    assert " torch\n" not in done.stderr
