"""The GPUs of this machine, as the driver sees them, found without importing anything."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

FIELDS = ("index", "name", "memory.total", "memory.free", "driver_version", "uuid")
VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICE = re.compile(r"\d+|(GPU|MIG)-.+")
"""The name of a device there: users write `-1`, and Slurm `NoDevFiles`, where there is none."""
PART = "MIG-"
"""How the name of a part of a GPU begins; the driver's listing does not have it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: int
    name: str
    total_gib: float
    free_gib: float
    driver: str
    uuid: str = ""

    def is_named(self, name: str) -> bool:
        """Whether that is its number, or how its uuid begins."""
        return name == str(self.index) or (not name.isdecimal() and self.uuid.startswith(name))


def visible_names(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The devices that CUDA_VISIBLE_DEVICES names, as CUDA reads it: up to the first word that is
    not the name of one. None: it is not set, and all are visible."""
    visible = environment.get(VISIBLE)
    if visible is None:
        return None
    return [*takewhile(DEVICE.fullmatch, (name.strip() for name in visible.split(",")))]


def visible_gpus() -> list[Gpu]:
    """The GPUs that a run started here has, in its order."""
    names = visible_names()
    if names == []:
        return []
    gpus = list_gpus()
    if names is None or any(name.startswith(PART) for name in names):
        return gpus
    return [*_named(names, gpus)]


def _named(names: list[str], gpus: list[Gpu]) -> Iterator[Gpu]:
    for name in names:
        gpu = next((gpu for gpu in gpus if gpu.is_named(name)), None)
        if gpu is None:  # CUDA stops there
            return
        yield gpu


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
            uuid = "".join(cells[5:6])
            gpus.append(Gpu(index, cells[1], total / 1024, free / 1024, cells[4], uuid))
        except (ValueError, IndexError):
            continue
    return gpus
