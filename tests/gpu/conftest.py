"""Checks for GPUs, run by `make test-gpu`: each is marked `gpu` and skipped where there is none.

`pytest tests/gpu --device cpu` runs what it can without: kernels and engines on an emulated CUDA
device in host memory, ranks on the CPU with gloo. That shows that the checks themselves work, and
nothing about a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from pretend_cuda import pretend_cuda

HERE = Path(__file__).parent
NO_GPU = "no GPU here"
NOT_RUN = pytest.StashKey[dict[str, int]]()
"""What a file would show → how many checks of it are skipped for want of a GPU."""


def pytest_addoption(parser):
    parser.addoption(
        "--device", choices=("cuda", "cpu"), default="cuda", help="where GPU checks run"
    )


def device_of(config):
    """`cuda`, also where these checks are collected together with all other tests."""
    return config.getoption("--device", default="cuda")


def pytest_collection_modifyitems(config, items):
    not_run = config.stash.setdefault(NOT_RUN, {})
    is_missing = device_of(config) == "cuda" and not torch.cuda.is_available()
    for item in items:
        if not item.path.is_relative_to(HERE) or item.path.stem == "test_without_a_gpu":
            continue
        item.add_marker(pytest.mark.gpu)
        if is_missing:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
            claim = " ".join(item.getparent(pytest.Module).obj.__doc__.split())
            not_run[claim] = not_run.get(claim, 0) + 1


def pytest_terminal_summary(terminalreporter, config):
    """What was not run for want of a GPU, and what it would have shown; silent where these checks
    are only a few of all tests."""
    not_run = config.stash.get(NOT_RUN, {})
    if not not_run or not hasattr(config.option, "device"):
        return
    terminalreporter.section("not run: no GPU here", "!")
    total = sum(not_run.values())
    terminalreporter.write_line(f"NOTHING WAS TESTED ON A GPU. {total} checks would show:")
    for claim, count in not_run.items():
        terminalreporter.write_line(f"{count:>5}  {claim}")


@pytest.fixture(scope="session")
def device_name(request):
    """`cuda` or `cpu`."""
    return device_of(request.config)


@pytest.fixture
def cuda(device_name):
    """The first CUDA device; with `--device cpu`, an emulated one for the time of the check."""
    with nullcontext() if device_name == "cuda" else pretend_cuda():
        yield torch.device("cuda", 0)


@pytest.fixture(scope="session")
def two_devices(device_name):
    """Skips a check that needs two GPUs where there is one."""
    if device_name == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
