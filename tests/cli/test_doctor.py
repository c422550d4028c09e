"""`rlcli doctor`: packages, devices and limits, and how to fix problems with them."""

import json
import shutil
from collections import namedtuple
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlcli.inspect import devices, machine
from rlcli.inspect import doctor as room
from rlcli.inspect.devices import Gpu, list_gpus, read_gpus
from rlcli.registry.requirements import fits, read_requirements, torch_build

LISTING = """\
0, NVIDIA H200, 143771, 143166, 570.86
1, NVIDIA H200, 143771, 1024, 570.86
[N/A], broken line
"""


def findings():
    return {finding.about: finding for finding in room.examine()}


def test_doctor_reports_every_subject(rlcli):
    code, out, err = rlcli("doctor")
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    for about in (
        "python",
        "packages",
        "torch",
        "cores",
        "memory",
        "disk",
        "open files",
        "project",
        "Slurm",
    ):
        assert f" {about} " in out


def test_doctor_as_json(rlcli):
    code, out, _ = rlcli("doctor", "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (0, True)
    assert document["packages"]["torch"] == metadata.version("torch")
    assert {"torch", "transformers", "deepspeed"} <= set(document["packages"])


def test_a_missing_package_fails_with_the_command_to_install_it(rlcli, monkeypatch):
    real = room.installed_version
    monkeypatch.setattr(
        room, "installed_version", lambda name: None if name == "pyzmq" else real(name)
    )
    code, out, _ = rlcli("doctor")
    assert code == 1
    assert "FAIL  pyzmq" in out
    assert "fix: pip install 'pyzmq>=" in out
    assert out.splitlines()[-1].startswith("1 failure")


def test_an_old_package_fails(monkeypatch):
    real = room.installed_version
    monkeypatch.setattr(
        room, "installed_version", lambda name: "1.0" if name == "transformers" else real(name)
    )
    finding = findings()["transformers"]
    assert (finding.level, finding.exit_code) == ("FAIL", 1)
    assert finding.says.startswith("1.0 is installed, rlcli needs >=")


def test_extras_are_optional_and_have_their_range(monkeypatch):
    real = room.installed_version
    versions = {"deepspeed": "0.1", "wandb": "0.99"}
    monkeypatch.setattr(room, "installed_version", lambda name: versions.get(name) or real(name))
    by_subject = findings()
    assert by_subject["deepspeed"].level == "warn"
    assert "0.1 installed; tested with deepspeed" in by_subject["deepspeed"].says
    assert (by_subject["wandb"].level, by_subject["wandb"].says) == ("ok", "wandb 0.99")
    monkeypatch.setattr(
        room, "installed_version", lambda name: None if name == "megatron-core" else real(name)
    )
    by_subject = findings()["megatron"]
    assert (by_subject.level, by_subject.fix) == ("skip", "pip install 'rlcli[megatron]'")


def test_servers_are_installed_in_an_environment_of_their_own():
    finding = findings()["sglang"]
    assert finding.level == "skip"
    environment = "python3 -m venv .venv-sglang"
    assert finding.fix == f"{environment} && .venv-sglang/bin/pip install 'sglang>=0.5.21'"


def test_the_command_that_builds_flash_attn_is_printed_with_why_pip_alone_fails(monkeypatch):
    real = room.installed_version
    monkeypatch.setattr(
        room, "installed_version", lambda name: None if name == "flash-attn" else real(name)
    )
    monkeypatch.setattr(room.shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for build, lacking in (
        ("cpu", ["built for cpu", "no CUDA compiler"]),
        ("cuda 13.0", ["no CUDA compiler"]),
    ):
        monkeypatch.setattr(room, "torch_build", lambda build=build: build)
        finding = findings()["flash-attn"]
        assert finding.fix == (
            "pip install ninja packaging psutil setuptools wheel && "
            "pip install --no-build-isolation 'rlcli[flash-attn]'"
        )
        why, *others = finding.details
        assert "pip alone builds it in an environment without torch" in why
        assert all(word in text for word, text in zip(lacking, others, strict=True))
    monkeypatch.setenv("CUDA_HOME", "/usr/local/cuda")
    assert len(findings()["flash-attn"].details) == 1


def test_requirements_are_read_from_the_checkout():
    requirements = read_requirements()
    assert {"torch", "transformers", "typer"} <= {
        requirement.name for requirement in requirements.needed
    }
    assert "test" not in requirements.extras
    assert [requirement.name for requirement in requirements.extras["deepspeed"]] == ["deepspeed"]


def test_requirements_are_read_from_an_installed_package(monkeypatch):
    lines = [
        "torch>=2.13",
        'deepspeed>=0.18; extra == "deepspeed"',
        'pytest; extra == "test"',
        'x; python_version < "3"',
    ]
    message = Message()
    message["Requires-Python"] = ">=3.11"
    for name, values in {"Requires-Dist": lines, "Provides-Extra": ["deepspeed", "test"]}.items():
        for value in values:
            message[name] = value
    monkeypatch.setattr("rlcli.registry.requirements.is_project", lambda folder: False)
    monkeypatch.setattr("rlcli.registry.requirements.metadata.metadata", lambda name: message)
    requirements = read_requirements()
    assert (
        [requirement.name for requirement in requirements.needed],
        list(requirements.extras),
    ) == (
        ["torch"],
        ["deepspeed"],
    )


@pytest.mark.parametrize(
    ("version", "good"), [("2.13.0+cpu", True), ("2.14.0rc1", True), ("2.12.9", False)]
)
def test_versions_are_compared_with_requirements(version, good):
    assert fits(Requirement("torch>=2.13"), version) == good


def test_the_build_of_torch_is_read_without_importing_it():
    import torch

    assert torch_build() == (f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu")


def test_gpus_are_read_from_the_driver():
    first, second = read_gpus(LISTING)
    assert (first.index, first.name, first.driver) == (0, "NVIDIA H200", "570.86")
    assert round(first.total_gib) == 140
    assert second.free_gib == 1


@pytest.mark.parametrize(
    "error", [FileNotFoundError("nvidia-smi"), devices.subprocess.TimeoutExpired("nvidia-smi", 1)]
)
def test_no_gpus_are_listed_without_a_driver(monkeypatch, error):
    def fails(*_args, **_options):
        raise error

    monkeypatch.setattr(devices.subprocess, "run", fails)
    assert list_gpus() == []


def test_used_gpus_and_a_cpu_build_of_torch_cause_warnings(monkeypatch):
    monkeypatch.setattr(room, "list_gpus", lambda: read_gpus(LISTING))
    monkeypatch.setattr(room, "torch_build", lambda: "cpu")
    by_subject = findings()
    assert (by_subject["GPUs"].level, list(by_subject["GPUs"].details)) == (
        "warn",
        ["GPU 1: 1.0 of 140.4 GiB free"],
    )
    assert by_subject["torch"].level == "warn"
    monkeypatch.setattr(room, "list_gpus", lambda: [Gpu(0, "A", 80, 79, "1")])
    monkeypatch.setattr(room, "torch_build", lambda: "cuda 13.0")
    assert (findings()["GPUs"].level, findings()["torch"].level) == ("ok", "ok")


def test_little_shared_memory_causes_a_warning_with_gpus(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(64 << 20, 0, 64 << 20))
    assert machine._check_shared_memory(False).level == "ok"
    finding = machine._check_shared_memory(True)
    assert (finding.level, finding.says) == (
        "warn",
        "64 MiB of 64 MiB free: too little for ranks that share a machine",
    )
    assert machine._check_disk().level == "warn"


def test_a_low_limit_of_open_files_causes_a_warning(monkeypatch):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _which: (256, 4096))
    finding = machine._check_open_files()
    assert (finding.level, finding.fix) == ("warn", "ulimit -n 4096")


def test_broken_components_of_the_project_are_counted(rlcli, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "broken.py").write_text("def :\n")
    code, out, _ = rlcli("doctor")
    assert code == 0
    assert "with 1 component, 1 broken" in " ".join(out.split())
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli\n")
    code, out, _ = rlcli("doctor")
    assert code == 1
    assert "FAIL  project" in out


def test_missing_slurm_commands_are_listed(monkeypatch):
    monkeypatch.setattr(room.shutil, "which", lambda name: None)
    assert room._check_slurm().level == "skip"
    monkeypatch.setattr(room.shutil, "which", lambda name: name if name != "sacct" else None)
    assert room._check_slurm().says == "sbatch, srun, squeue, scancel; missing: sacct"


def test_the_report_contains_no_secret(rlcli, tmp_path, monkeypatch):
    secret = "hf_0123456789abcdef"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    code, out, _ = rlcli("doctor", "--report")
    assert code == 0
    assert secret not in out
    assert "HF_TOKEN" in out
    assert str(Path.home()) not in out
    assert f"torch {metadata.version('torch')}" in out
