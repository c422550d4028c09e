"""What a plan says about memory and disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlcli.topology.memory import GIB, Peak
from rlcli.topology.servers import BYTES_PER_SECOND
from rlcli.topology.text_format import aligned, amount, duration, size, wrapped

if TYPE_CHECKING:
    from rlcli.recipe.servers import PlacedServer
    from rlcli.topology.memory import RoleMemory
    from rlcli.topology.report import Plan
    from rlcli.topology.servers import RoleServers

SHOWN_SERVERS = 4
"""Servers of a role whose devices are listed."""


def memory_lines(plan: Plan, with_roles: bool) -> Iterator[str]:
    """Peaks of calls, and what each role holds throughout."""
    memory = plan.memory
    for why in dict.fromkeys(memory.unknown.values()):
        roles = ", ".join(role for role, reason in memory.unknown.items() if reason == why)
        yield from wrapped(f"memory of {roles} is unknown: {why}", rest="  ")
    if not memory.peaks:
        return
    without = " without those roles" if memory.unknown else ""
    unit, name = (GIB, "GiB") if memory.highest >= GIB else (GIB >> 10, "MiB")
    yield f"memory of a device{without}, in {name}, after the first optimizer step"
    yield from _holdings(plan, unit) if with_roles else ()
    yield from _peaks(plan, unit)
    for role, remark in memory.remarks:
        yield from wrapped(f"{role}: {remark}", "  ", "    ")
    yield from _about_servers(plan)
    yield from _device(plan)


def _holdings(plan: Plan, unit: int) -> Iterator[str]:
    """What each role holds throughout, as a table."""
    rows = [_role(role, unit) for role in plan.memory.roles]
    rows += [_server(servers, unit) for servers in plan.memory.servers if servers.on_devices]
    yield from aligned(["held", "weights", "optimizer", "buffers", "total"], rows, range(1, 5))
    yield ""


def _peaks(plan: Plan, unit: int) -> Iterator[str]:
    """The peak of each call, as a table."""
    head = ["peak of", "held", "grads", "gathered", "activ.", "kv", "logits", "total"]
    rows = [_peak(peak, unit) for peak in plan.memory.peaks]
    if plan.device_bytes:
        head.append("verdict")
        for row, peak in zip(rows, plan.memory.peaks, strict=True):
            row.append(plan.verdict(peak))
    yield from aligned(head, rows, range(1, 8))
    yield (
        f"  for the longest sequences, within about {plan.memory.within_percent} % "
        "(measured on CPUs, 1 and 2 ranks)"
    )


def _device(plan: Plan) -> Iterator[str]:
    """What a device has, and what would make the calls fit that do not."""
    if not plan.device_bytes:
        return
    spare = f", {size(plan.reserved)} of it reserved for CUDA" if plan.reserved else ""
    yield f"  a device has {size(plan.device_bytes)}{spare}"
    for calls, keys in _same_advice(plan):
        yield from _advice(calls, keys)


def _role(role: RoleMemory, unit: int) -> list[str]:
    resident, away = role.resident, ""
    if role.away:
        away = " (offloaded)" if role.away == role.total else " (optimizer offloaded)"
    columns = (resident.weights, resident.optimizer, resident.buffers, resident.total)
    return [f"{role.role}{away}", *(amount(count, unit) for count in columns)]


def _peak(peak: Peak, unit: int) -> list[str]:
    name = f"load {peak.role}" if peak.phase == "load" else peak.call
    parts = peak.parts
    columns = (
        peak.resident,
        parts.gradients,
        parts.gathered,
        parts.activations,
        parts.cache,
        parts.logits,
        peak.total,
    )
    return [name, *(amount(column, unit) for column in columns)]


def _server(servers: RoleServers, unit: int) -> list[str]:
    taken = servers.memory
    return [
        f"{servers.role} server",
        *(amount(column, unit) for column in (taken.weights, 0, taken.cache, taken.total)),
    ]


def _about_servers(plan: Plan) -> Iterator[str]:
    """What the table of memory leaves out, and what is sent when weights change."""
    for servers in plan.memory.servers:
        for remark in _remarks(servers, plan):
            yield from wrapped(f"servers of {servers.role}{remark}", "  ", "    ")
        if servers.follows:
            yield from wrapped(_weights_sent(servers), "  ", "    ")


def _remarks(servers: RoleServers, plan: Plan) -> Iterator[str]:
    yield f": {_where_and_how_many(servers, plan)}"
    if not servers.placed:
        yield " are not started by the run; their memory is not counted"
    elif not servers.on_devices:
        yield " compute on processors; their memory is not counted"
    elif plan.device_bytes is None:
        yield ": --device-memory also counts what they reserve for their cache"
    if servers.do_not_fit(plan.topology.devices_per_node):
        yield " would share devices, or need more than a node has, if these are GPUs"


def _weights_sent(servers: RoleServers) -> str:
    count, taken = len(servers.placed), servers.memory
    each = f"each of {count} servers" if count > 1 else "each server"
    time = f"about {duration(servers.seconds_per_update)} at {BYTES_PER_SECOND / 1e9:g} GB/s"
    return (
        f"weights to {servers.role}: {size(taken.sent)} to {each} per update, {time}; up to "
        f"{size(2 * taken.sent)} on disk per rank of {servers.role} (weights_folder)"
    )


def _where_and_how_many(servers: RoleServers, plan: Plan) -> str:
    """`2, on devices 0-1 and 2-3 of node 0; each rank has up to 64 responses at once`."""
    count, taken = len(servers.placed), servers.memory
    rank_servers = Counter(server.rank for server in servers.placed)
    of_each = max(rank_servers.values(), default=1)
    longest = plan.memory.lengths.sequence
    room = size(-(-taken.at_once // of_each) * longest * taken.per_token)
    places = f"{count}, " if count else ""
    if servers.on_devices:
        shown = [_devices_of(server) for server in servers.placed[:SHOWN_SERVERS]]
        if count > len(shown):
            shown.append(f"{count - len(shown)} on other devices")
        places += f"on {'; '.join(shown)}; "
    return (
        f"{places}up to {taken.at_once} responses at once for each rank, whose keys and values "
        f"take up to {room} on each device at {longest} tokens"
    )


def _devices_of(server: PlacedServer) -> str:
    """`devices 0-3 of node 0`."""
    first, last = server.devices[0], server.devices[-1]
    devices = f"device {first}" if first == last else f"devices {first}-{last}"
    of = f"node {server.nodes[0]}"
    if len(server.nodes) > 1:
        of = f"nodes {server.nodes[0]}-{server.nodes[-1]}"
    return f"{devices} of {of}"


def _same_advice(plan: Plan) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """Calls that the same keys help, and these keys."""
    for keys in dict.fromkeys(plan.advice.values()):
        yield [call for call, others in plan.advice.items() if others == keys], keys


def _advice(calls: Sequence[str], keys: Sequence[str]) -> Iterator[str]:
    if keys:
        text = f"{', '.join(calls)}: would fit with {' '.join(keys)}"
    else:
        tried = "engines, layouts, dtypes, fewer tokens and responses at once"
        text = (
            f"{', '.join(calls)}: none of the settings tried ({tried}) makes this fit; use "
            "more or larger devices"
        )
    yield from wrapped(text, first="  ", rest="    ")


def storage_lines(plan: Plan) -> Iterator[str]:
    storage = plan.storage
    yield ""
    free = f"; {size(storage.free)} free in {storage.folder}" if storage.free is not None else ""
    if storage.checkpoint is None:
        yield f"the size of a checkpoint is unknown{free}"
        return
    yield (
        f"disk: checkpoints of {size(storage.checkpoint)}, up to {storage.checkpoints_kept} at "
        f"once, and {size(storage.models)} of models"
    )
    yield f"      {size(storage.needed)} in all{free}{': not enough' if storage.is_short else ''}"
