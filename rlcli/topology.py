"""Who computes what, where: ranks, roles, meshes and the arithmetic of a batch. Pure data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli import registry
from rlcli.errors import UsageError
from rlcli.recipe.mesh import Mesh, devices_of, mesh_of

if TYPE_CHECKING:
    from rlcli.recipe.schema import Component, Recipe


@dataclass(frozen=True)
class RolePlacement:
    """Where a role lives."""

    role: str
    ranks: tuple[int, ...]
    mesh: Mesh


@dataclass(frozen=True)
class WorkerGroup:
    """Roles that share the same devices."""

    ranks: tuple[int, ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class BatchArithmetic:
    """What one training step is made of."""

    prompts: int
    """Rows of the dataset."""
    responses_per_prompt: int
    """1 where nothing is generated."""
    sequences_per_rank: Mapping[str, tuple[int, int]]
    """Trained role → the fewest and the most sequences that one of its data-parallel ranks trains on."""
    minibatches: Mapping[str, int]
    """Trained role → optimizer steps that the batch is spread over."""
    max_tokens_per_microbatch: int
    steps: int | None
    epochs: int | None

    @property
    def sequences(self) -> int:
        """Sequences of one step, over all ranks."""
        return self.prompts * self.responses_per_prompt

    def lines(self) -> list[str]:
        """The arithmetic in words."""
        word = "prompts" if self.responses_per_prompt > 1 else "rows"
        made = (
            f"{self.prompts} prompts x {self.responses_per_prompt} responses = {self.sequences} sequences"
            if self.responses_per_prompt > 1
            else f"{self.prompts} {word}"
        )
        length = f"{self.steps} steps" if self.steps is not None else f"{self.epochs} epochs"
        lines = [f"{length} of {made}"]
        for role, (least, most) in self.sequences_per_rank.items():
            share = f"{least}" if least == most else f"{least} to {most}"
            parts = self.minibatches.get(role, 1)
            each = f"{self.sequences} sequences" if parts == 1 else f"{self.sequences} / {parts}"
            updates = f"{parts} update{'s' if parts > 1 else ''} of {each}"
            if parts > 1:
                updates += f" = {_quotient(self.sequences, parts)} sequences"
            lines.append(f"{role}: {updates}; {share} per rank")
        lines.append(f"micro-batches of at most {self.max_tokens_per_microbatch} tokens")
        return lines


@dataclass(frozen=True)
class Topology:
    """A recipe laid out on its cluster."""

    nodes: int
    devices_per_node: int
    device: str
    launch: str
    placements: tuple[RolePlacement, ...]
    groups: tuple[WorkerGroup, ...]
    batch: BatchArithmetic

    @property
    def world_size(self) -> int:
        """Worker processes, one per device."""
        return self.nodes * self.devices_per_node

    def placement(self, role: str) -> RolePlacement:
        """Where a role lives."""
        return next(p for p in self.placements if p.role == role)

    def roles_on(self, rank: int) -> tuple[str, ...]:
        """The roles that a rank holds a part of, in the recipe's order."""
        return tuple(p.role for p in self.placements if rank in p.ranks)


def plan_topology(recipe: Recipe) -> Topology:
    """Lay a validated recipe out. Raises DevicesError where a mesh does not fit."""
    world = recipe.cluster.nodes * recipe.cluster.devices_per_node
    placements: list[RolePlacement] = []
    for name, role in recipe.models.items():
        ranks = devices_of(name, role.devices, world)
        placements.append(RolePlacement(name, ranks, mesh_of(name, role.mesh, len(ranks))))
    groups: dict[tuple[int, ...], list[str]] = {}
    for placement in placements:
        groups.setdefault(placement.ranks, []).append(placement.role)
    return Topology(
        nodes=recipe.cluster.nodes,
        devices_per_node=recipe.cluster.devices_per_node,
        device=recipe.cluster.device,
        launch=recipe.launch.type,
        placements=tuple(placements),
        groups=tuple(WorkerGroup(ranks, tuple(roles)) for ranks, roles in groups.items()),
        batch=_batch(recipe, {p.role: p for p in placements}),
    )


def _batch(recipe: Recipe, placements: Mapping[str, RolePlacement]) -> BatchArithmetic:
    generates = any(call.call == "generate" for call in recipe.graph.values())
    group = recipe.generation.responses_per_prompt if generates else 1
    rows = recipe.train.prompts_per_step
    trained = {call.model: call for call in recipe.graph.values() if call.call == "train_step"}
    shares = {}
    for role in trained:
        dp = placements[role].mesh.dp
        shares[role] = (rows // dp * group, -(-rows // dp) * group)
    return BatchArithmetic(
        prompts=rows,
        responses_per_prompt=group,
        sequences_per_rank=shares,
        minibatches={role: _minibatches(call.interface) for role, call in trained.items()},
        max_tokens_per_microbatch=recipe.train.max_tokens_per_microbatch,
        steps=recipe.train.steps,
        epochs=recipe.train.epochs,
    )


def _minibatches(interface: Component) -> int:
    """The `minibatches` of an interface: given, or its default; 1 if it knows no such argument."""
    given = interface.args.get("minibatches")
    if given is None:
        try:
            arguments = registry.signature("interfaces", interface.type).arguments
        except UsageError:
            return 1
        given = next((argument.default for argument in arguments if argument.name == "minibatches"), 1)
    return given if isinstance(given, int) else 1


def _quotient(total: int, parts: int) -> str:
    return str(total // parts) if total % parts == 0 else f"{total // parts} or {total // parts + 1}"
