"""Checks that roles fit on the cluster's devices, and their meshes on the roles' devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlcli import registry
from rlcli.recipe.abilities import runs_calls_of
from rlcli.recipe.components import declared
from rlcli.recipe.engine_layouts import layout_problems, what_it_can
from rlcli.recipe.expansion.rollouts import as_rollout
from rlcli.recipe.mesh import DIMENSIONS, DevicesError, Mesh, devices_of, mesh_of, world_of
from rlcli.recipe.parsing.tree import KeyPath, dotted
from rlcli.recipe.schema import Cluster, MeshSection, Role
from rlcli.recipe.servers import PlacedServer, placed_servers, servers_on
from rlcli.recipe.validation.semantics.notes import Notes, in_words
from rlcli.units import count

CLUSTER: tuple[KeyPath, ...] = (("cluster", "nodes"), ("cluster", "devices_per_node"))


def check(notes: Notes) -> None:
    try:
        world = world_of(notes.recipe.cluster)
    except DevicesError as error:
        notes.note("R49", str(error), notes.first_set(*CLUSTER), needs=CLUSTER)
        return
    _processes(notes, world)
    replicas = {name: _role(notes, name, role, world) for name, role in notes.recipe.models.items()}
    _prompts(notes, replicas)


def _processes(notes: Notes, world: int) -> None:
    if notes.recipe.launch.type == "inline" and world > 1:
        message = f"launch inline runs one process, but the cluster has {world} devices"
        launch = ("launch", "type")
        key = launch if notes.is_set(("launch",)) else CLUSTER[1]
        notes.note("R49", message, key, "use launch=local", needs=[*CLUSTER, launch])


def _prompts(notes: Notes, replicas: Mapping[str, int]) -> None:
    """Every data-parallel rank needs a prompt. `replicas`: role → its data-parallel ranks."""
    rows = notes.recipe.train.prompts_per_step
    wide = {name: ranks for name, ranks in replicas.items() if ranks > rows}
    if not wide:
        return
    most = max(wide.values())
    has, fewer = ("have" if len(set(wide.values())) == 1 else "have up to"), "fewer devices"
    if len(wide) == 1:
        has, fewer = (
            "has",
            f"{notes.key(('models', next(iter(wide)), 'devices'))}=0-{rows - 1}",
        )
    message = (
        f"train.prompts_per_step is {rows}, but {in_words(wide)} {has} {most} data-parallel ranks"
    )
    notes.note(
        "R49",
        message,
        ("train", "prompts_per_step"),
        f"use at least {most}, or {fewer}",
        needs=CLUSTER,
    )


def _role(notes: Notes, name: str, role: Role, world: int) -> int:
    """Check the devices of a role; returns its number of data-parallel ranks,
    0 if they are wrong or in doubt."""
    where = ("models", name)
    layout = [(*where, "mesh"), (*where, "devices")]
    backend = role.engine.type
    if _unsupported(notes, name, backend, role.mesh):
        return 0
    try:
        ranks = devices_of(name, role.devices, world)
        mesh = mesh_of(name, role.mesh, len(ranks))
    except DevicesError as error:
        _does_not_fit(notes, name, error, layout)
        return 0
    is_known = declared("backends", backend, "DIMENSIONS") is not None
    if is_known and not _unsupported(notes, name, backend, mesh):
        _layout(notes, name, mesh)
    _device_of(notes, name, backend)
    _servers(notes, name, role, ranks)
    _one_per_rank(notes, name, role, len(ranks))
    return 0 if any(map(notes.is_doubtful, layout)) else mesh.dp


def _layout(notes: Notes, name: str, mesh: Mesh) -> None:
    """What the engine cannot do with the mesh, whatever its model."""
    section = ("models", name)
    for problem in layout_problems(notes.recipe, name, mesh):
        hint = what_it_can(notes.recipe, name, mesh, problem)
        needs = [*CLUSTER, (*section, "mesh"), (*section, "backend", "type")]
        notes.note("R49", problem.message, (*section, *problem.key), hint, needs=needs)


def _does_not_fit(notes: Notes, name: str, error: DevicesError, layout: Sequence[KeyPath]) -> None:
    """Report impossible devices or mesh of a role, with the settings that would fit."""
    code = "R50" if error.needs and error.key == "devices" else "R49"
    mesh = notes.key(("models", name, "mesh"))
    settings = [f"{mesh}.{dimension}={size}" for dimension, size in error.fitting]
    if error.needs and _may_have(notes, error.needs):
        launch = "launch=local " if notes.recipe.launch.type == "inline" else ""
        settings.append(f"{launch}cluster.devices_per_node={error.needs}")
    hint = f"use {', or '.join(settings)}" if settings else None
    path = ("models", name, error.key)
    notes.note(code, str(error), path, hint, needs=[*CLUSTER, *layout])


def _may_have(notes: Notes, devices: int) -> bool:
    """Whether one node could have that many devices without a change of another role."""
    laid_out = [role for role in notes.recipe.models.values() if role.devices or role.mesh.dp]
    return (
        notes.recipe.cluster.nodes == 1
        and len(laid_out) < 2
        and devices <= notes.recipe.train.prompts_per_step
    )


def _unsupported(notes: Notes, name: str, backend: str, mesh: Mesh | MeshSection) -> bool:
    """Report dimensions of a role's mesh that its backend does not support."""
    able = declared("backends", backend, "DIMENSIONS")
    if not isinstance(able, tuple):
        return False
    sizes = {dimension: getattr(mesh, dimension) or 1 for dimension in DIMENSIONS}
    wrong = [dimension for dimension, size in sizes.items() if size > 1 and dimension not in able]
    for dimension in wrong:
        path = ("models", name, "mesh", dimension)
        setting = f"{notes.key(path)}={sizes[dimension]}"
        message = f"the backend {backend} of {name} does not support {dimension} ({setting})"
        hint = _supported(notes, name, able, dimension)
        notes.note("R49", message, path, hint, needs=[("models", name, "backend", "type")])
    return bool(wrong)


def _supported(notes: Notes, name: str, able: Sequence[str], dimension: str) -> str:
    """What a role's backend supports, and which backends support the dimension."""
    supports = f"it supports {', '.join(able) or 'one device'}"
    others = _engines_with(notes, name, dimension)
    return (
        f"{supports}; {dimension} works with the backend {' or '.join(others)}"
        if others
        else supports
    )


def _engines_with(notes: Notes, name: str, dimension: str) -> list[str]:
    """Backends that support a dimension of the mesh, and what calls ask of the role."""
    return [
        backend
        for backend in registry.names("backends")
        if dimension in (declared("backends", backend, "DIMENSIONS") or ())
        and runs_calls_of(backend, name, notes.recipe)
    ]


def _device_of(notes: Notes, name: str, backend: str) -> None:
    device, able = notes.recipe.cluster.device, declared("backends", backend, "DEVICES")
    if device != "auto" and isinstance(able, tuple) and device not in able:
        message = (
            f"the backend {backend} of {name} runs on {' and '.join(able)} only, not on {device}"
        )
        needs = [("cluster", "device"), ("models", name, "backend", "type")]
        key = notes.key(needs[1])
        notes.note("R49", message, ("cluster", "device"), f"choose another {key}", needs=needs)


def _one_per_rank(notes: Notes, name: str, role: Role, ranks: int) -> None:
    """Each rank needs an entry of its own in the arguments that the backend declares in
    PER_RANK."""
    path = ("models", name, "backend")
    for argument in declared("backends", role.engine.type, "PER_RANK") or ():
        entries = role.engine.args.get(argument)
        if isinstance(entries, list | tuple) and 0 < len(entries) < ranks:
            text = (
                f"{name} has {ranks} ranks, each of which needs an entry of {argument}, but "
                f"there are {len(entries)}"
            )
            key = notes.key((*path[:-1], "devices"))
            needs = [*CLUSTER, (*path[:-1], "devices"), (*path, "type")]
            notes.note(
                "R49",
                text,
                (*path, "args", argument),
                f"add some, or give it fewer ranks: {key}",
                needs=needs,
            )


def _servers(notes: Notes, name: str, role: Role, ranks: Sequence[int]) -> None:
    """Servers need nodes that exist, and devices of their own,
    since each takes most of a device's memory."""
    cluster = notes.recipe.cluster
    servers = placed_servers(role, ranks, cluster.devices_per_node)
    if any(server.nodes[-1] >= cluster.nodes for server in servers):
        _beyond_last_node(notes, name, len(servers[0].nodes))
    elif cluster.device == "cuda" and servers:  # elsewhere they may compute on processors
        _devices_of_servers(notes, name, role, ranks, servers)


def _beyond_last_node(notes: Notes, name: str, nodes: int) -> None:
    message = (
        f"each server of {name} is spread over {nodes} nodes, beginning at that of its "
        "rank, but the run has "
    )
    message += count(notes.recipe.cluster.nodes, "node")
    argument = ("models", name, "backend", "args", "nodes")
    devices = ("models", name, "devices")
    hint = f"add nodes, or give {name} ranks on earlier ones: {dotted(as_rollout(devices))}"
    notes.note("R49", message, argument, hint, needs=[*CLUSTER, devices, argument])


def _devices_of_servers(
    notes: Notes, name: str, role: Role, ranks: Sequence[int], servers: Sequence[PlacedServer]
) -> None:
    problem = _lack_of_devices(notes.recipe.cluster, servers)
    if problem is None:
        return
    each, spread = max(len(server.devices) for server in servers), len(servers[0].nodes)
    first = _first_ranks(notes.recipe.cluster, each * len(servers) // len(ranks), spread)
    hint = _room_for_servers(notes, name, role, first) or _more_nodes(notes, name, each, spread)
    hint = hint or "start fewer servers, lower tp, or use other devices"
    backend = ("models", name, "backend")
    where = (*backend, "args", "tp") if each > 1 else backend
    needs = [*CLUSTER, ("cluster", "device"), ("models", name, "devices"), backend]
    notes.note("R49", f"{name} starts {_in_words(servers)}, {problem}", where, hint, needs=needs)


def _in_words(servers: Sequence[PlacedServer]) -> str:
    """`2 servers of 4 devices on each of 2 nodes`."""
    devices, nodes = max(len(server.devices) for server in servers), len(servers[0].nodes)
    spread = f" on each of {nodes} nodes" if nodes > 1 else ""
    return f"{count(len(servers), 'server')} of {count(devices, 'device')}{spread}"


def _lack_of_devices(cluster: Cluster, servers: Sequence[PlacedServer]) -> str | None:
    users = servers_on(servers)
    (node, device), most = max(users.items(), key=lambda item: item[1], default=((0, 0), 0))
    if most > 1:
        return f"and {most} of them would share device {device} of node {node}"
    if any(device >= cluster.devices_per_node for _, device in users):
        return f"beginning at that of its rank, but a node has {cluster.devices_per_node}"
    return None


def _room_for_servers(notes: Notes, name: str, role: Role, ranks: Sequence[int]) -> str | None:
    """How each server gets devices of its own, if it does so at these ranks."""
    if not ranks:
        return None
    servers = placed_servers(role, ranks, notes.recipe.cluster.devices_per_node)
    if max(servers_on(servers).values()) > 1:
        return None
    key = dotted(as_rollout(("models", name, "devices")))
    shown = ",".join(map(str, ranks[:4]))
    return f"{key}={shown}{',…' if len(ranks) > 4 else ''} leaves room for each"


def _more_nodes(notes: Notes, name: str, devices: int, nodes: int) -> str | None:
    """How a server that needs more devices of each of its `nodes` than these have gets them, if it
    can."""
    cluster = notes.recipe.cluster
    enough = math.ceil(devices * nodes / cluster.devices_per_node)
    if devices <= cluster.devices_per_node or enough > cluster.nodes:
        return None
    key = notes.key(("models", name, "backend", "args", "nodes"))
    return f"{key}={enough} spreads each server over {enough} nodes"


def _first_ranks(cluster: Cluster, devices: int, nodes: int) -> list[int]:
    """The ranks at which a block of `devices` devices on each of `nodes` nodes begins."""
    size = cluster.devices_per_node
    first_nodes = range(0, cluster.nodes - nodes + 1, nodes)
    return [
        node * size + first
        for node in first_nodes
        for first in range(0, size - devices + 1, devices)
    ]
