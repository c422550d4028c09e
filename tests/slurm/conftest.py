"""One cluster for all tests of this folder, which `make test-slurm` runs."""

import os
import subprocess

import pytest

from .cluster import Cluster

NOT_HERE = pytest.StashKey[str]()
"""Why there is no cluster, where its daemons do not start."""


@pytest.fixture(scope="session")
def cluster(request, tmp_path_factory):
    if "RLCLI_TEST_SLURM" not in os.environ:
        pytest.skip("needs Slurm: make test-slurm")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            made.start()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            request.config.stash[NOT_HERE] = str(error)
            pytest.skip("Slurm's daemons do not start here")
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def on_the_cluster(cluster, monkeypatch):
    """Commands of this process reach it, and no job outlives its test."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    yield
    cluster.cancel_all()


def pytest_terminal_summary(terminalreporter):
    if why := terminalreporter.config.stash.get(NOT_HERE, None):
        terminalreporter.write_line(f"!!! Slurm's daemons do not start here: {why}")
        terminalreporter.write_line("!!! NOTHING WAS TESTED ON A REAL CLUSTER")
