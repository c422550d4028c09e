"""The checks for GPUs where there is none: they say that they have not been run, and are able to
run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pretend_cuda import needs_pretend_device

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(path for path in HERE.glob("test_*.py") if path != Path(__file__))


def run(*arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=110
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_is_not_run_for_want_of_a_gpu_is_said_loudly():
    done = run("tests/gpu", "-m", "gpu")
    assert done.returncode == 0, done.stdout
    assert " not run: no GPU here " in done.stdout
    count = int(re.search(r"NOTHING WAS TESTED ON A GPU. (\d+) checks would show", done.stdout)[1])
    assert f"{count} skipped" in done.stdout
    assert "passed" not in done.stdout
    claims = [line.split()[0] for line in done.stdout.splitlines() if re.match(r" +\d+  \w", line)]
    assert len(claims) == len(FILES)
    assert sum(map(int, claims)) == count


def test_the_page_about_gpus_names_every_file_of_checks():
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert [path.name for path in FILES if path.name not in page] == []


@pytest.mark.exhaustive
@needs_pretend_device
def test_checks_run_on_an_emulated_device():
    few = "plain and float32 and 128 or generation"
    done = run("tests/gpu/test_attention.py", "tests/gpu/test_memory_and_time.py",
               "--device", "cpu", "-k", few)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    assert "not run: no GPU here" not in done.stdout
