"""A rank as a process: whose child it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HOME = str(Path(__file__).parents[2])


@pytest.mark.parametrize("is_orphan", [True, False])
def test_a_rank_whose_master_died_before_it_was_up_ends_before_it_loads_anything(tmp_path, is_orphan):
    """Also where orphans are adopted by a process other than 1, as under `systemd --user`."""
    (tmp_path / "logs").mkdir()
    master = os.getpid() if is_orphan else os.getppid()  # of torchrun, whose place this process takes
    environment = {**os.environ, "PYTHONPATH": HOME, "RANK": "0", "LOCAL_RANK": "0", "RLCLI_MASTER": str(master)}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rlcli.runtime.worker_main", str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert (tmp_path / "logs/rank0.log").exists() != is_orphan
    assert " torch\n" not in done.stderr
