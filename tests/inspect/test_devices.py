"""Which of a machine's GPUs a run has: those of CUDA_VISIBLE_DEVICES, as CUDA reads it."""

from types import SimpleNamespace

import pytest

from rlcli.inspect import devices
from rlcli.inspect.checklist import preflight
from rlcli.inspect.devices import visible_gpus
from rlcli.inspect.model_files import _is_on_cpu
from rlcli.recipe.resolve import load_recipe

LISTING = """\
0, NVIDIA H200, 143771, 143166, 570.86, GPU-0aaa
1, NVIDIA H200, 143771, 1024, 570.86, GPU-1bbb
2, NVIDIA H200, 143771, 143166, 570.86, GPU-2ccc
"""


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch):
    answer = SimpleNamespace(returncode=0, stdout=LISTING)
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: answer)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, [0, 1, 2]),
        ("2, 0", [2, 0]),
        ("GPU-1b,2", [1, 2]),
        ("1,7,2", [1]),
        ("0,-1,2", [0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("MIG-4ddd", [0, 1, 2]),
    ],
)
def test_a_run_has_the_gpus_that_are_visible_to_it(monkeypatch, visible, numbers):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in visible_gpus()] == numbers


def test_a_recipe_is_checked_for_the_devices_that_it_will_have(monkeypatch):
    needs_two = load_recipe("sft_math", ["cluster.devices_per_node=2", "launch=local"])

    def devices_finding():
        findings = {finding.about: finding for finding in preflight(needs_two, 1)}
        return findings.get("devices") or findings["GPU checks"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert (devices_finding().level, devices_finding().fix) == (
        "warn",
        "set cluster.devices_per_node=1 to run it here",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (devices_finding().level, devices_finding().says) == (
        "skip",
        "no GPU here; this recipe would run on the CPU",
    )
    assert _is_on_cpu(needs_two.recipe)
