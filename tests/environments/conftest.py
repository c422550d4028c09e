"""What tests of other people's environments share."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rlcli.api.config import EnvironmentAbstraction
from rlcli.interfaces._environment_pool import EnvironmentPool, EnvironmentSettings
from rlcli.registry import make_environment

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
RECIPES = {
    re.search(r"environment: (\w+)", block)[1]: block
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    if "extends" in block
}


def pytest_generate_tests(metafunc):
    if "documented_environment" in metafunc.fixturenames:
        metafunc.parametrize("documented_environment", RECIPES)


@pytest.fixture
def documented():
    """The function that returns the documentation's recipe with an environment."""
    return RECIPES.__getitem__


@pytest.fixture
def tasksets(monkeypatch):
    """Makes the tasksets of verifiers that are here importable, in other processes too."""
    folder = str(Path(__file__).with_name("tasksets"))
    monkeypatch.setenv("PYTHONPATH", folder)
    monkeypatch.setattr(sys, "path", [folder, *sys.path])


@pytest.fixture
def make(environment):
    """The function that makes an environment, of the name in the fixture `environment`."""
    environments = []

    def make(**args):
        environments.append(make_environment(EnvironmentAbstraction(environment, args)))
        return environments[-1]

    yield make
    for each in environments:
        each.close()


@pytest.fixture
def pool(environment):
    """The function that makes a process for environments."""
    pools = []

    def make(variables=(), seconds=60.0, **args):
        settings = EnvironmentSettings(
            environment=environment,
            args=args,
            longest=200,
            call_seconds=seconds,
            memory_bytes=4 << 30,
        )
        pools.append(EnvironmentPool(settings, 8, variables))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def asked():
    """The function that asks an environment of a pool one thing after the other."""

    def asked(calls, *requests):
        replies = []
        for request in requests:
            calls.ask("an episode", request)
            replies += [reply for _, reply in calls.take(wait=True)]
        return replies

    return asked
