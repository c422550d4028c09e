"""Whether what a recipe is planned to need fits into the memory that this machine has free."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING

from rlcli.inspect.devices import visible_gpus
from rlcli.inspect.findings import Finding
from rlcli.inspect.host_memory import host_memory
from rlcli.inspect.processor import as_run_here
from rlcli.topology.advice import Fitting
from rlcli.topology.memory import GIB, RESERVED, plan_memory
from rlcli.topology.placement import plan_topology

if TYPE_CHECKING:
    from rlcli.api.architecture import Architecture
    from rlcli.recipe.schema import Recipe


def check_memory_plan(recipe: Recipe, sizes: Mapping[str, Architecture | str]) -> Finding | None:
    """A warning if a call may need more than a device of this machine has free; None also where the
    recipe runs elsewhere.

    `sizes`: role with weights → those of its model, or why they are unknown. Raises RlcliError or
    ValueError if the recipe cannot be laid out.
    """
    recipe = as_run_here(recipe)
    free = _free_on_a_device(recipe)
    if free is None:
        return None
    topology = plan_topology(recipe)
    plan = plan_memory(recipe, topology, sizes)
    room = free * 100 // (100 + plan.within_percent)
    too_large = [peak for peak in plan.peaks if peak.total > room]
    if not too_large:
        return None
    highest = max(too_large, key=lambda peak: peak.total)
    most = highest.total * (100 + plan.within_percent) // 100
    advice = Fitting(recipe, topology, sizes, room, reserved=0).advice(
        [peak.call for peak in too_large]
    )
    overrides = " ".join(dict.fromkeys(chain.from_iterable(advice.values())))
    return Finding(
        level="warn",
        about="memory",
        says=f"{highest.call} may need {_gib(most)} on each device, which has {_gib(free)} free",
        fix=f"with {overrides} it fits" if overrides else "use a smaller model, or shorter texts",
    )


def _free_on_a_device(recipe: Recipe) -> int | None:
    """Bytes; None if the recipe runs on other machines."""
    cluster = recipe.cluster
    if recipe.launch.type == "slurm" or cluster.nodes > 1:
        return None
    if cluster.device == "cpu":
        return host_memory().free // cluster.devices_per_node
    free = [int(gpu.free_gib * GIB) for gpu in visible_gpus()[: cluster.devices_per_node]]
    return max(0, min(free) - RESERVED) if free else None


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
