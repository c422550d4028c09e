"""What this machine offers to a run: GPUs, cores, memory, disk, files. Without torch."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlcli.inspect.cores import available_cores
from rlcli.inspect.devices import Gpu
from rlcli.inspect.findings import Finding
from rlcli.inspect.host_memory import host_memory
from rlcli.inspect.processor import NATIVE_BFLOAT16, cpu_flags

GIB = 1 << 30
LITTLE_DISK = 10 * GIB
LITTLE_SHARED_MEMORY = 1 * GIB
FEW_FILES = 1024
SHARED_MEMORY = Path("/dev/shm")


def examine_machine(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """The machine, whose GPUs are these."""
    yield _check_gpus(gpus)
    yield _check_cores()
    yield _check_memory()
    yield _check_disk()
    if SHARED_MEMORY.is_dir():
        yield _check_shared_memory(bool(gpus))
    yield _check_open_files()


def _check_gpus(gpus: Sequence[Gpu]) -> Finding:
    if not gpus:
        return Finding(
            level="skip", about="GPUs", says="none found by nvidia-smi; recipes run on the CPU"
        )
    names = {gpu.name for gpu in gpus}
    least = min(gpu.free_gib for gpu in gpus)
    says = (
        f"{len(gpus)} x {', '.join(sorted(names))}, at least {least:.1f} GiB free each, "
        f"driver {gpus[0].driver}"
    )
    busy = [gpu for gpu in gpus if gpu.free_gib < 0.9 * gpu.total_gib]
    if busy:
        details = [
            f"GPU {gpu.index}: {gpu.free_gib:.1f} of {gpu.total_gib:.1f} GiB free" for gpu in busy
        ]
        return Finding(
            level="warn", about="GPUs", says=f"{says}; {len(busy)} in use", details=details
        )
    return Finding(level="ok", about="GPUs", says=says)


def _check_cores() -> Finding:
    says = f"{available_cores()} of {os.cpu_count()} usable"
    if native := sorted(cpu_flags() & NATIVE_BFLOAT16):
        says += f", bfloat16 in hardware ({', '.join(native)})"
    return Finding(level="ok", about="cores", says=says)


def _check_memory() -> Finding:
    free, total = host_memory()
    says = f"{_gib(free)} of {_gib(total)} available"
    if free < 2 * GIB:
        return Finding(
            level="warn",
            about="memory",
            says=says,
            fix="close other programs; a small model takes 2 GiB",
        )
    return Finding(level="ok", about="memory", says=says)


def _check_disk() -> Finding:
    here = shutil.disk_usage(Path.cwd()).free
    temporary = shutil.disk_usage(os.environ.get("TMPDIR", "/tmp")).free
    says = f"{_gib(here)} free here, {_gib(temporary)} for temporary files"
    if min(here, temporary) < LITTLE_DISK:
        fix = "set log.dir to a larger disk; a checkpoint of a 1B model takes 15 GiB"
        return Finding(level="warn", about="disk", says=says, fix=fix)
    return Finding(level="ok", about="disk", says=says)


def _check_shared_memory(has_gpus: bool) -> Finding:
    usage = shutil.disk_usage(SHARED_MEMORY)
    says = f"{_gib(usage.free)} of {_gib(usage.total)} free"
    if has_gpus and usage.free < LITTLE_SHARED_MEMORY:
        fix = "start the container with --shm-size=8g, or set NCCL_SHM_DISABLE=1"
        return Finding(
            level="warn",
            about="/dev/shm",
            says=f"{says}: too little for ranks that share a machine",
            fix=fix,
        )
    return Finding(level="ok", about="/dev/shm", says=says)


def _check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{_limit(soft)} (may be raised to {_limit(hard)})" if soft != hard else _limit(soft)
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        return Finding(
            level="warn", about="open files", says=says, fix=f"ulimit -n {min(hard, 65536)}"
        )
    return Finding(level="ok", about="open files", says=says)


def _limit(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
