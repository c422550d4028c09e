"""Finds settings with which a recipe fits into memory, by trying them out.

Cheap settings are tried first; those that change numbers or the layout of roles only where these
are not enough. It advises as little as possible: no change can be left out or made milder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlcli import registry
from rlcli.api.architecture import Architecture
from rlcli.project import search_paths_kept
from rlcli.recipe.abilities import runs_calls_of
from rlcli.recipe.components import argument_of, declared, signature_of
from rlcli.recipe.engine_layouts import possible_meshes
from rlcli.recipe.expansion.rollouts import as_rollout
from rlcli.recipe.lengths import kept_together
from rlcli.recipe.parsing.tree import dotted
from rlcli.topology.lengths import group_size, lengths_of
from rlcli.topology.memory import MemoryPlan, memory_model, plan_memory
from rlcli.topology.placement import Topology, plan_topology

if TYPE_CHECKING:
    from rlcli.recipe.schema import Recipe, Role

MOST_DEVICES = 8
MOST_SETTINGS = 8
"""Changes that are advised together."""

Settings = dict[str, Any]
"""Key of the recipe → value."""

CHEAP, SHARDED, SMALLER, COSTLY = range(4)
"""Costs: the same numbers, a little slower; another engine for a role that is not trained; smaller
micro-batches; other numbers, another layout, another engine for a trained role, or more devices."""


@dataclass(frozen=True)
class Remedy:
    """Something that needs less memory."""

    cost: int
    values: tuple[Settings, ...]
    """The same change in different strengths, the mildest first."""

    @classmethod
    def of_key(cls, cost: int, key: str, *values: Any) -> Remedy:
        """Other values of one key, the mildest first."""
        return cls(cost, tuple({key: value} for value in values))


@dataclass(frozen=True)
class Fitting:
    """The question which settings make calls fit on devices."""

    recipe: Recipe
    topology: Topology
    sizes: Mapping[str, Architecture | str]
    device_bytes: int
    reserved: int

    @search_paths_kept()
    def advice(self, calls: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Call that needs too much → overrides with which it fits, none if nothing was enough. With
        those of all calls together everything fits, if that was found to be possible."""
        if not calls:
            return {}
        if (settings := self._search(calls)) is not None:
            return dict.fromkeys(calls, _overrides(settings))
        return {call: _overrides(self._search([call]) or {}) for call in calls}

    # -- the search --------------------------------------------------------------------------------

    def _search(self, calls: Collection[str]) -> Settings | None:
        """Settings with which all these calls fit, if there are any."""
        for cost in (CHEAP, SHARDED, SMALLER, COSTLY):
            chosen = self._greedy(
                calls, [change for change in self._changes if change.cost <= cost]
            )
            if chosen is not None:
                return self._mildest(calls, chosen)
        return None

    def _greedy(
        self, calls: Collection[str], changes: Sequence[Remedy]
    ) -> list[tuple[Remedy, int]] | None:
        """Changes with their strengths: at each turn the one that helps most."""
        chosen: list[tuple[Remedy, int]] = []
        excess = self._excess(calls, {})
        while excess and len(chosen) < MOST_SETTINGS:
            best: tuple[int, Remedy, int] | None = None
            for change in changes:
                strength = len(change.values) - 1
                left = self._excess(calls, _merged([*chosen, (change, strength)]))
                if left is not None and (best is None or left < best[0]):
                    best = left, change, strength
            if best is None or best[0] >= excess:
                return None
            excess = best[0]
            chosen.append(best[1:])
        return chosen if not excess else None

    def _mildest(self, calls: Collection[str], chosen: list[tuple[Remedy, int]]) -> Settings:
        """The chosen changes without those that are not needed, each no stronger than necessary."""
        for change, strength in reversed(chosen):
            index = chosen.index((change, strength))
            before, after = chosen[:index], chosen[index + 1 :]
            milder: list[list[tuple[Remedy, int]]] = [
                [],
                *([(change, smaller)] for smaller in range(strength)),
            ]
            candidates = ([*before, *choice, *after] for choice in milder)
            fitting = (
                candidate
                for candidate in candidates
                if self._excess(calls, _merged(candidate)) == 0
            )
            chosen = next(fitting, chosen)
        return _merged(chosen)

    def _excess(self, calls: Collection[str], settings: Settings) -> int | None:
        """Bytes that these calls need beyond what devices have, with these settings;
        None if they are impossible."""
        key = frozenset(settings.items())
        if key not in self._tried:
            self._tried[key] = self._memory(settings)
        if (memory := self._tried[key]) is None:
            return None
        peaks = [peak for peak in memory.peaks if peak.call in calls]
        return sum(max(0, peak.total - self.device_bytes + self.reserved) for peak in peaks)

    def _memory(self, settings: Settings) -> MemoryPlan | None:
        recipe = self.recipe
        for key, value in settings.items():
            recipe = with_value(recipe, key.split("."), value)
        cap = recipe.train.max_tokens_per_microbatch
        if cap < kept_together(recipe, group_size(recipe)) * lengths_of(recipe).sequence:
            return None
        topology = self.topology
        if any(key.startswith("cluster.") or ".mesh." in key for key in settings):
            try:
                topology = plan_topology(recipe)
            except ValueError:  # a role whose devices do not follow the cluster's
                return None
        memory = plan_memory(recipe, topology, self.sizes, self.device_bytes)
        return memory if memory.unknown.keys() <= self._unknown else None

    @cached_property
    def _tried(self) -> dict[frozenset[tuple[str, Any]], MemoryPlan | None]:
        return {}

    @cached_property
    def _unknown(self) -> set[str]:
        return set(plan_memory(self.recipe, self.topology, self.sizes, self.device_bytes).unknown)

    # -- what can be changed -----------------------------------------------------------------------

    @cached_property
    def _changes(self) -> list[Remedy]:
        """In order of increasing cost."""
        of_roles = (change for role in self.sizes for change in self._of_role(role))
        changes = [*self._of_the_step(), *of_roles, *self._devices()]
        return sorted(
            (change for change in changes if change.values), key=lambda change: change.cost
        )

    def _of_the_step(self) -> Iterator[Remedy]:
        """Fewer tokens and responses at once; roles that take turns."""
        recipe = self.recipe
        if any(call.call == "generate" for call in recipe.graph.values()):
            slots = recipe.generation.model_dump()["max_concurrent_responses"]
            fewer = _halved(slots, least=8)
            yield Remedy.of_key(CHEAP, "generation.max_concurrent_responses", *fewer)
        together = kept_together(recipe, group_size(recipe)) * lengths_of(recipe).sequence
        caps = _halved(recipe.train.max_tokens_per_microbatch, least=512)
        possible = [cap for cap in caps if cap >= together]
        is_on_cpu = recipe.cluster.device == "cpu"  # where small micro-batches are as fast
        cost = CHEAP if is_on_cpu else SMALLER
        yield Remedy.of_key(cost, "train.max_tokens_per_microbatch", *possible)
        if not is_on_cpu:
            for name in _calls_of_idle_roles(recipe):
                yield Remedy.of_key(CHEAP, f"graph.{name}.hooks.offload", True)
        if recipe.checkpoint.is_written and recipe.checkpoint.asynchronous:
            yield Remedy.of_key(CHEAP, "checkpoint.asynchronous", False)

    def _of_role(self, name: str) -> Iterator[Remedy]:
        role, prefix = self.recipe.models[name], f"models.{name}"
        size = self.sizes[name]
        if isinstance(size, str) or name in self._unknown:
            return
        for savings in memory_model(self.recipe, self.topology, name, size).savings():
            values = (
                {f"{prefix}.backend.args.{key}": value for key, value in saving.items()}
                for saving in savings
            )
            yield Remedy(CHEAP, tuple(values))
        yield from self._dtype(name, role)
        cost = COSTLY if name in self.recipe.trained_roles else SHARDED
        for engine in self._engines(name, role, size):
            yield Remedy.of_key(cost, f"{prefix}.backend.type", engine)
        if role.mesh.dp is None:
            yield from self._layouts(name, size)

    def _layouts(self, name: str, size: Architecture) -> Iterator[Remedy]:
        """Other layouts on the same devices that differ in at most two dimensions besides dp."""
        placed = self.topology.placement(name).mesh
        for mesh in possible_meshes(self.recipe, name, placed.size, size):
            changed = {
                f"models.{name}.mesh.{dimension}": degree
                for dimension, degree in asdict(mesh).items()
                if dimension != "dp" and degree != getattr(placed, dimension)
            }
            if 0 < len(changed) <= 2:
                yield Remedy(COSTLY, (changed,))

    def _dtype(self, name: str, role: Role) -> Iterator[Remedy]:
        """bfloat16. On GPUs, where `auto` computes in it anyway, a role that is not trained gets
        the same numbers."""
        if "dtype" not in _argument_names(role.engine.type):
            return
        dtype = argument_of("backends", role.engine, "dtype")
        averages = {call.hooks.copy_to for call in self.recipe.graph.values() if call.hooks.eta < 1}
        if dtype == "bfloat16" or name in averages:
            return
        is_same = dtype == "auto" and self.recipe.cluster.device != "cpu"
        cost = CHEAP if is_same else COSTLY
        yield Remedy.of_key(cost, f"models.{name}.backend.args.dtype", "bfloat16")

    def _engines(self, name: str, role: Role, size: Architecture) -> Iterator[str]:
        """Other backends that could run the role with its arguments and its mesh, and need no
        library that the recipe does not need anyway."""
        installed = {
            library
            for model in self.recipe.models.values()
            for library in declared("backends", model.engine.type, "REQUIRES") or ()
        }
        for kind in registry.names("backends"):
            if (
                kind != role.engine.type
                and declared("backends", kind, "MEMORY") is not None
                and declared("backends", kind, "SERVERS") is None
                and installed.issuperset(_declared(kind, "REQUIRES", ()))
                and self._runs_calls(kind, name)
                and self._takes(kind, name, size)
                and role.engine.args.keys() <= _argument_names(kind)
            ):
                yield kind

    def _runs_calls(self, kind: str, name: str) -> bool:
        """Whether a backend can do what the calls of a role ask, on the cluster's devices."""
        devices = _declared(kind, "DEVICES", ("cpu", "cuda"))
        runs_here = self.recipe.cluster.device in ("auto", *devices)
        return runs_here and runs_calls_of(kind, name, self.recipe)

    def _takes(self, kind: str, name: str, size: Architecture) -> bool:
        """Whether a backend can hold the model of a role, divided as now."""
        mesh = self.topology.placement(name).mesh
        families = _declared(kind, "FAMILIES", ()) or (size.model_type,)
        dimensions = _declared(kind, "DIMENSIONS", ("dp",))
        undivided = {"tp", "pp", "cp", "ep"}.difference(dimensions)
        return size.model_type in families and all(getattr(mesh, each) == 1 for each in undivided)

    def _devices(self) -> Iterator[Remedy]:
        devices, larger = self.recipe.cluster.devices_per_node, []
        while (devices := devices * 2) <= MOST_DEVICES:
            larger.append({"cluster.devices_per_node": devices, "launch.type": "local"})
        yield Remedy(COSTLY, tuple(larger))


def _merged(chosen: Sequence[tuple[Remedy, int]]) -> Settings:
    return {
        key: value for change, strength in chosen for key, value in change.values[strength].items()
    }


def _halved(value: int, least: int) -> list[int]:
    """Half the value, a quarter of it and so on, down to the least."""
    return [value >> halvings for halvings in range(1, (value // least).bit_length())]


def _declared(kind: str, constant: str, usual: Any) -> Any:
    """What a backend declares, or what holds for those that do not."""
    value = declared("backends", kind, constant)
    return usual if value is None else value


def _argument_names(kind: str) -> set[str]:
    return {argument.name for argument in signature_of("backends", kind).arguments}


def _calls_of_idle_roles(recipe: Recipe) -> list[str]:
    """Calls of roles that only score: these may be offloaded to host memory while others work."""
    evaluating = {call.model for call in recipe.train.eval.graph.values()}
    scoring = {call.model for call in recipe.graph.values() if call.call == "inference"}
    idle = {
        role
        for role in scoring - evaluating - {*recipe.trained_roles}
        if recipe.models[role].has_weights
    }
    return [
        name for name, call in recipe.graph.items() if call.model in idle and not call.hooks.offload
    ]


def with_value(node: Any, keys: Sequence[str], value: Any) -> Any:
    """A copy of a section, or of a mapping in it, with another value at a path."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, Mapping):
        return {**node, key: with_value(node.get(key, {}), rest, value)}
    return node.model_copy(update={key: with_value(getattr(node, key), rest, value)})


def _overrides(settings: Settings) -> tuple[str, ...]:
    """As they are typed: those of a rollout's role are keys of the rollout."""
    return tuple(
        f"{dotted(as_rollout(tuple(key.split('.'))))}={_text(value)}"
        for key, value in settings.items()
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
