"""The contract of every backend in every layout of ranks that it supports."""

import subprocess
import sys

import pytest

from rlcli import registry

CHECK_SECONDS = 900
"""A machine may be slow; a check that hangs is ended by its own deadline."""


@pytest.mark.exhaustive
@pytest.mark.timeout(2 * CHECK_SECONDS)
@pytest.mark.parametrize("name", registry.names("backends"))
def test_a_backend_fulfils_its_contract_in_every_layout(name):
    command = [sys.executable, "-m", "rlcli", "test", "backend", name, "--all-layouts"]
    options = ["-k", "ranks", "--timeout", str(CHECK_SECONDS)]
    tested = subprocess.run([*command, *options], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr
