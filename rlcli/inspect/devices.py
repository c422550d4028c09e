"""The GPUs of this machine, as the driver sees them, found without importing anything."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version")


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: int
    name: str
    total_gib: float
    free_gib: float
    driver: str


def list_gpus(timeout_s: float = 10.0) -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none if it is missing, fails or takes too long."""
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return read_gpus(answer.stdout) if answer.returncode == 0 else []


def read_gpus(listing: str) -> list[Gpu]:
    """The GPUs of a listing with FIELDS in MiB; other lines are skipped."""
    gpus = []
    for line in listing.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        try:
            index, total, free = int(cells[0]), float(cells[2]), float(cells[3])
            gpus.append(Gpu(index, cells[1], total / 1024, free / 1024, cells[4]))
        except (ValueError, IndexError):
            continue
    return gpus
