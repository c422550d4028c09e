"""One cluster for all tests of this folder, which `make test-slurm` runs;
a file may have another of its own."""

import os
import subprocess
from contextlib import contextmanager

import pytest

from .cluster import Cluster

NOT_HERE = pytest.StashKey[dict[str, str]]()
"""Why there is no cluster, by its kind, where its daemons do not start."""


@pytest.fixture(scope="session")
def bring_up(request):
    """A context in which a cluster is up."""

    @contextmanager
    def bring(cluster):
        if "RLCLI_TEST_SLURM" not in os.environ:
            pytest.skip("needs Slurm: make test-slurm")
        try:
            try:
                cluster.start()
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                request.config.stash.setdefault(NOT_HERE, {})[cluster.KIND] = str(error)
                pytest.skip(f"a {cluster.KIND} does not start here")
            yield cluster
        finally:
            cluster.stop()

    return bring


@pytest.fixture(scope="session")
def cluster(bring_up, tmp_path_factory):
    with bring_up(Cluster(tmp_path_factory.mktemp("slurm"))) as running:
        yield running


@pytest.fixture(autouse=True)
def on_the_cluster(cluster, monkeypatch):
    """Commands of this process reach it, and no job outlives its test."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    yield
    cluster.cancel_all()


def pytest_terminal_summary(terminalreporter):
    for kind, why in terminalreporter.config.stash.get(NOT_HERE, {}).items():
        terminalreporter.write_line(f"!!! A {kind} does not start here: {why}")
        terminalreporter.write_line(f"!!! NOTHING WAS TESTED ON A REAL {kind.upper()}")
