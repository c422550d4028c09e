"""The devices of a role and how they share its work."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcli.recipe.schema import Cluster, MeshSection

MAX_NODES, MAX_DEVICES_PER_NODE = 4096, 1024
MAX_WORLD = 65_536
"""Maximum devices of a cluster. Plans list every rank, so this bounds their time and memory."""

DIMENSIONS = ("dp", "tp", "pp", "cp", "ep")


class DevicesError(ValueError):
    """Impossible devices or mesh.

    `key`: which key of the role is at fault; `needs`: the devices that would be enough, if there
    are too few; `fitting`: dimensions of the mesh, each with a size that fits.
    """

    def __init__(
        self,
        message: str,
        key: str,
        needs: int | None = None,
        fitting: Sequence[tuple[str, int]] = (),
    ):
        super().__init__(message)
        self.key = key
        self.needs = needs
        self.fitting = fitting


@dataclass(frozen=True)
class Mesh:
    """Sizes of the dimensions, always in this order."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        """Number of devices; expert-parallel groups are part of the data-parallel ones."""
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "dp")


def world_of(cluster: Cluster) -> int:
    """Number of devices in the whole cluster. Raises DevicesError if there are more than
    MAX_WORLD."""
    world = cluster.nodes * cluster.devices_per_node
    if world > MAX_WORLD:
        message = (
            f"the cluster has {cluster.nodes} x {cluster.devices_per_node} = {world} "
            f"devices; at most {MAX_WORLD}"
        )
        raise DevicesError(message, "cluster")
    return world


def devices_of(role: str, devices: str | None, world: int) -> tuple[int, ...]:
    """The ranks named by `0-3,5`, sorted; None names all of them."""
    if devices is None:
        return tuple(range(world))
    ranks: set[int] = set()
    for span in devices.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", span)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            message = f"devices of {role} are {devices!r}; write ranks such as 0-3,5"
            raise DevicesError(message, "devices")
        if last >= world:
            available = f"{world} devices (0-{world - 1})" if world > 1 else f"{world} device (0)"
            message = f"{role} uses rank {last}, but the cluster has {available}"
            raise DevicesError(message, "devices", needs=last + 1)
        ranks |= set(range(first, last + 1))
    return tuple(sorted(ranks))


def mesh_of(role: str, mesh: MeshSection, devices: int) -> Mesh:
    """The mesh on this many devices, with the data-parallel size filled in."""
    dp = mesh.dp if mesh.dp is not None else devices // (mesh.tp * mesh.pp * mesh.cp)
    result = Mesh(dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep)
    if result.size != devices or dp < 1:
        raise _does_not_fit(role, mesh, devices)
    if (shared := dp * mesh.cp) % mesh.ep:
        message = f"ep {mesh.ep} of {role} does not divide its dp {dp} x cp {mesh.cp}"
        sizes = [size for size in range(1, shared + 1) if shared % size == 0]
        fitting = [("ep", size) for size in _around(sizes, mesh.ep)]
        raise DevicesError(message, "mesh", fitting=fitting)
    return result


def _does_not_fit(role: str, mesh: MeshSection, devices: int) -> DevicesError:
    sizes = {"dp": mesh.dp, "tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp}
    asked = {name: size for name, size in sizes.items() if size is not None}
    shape = " x ".join(f"{name} {size}" for name, size in asked.items())
    product = math.prod(asked.values())
    word = "devices" if devices > 1 else "device"
    message = f"the mesh of {role} ({shape} = {product}) does not fit its {devices} {word}"
    needs = product if product > devices else None
    return DevicesError(message, "mesh", needs, _fitting(mesh, devices))


def _fitting(mesh: MeshSection, devices: int) -> list[tuple[str, int]]:
    """The nearest sizes that fit: of data parallelism, or of the dimension that does not divide;
    none if several do not."""
    inner = mesh.tp * mesh.pp * mesh.cp
    if devices % inner == 0:
        return [("dp", devices // inner)]
    for name in ("tp", "pp", "cp"):
        size = getattr(mesh, name)
        rest = inner // size
        sizes = [n for n in range(1, devices + 1) if devices % (n * rest) == 0]
        if size > 1 and sizes:
            return [(name, fitting) for fitting in _around(sizes, size)]
    return []


def _around(sizes: list[int], target: int) -> list[int]:
    """The nearest sizes below and above."""
    below, above = [n for n in sizes if n < target], [n for n in sizes if n > target]
    return [*below[-1:], *above[:1]]
