"""What this machine's processor supports, and which roles of a recipe require more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcli.recipe.resolve import Resolved
    from rlcli.recipe.schema import Recipe

NATIVE_BFLOAT16 = {"amx_bf16", "avx512_bf16", "bf16", "svebf16"}
"""Flags of processors that multiply bfloat16 in hardware: x86-64, then Arm."""


def cpu_flags() -> set[str]:
    """Features that Linux reports for the first core; empty if it reports none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    lines = (
        line.split(":", 1)[1]
        for line in text.splitlines()
        if line.startswith(("flags", "Features"))
    )
    return set(next(lines, "").split())


def slow_dtypes(resolved: Resolved) -> Iterator[str]:
    """A warning for each role that uses bfloat16 on a processor that only emulates it."""
    flags = cpu_flags()
    if not flags or flags & NATIVE_BFLOAT16 or not runs_on_this_cpu(resolved.recipe):
        return
    for name, role in resolved.recipe.models.items():
        if role.engine.args.get("dtype") == "bfloat16":
            location = resolved.origin(("models", name, "backend", "args", "dtype"))
            yield (
                f"{location}: {name} computes in bfloat16, which this processor only emulates; "
                "float32 is at least 9 times as fast, and what dtype=auto chooses here"
            )


def runs_on_this_cpu(recipe: Recipe) -> bool:
    """Whether its ranks compute on the processor of this machine."""
    from rlcli.inspect.devices import visible_gpus

    device = recipe.cluster.device
    return device == "cpu" or (
        device == "auto" and recipe.cluster.nodes == 1 and not visible_gpus()
    )


def as_run_here(recipe: Recipe) -> Recipe:
    """With the CPU as its device, if that is what `auto` means on this machine."""
    from rlcli.topology.advice import with_value

    if recipe.launch.type == "slurm" or not runs_on_this_cpu(recipe):
        return recipe
    on_cpu: Recipe = with_value(recipe, ("cluster", "device"), "cpu")
    return on_cpu
