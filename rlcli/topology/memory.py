"""What a recipe needs on each device: permanently for its roles, and at the peak of each call.

How much a role takes is determined by its backend's memory model (`rlcli.api.memory`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlcli import registry
from rlcli.api.architecture import Architecture
from rlcli.api.config import GenerationHyperparameters
from rlcli.api.memory import Generation, Kept, MemoryModel, Parts, PlacedRole, UnknownMemory
from rlcli.recipe.engine_layouts import arguments_of, whole_sequences
from rlcli.recipe.graph import tokens_of_microbatch
from rlcli.recipe.lengths import generation_of, keeps_groups, runs_a_model, written_beyond
from rlcli.recipe.role_sources import stored_roles
from rlcli.topology.groups import prompts_in_progress
from rlcli.topology.lengths import Lengths, group_size, lengths_of
from rlcli.topology.servers import RoleServers, bytes_on_ranks, plan_servers

if TYPE_CHECKING:
    from rlcli.recipe.schema import Call, Recipe
    from rlcli.topology.placement import Topology

GIB = 1 << 30
RESERVED = GIB
"""Part of a GPU's memory for CUDA itself and for communication: none of our estimates covers it."""


@dataclass(frozen=True)
class RoleMemory:
    """What a role keeps on each of its devices between calls."""

    role: str
    parameters: int
    """Parameters of the whole model; a number, not bytes."""
    resident: Kept
    away: int = 0
    """Bytes of it that are in host memory while other roles work."""

    @property
    def total(self) -> int:
        return self.resident.total


@dataclass(frozen=True)
class Peak:
    """The highest point of a call on the fullest of its devices, in bytes."""

    call: str
    """Name of the call, `load` or `checkpoint`."""
    role: str
    phase: str
    """load, generate, inference, update or checkpoint"""
    resident: int
    """Bytes held by all roles of the device."""
    parts: Parts
    within_percent: int = MemoryModel.WITHIN_PERCENT
    """How far the estimate may be off."""

    @property
    def total(self) -> int:
        return self.resident + self.parts.total

    def verdict(self, device_bytes: int, reserved: int) -> str:
        """ok: fits even if the estimate is off by the maximum; tight:
        fits by the estimate itself; else too much."""
        room = device_bytes - reserved
        if self.total * (100 + self.within_percent) <= room * 100:
            return "ok"
        return "tight" if self.total <= room else "too much"


@dataclass(frozen=True)
class MemoryPlan:
    """Memory use of the devices."""

    roles: tuple[RoleMemory, ...]
    peaks: tuple[Peak, ...]
    unknown: Mapping[str, str]
    """Role → why its memory is unknown. Peaks then leave it out."""
    lengths: Lengths
    servers: tuple[RoleServers, ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()
    """Roles, and what their backends say about their memory in addition."""

    @property
    def highest(self) -> int:
        return max((peak.total for peak in self.peaks), default=0)

    @property
    def within_percent(self) -> int:
        return max((peak.within_percent for peak in self.peaks), default=MemoryModel.WITHIN_PERCENT)


@dataclass(frozen=True)
class _Devices:
    """What is held on devices, by roles and by servers."""

    topology: Topology
    roles: Mapping[str, RoleMemory]
    by_servers: Counter[int]
    """Rank → bytes."""

    def ranks_of(self, role: str) -> list[int]:
        """One rank of a role for each distinct content of its devices."""
        return [rank for rank in self._unlike if role in self.topology.roles_on(rank)]

    @cached_property
    def _unlike(self) -> list[int]:
        seen: dict[tuple[tuple[str, ...], int], int] = {}
        for roles, rank in self.topology.first_ranks.items():
            seen.setdefault((roles, self.by_servers[rank]), rank)
        for rank in self.by_servers:
            seen.setdefault((self.topology.roles_on(rank), self.by_servers[rank]), rank)
        return sorted(seen.values())

    def roles_on(self, rank: int) -> list[str]:
        """The roles of a rank whose memory is known."""
        return [role for role in self.topology.roles_on(rank) if role in self.roles]

    def while_working(self, role: str) -> int:
        """Bytes held on the fullest device of a role, while it works:
        what it gathers is counted with the call."""
        return self.roles[role].total + max(
            self._of_neighbours(role, rank) for rank in self.ranks_of(role)
        )

    def _of_neighbours(self, role: str, rank: int) -> int:
        neighbours = [self.roles[name] for name in self.roles_on(rank) if name != role]
        return self.by_servers[rank] + sum(
            neighbour.total - neighbour.away for neighbour in neighbours
        )


def plan_memory(
    recipe: Recipe,
    topology: Topology,
    sizes: Mapping[str, Architecture | str],
    device_bytes: int | None = None,
) -> MemoryPlan:
    """Memory of a recipe laid out on its cluster; `sizes` has every role with weights, or why they
    are unknown. What servers reserve depends on `device_bytes`."""
    lengths = lengths_of(recipe)
    models, unknown = _memory_models(recipe, topology, sizes)
    roles = {role: _role_memory(recipe, role, model) for role, model in models.items()}
    servers = plan_servers(recipe, topology, models, device_bytes)
    devices = _Devices(topology, roles, bytes_on_ranks(servers, topology))
    peaks = _load_peaks(devices, models)
    peaks += _call_peaks(recipe, topology, devices, models, lengths)
    peaks += _snapshot_peak(recipe, devices, models, peaks)
    remarks = tuple((role, remark) for role, model in models.items() for remark in model.remarks())
    return MemoryPlan(tuple(roles.values()), tuple(peaks), unknown, lengths, servers, remarks)


def _call_peaks(
    recipe: Recipe,
    topology: Topology,
    devices: _Devices,
    models: Mapping[str, MemoryModel],
    lengths: Lengths,
) -> Iterator[Peak]:
    for name, call in recipe.graph.items():
        if call.model in models and call.call != "evaluate" and runs_a_model(recipe, call):
            model = models[call.model]
            parts = _parts(recipe, topology, call, model, lengths)
            resident = devices.while_working(call.model)
            yield Peak(name, call.model, _phase(call), resident, parts, model.WITHIN_PERCENT)


def _memory_models(
    recipe: Recipe, topology: Topology, sizes: Mapping[str, Architecture | str]
) -> tuple[dict[str, MemoryModel], dict[str, str]]:
    """Role → its memory model, and role → why it has none."""
    models: dict[str, MemoryModel] = {}
    unknown: dict[str, str] = {}
    for role, architecture in sizes.items():
        try:
            models[role] = memory_model(recipe, topology, role, architecture)
        except UnknownMemory as reason:
            unknown[role] = str(reason)
    return models, unknown


def _phase(call: Call) -> str:
    """What a call does to memory."""
    if call.call == "train_step":
        return "update"
    return "generate" if written_beyond(call) else call.call


def memory_model(
    recipe: Recipe, topology: Topology, role: str, sizes: Architecture | str
) -> MemoryModel:
    """The memory model of the role's backend. Raises UnknownMemory."""
    if isinstance(sizes, str):
        raise UnknownMemory(sizes)
    backend = recipe.models[role].engine
    model = registry.load_declared("backends", backend.type, "MEMORY")
    if model is None:
        raise UnknownMemory(f"the backend {backend.type} does not estimate it (MEMORY)")
    placed = PlacedRole(
        architecture=sizes,
        head=recipe.models[role].head,
        mesh=dataclasses.asdict(topology.placement(role).mesh),
        arguments=arguments_of(backend),
        calls={call.call for call in recipe.graph.values() if call.model == role},
        longest=lengths_of(recipe).sequence,
        device=recipe.cluster.device,
    )
    memory: MemoryModel = model(placed)
    return memory


def _role_memory(recipe: Recipe, role: str, model: MemoryModel) -> RoleMemory:
    resident = model.resident()
    away = _away(recipe, role, resident) if recipe.cluster.device != "cpu" else 0
    return RoleMemory(
        role, model.role.architecture.parameters(recipe.models[role].head), resident, away
    )


def _away(recipe: Recipe, role: str, resident: Kept) -> int:
    """How much is offloaded: everything if every call of the role offloads. Calls that do not train
    bring back only the weights: the rest, which training needs,
    is away if every training call offloads."""
    calls = [
        call
        for call in (*recipe.graph.values(), *recipe.train.eval.graph.values())
        if call.model == role and runs_a_model(recipe, call)
    ]
    trains = [call for call in calls if call.call == "train_step"]
    if calls and all(call.hooks.offload for call in calls):
        return resident.total
    if trains and all(call.hooks.offload for call in trains):
        return resident.total - resident.weights
    return 0


def _load_peaks(devices: _Devices, models: Mapping[str, MemoryModel]) -> list[Peak]:
    """Roles load one after another: the highest of these peaks."""
    peaks = []
    for role, model in models.items():
        for rank in devices.ranks_of(role):
            on_rank = devices.roles_on(rank)
            loaded = [
                devices.roles[neighbour].resident
                for neighbour in on_rank[: on_rank.index(role) + 1]
            ]
            resident = (
                sum(memory.weights + memory.buffers for memory in loaded) + devices.by_servers[rank]
            )
            peaks.append(Peak("load", role, "load", resident, model.load(), model.WITHIN_PERCENT))
    return _highest(peaks)


def _highest(peaks: Sequence[Peak]) -> list[Peak]:
    return [max(peaks, key=lambda peak: peak.total)] if peaks else []


def _snapshot_peak(
    recipe: Recipe, devices: _Devices, models: Mapping[str, MemoryModel], calls: Sequence[Peak]
) -> list[Peak]:
    """A checkpoint's copies, if device memory is host memory. They stay until they are written: if
    checkpoints are asynchronous, while calls of the next step run."""
    if recipe.cluster.device != "cpu" or not recipe.checkpoint.is_written:
        return []
    peaks, stored = [], stored_roles(recipe)
    for role in (role for role in stored if role in models):
        for rank in devices.ranks_of(role):
            on_rank = devices.roles_on(rank)
            amounts = [sum(devices.roles[neighbour].total for neighbour in on_rank)]
            if recipe.checkpoint.asynchronous:
                amounts += [
                    peak.total for peak in calls if peak.role in on_rank and peak.phase != "load"
                ]
            copies = sum(
                models[neighbour].snapshot() for neighbour in on_rank if neighbour in stored
            )
            peaks.append(
                Peak("checkpoint", role, "checkpoint", max(amounts), Parts(gathered=copies))
            )
    return _highest(peaks)


def _parts(
    recipe: Recipe, topology: Topology, call: Call, model: MemoryModel, lengths: Lengths
) -> Parts:
    rows = -(-recipe.train.prompts_per_step // topology.placement(call.model).mesh.dp)
    if call.call == "generate":
        settings = generation_of(recipe, call)
        most, at_once = int(settings["max_new_tokens"]), int(settings["max_concurrent_responses"])
        prompts = prompts_in_progress(recipe, topology, call.model)
        return model.generate(
            Generation(prompts, group_size(recipe), lengths.prompt, most, at_once)
        )
    if (beyond := written_beyond(call)) is not None:
        sequences, at_once = (
            rows * group_size(recipe),
            GenerationHyperparameters().max_concurrent_responses,
        )
        return model.generate(
            Generation(sequences, 1, lengths.sequence + beyond[0], beyond[1], at_once)
        )
    tokens, count = micro_batches_of(recipe, topology, call)
    return model.update(tokens, count) if call.call == "train_step" else model.inference(tokens)


def micro_batches_of(recipe: Recipe, topology: Topology, call: Call) -> tuple[int, int]:
    """(tokens of the largest micro-batch, number of them per rank) for the longest sequences of one
    optimizer step or one inference. A sample, which is a group of responses, is split only if the
    interface allows it. Where prefixes are shared, sequences that begin alike may fill the cap."""
    group, sample = group_size(recipe), lengths_of(recipe).sequence
    rows = _rows_of_update(recipe, topology, call)
    sample, rows = (group * sample, rows) if keeps_groups(call) else (sample, group * rows)
    cap = tokens_of_microbatch(recipe, call)
    least = min(rows, call.microbatches or recipe.train.microbatches)
    together = max(1, min(-(-rows // least), cap // sample))
    tokens = together * sample
    mesh = topology.placement(call.model).mesh
    if group > 1 and whole_sequences(recipe, call.model, mesh) is None:
        tokens = min(-(-rows // least) * sample, max(cap, sample))
    return tokens, -(-rows // together)


def _rows_of_update(recipe: Recipe, topology: Topology, call: Call) -> int:
    """The rows of a rank in one optimizer step or one inference."""
    rows = -(-recipe.train.prompts_per_step // topology.placement(call.model).mesh.dp)
    if call.call != "train_step":
        return rows
    return -(-rows // topology.batch.minibatches.get(call.model, 1))


def as_json(plan: MemoryPlan, device_bytes: int | None, reserved: int) -> dict[str, Any]:
    """The plan in bytes, with verdicts if the size of a device is given."""
    peaks = [_peak_json(peak) for peak in plan.peaks]
    if device_bytes:
        for peak, fields in zip(plan.peaks, peaks, strict=True):
            fields["verdict"] = peak.verdict(device_bytes, reserved)
    return {
        "within_percent": plan.within_percent,
        "longest_prompt": plan.lengths.prompt,
        "longest_sequence": plan.lengths.sequence,
        "lengths_are_assumed": plan.lengths.assumed,
        "held": [_role_json(role) for role in plan.roles],
        "servers": [_servers_json(servers) for servers in plan.servers],
        "peaks": peaks,
        "remarks": [{"role": role, "remark": remark} for role, remark in plan.remarks],
        "unknown": dict(plan.unknown),
    }


def _role_json(role: RoleMemory) -> dict[str, Any]:
    return {
        "role": role.role,
        "parameters": role.parameters,
        **vars(role.resident),
        "offloaded": role.away,
        "total": role.total,
    }


def _servers_json(servers: RoleServers) -> dict[str, Any]:
    return {
        "role": servers.role,
        "servers": len(servers.placed),
        "weights": servers.memory.weights,
        "cache": servers.memory.cache,
        "responses_at_once": servers.memory.at_once,
        "cache_per_token": servers.memory.per_token,
        "devices_of_each": max(
            (len(server.devices) * len(server.nodes) for server in servers.placed), default=0
        ),
        "sent_per_update": servers.memory.sent if servers.follows else 0,
        "seconds_per_update": servers.seconds_per_update if servers.follows else 0.0,
    }


def _peak_json(peak: Peak) -> dict[str, Any]:
    return {
        "call": peak.call,
        "role": peak.role,
        "phase": peak.phase,
        "held": peak.resident,
        **vars(peak.parts),
        "total": peak.total,
    }
