"""One cluster for all tests of this folder, which `make test-slurm` runs."""

import os

import pytest

from .cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if "RLCLI_TEST_SLURM" not in os.environ:
        pytest.skip("needs Slurm: make test-slurm")
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def on_the_cluster(cluster, monkeypatch):
    """Commands of this process reach it, and no job outlives its test."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    yield
    cluster.cancel_all()
