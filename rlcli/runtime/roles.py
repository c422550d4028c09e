"""From a recipe's roles and calls to models with engines and to interfaces,
on the ranks that hold them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from rlcli import registry
from rlcli.api.config import FinetuneSpec, ModelBackendAbstraction, stable_seed
from rlcli.api.dataflow import MFCDef, updates_per_step
from rlcli.api.model import Model, ModelBackend, ModelInterface
from rlcli.api.model_source import ModelSource, open_source
from rlcli.checkpoint.families import family_of
from rlcli.checkpoint.huggingface import load_tokenizer
from rlcli.errors import ModelError, ResourceError
from rlcli.recipe.components import complete_arguments
from rlcli.recipe.graph import train_graph
from rlcli.recipe.mesh import Mesh
from rlcli.recipe.role_sources import prompt_role, tokenizer_source, weights_origin
from rlcli.recipe.schema import Recipe
from rlcli.topology import RolePlacement, Topology
from rlcli.topology.groups import server_folders

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Meshes = dict[str, Any]
"""Role → its DeviceMesh; a role on one rank has none."""

MESH_ORDER = ("dp", "pp", "cp", "tp")
"""The dimensions of a DeviceMesh, outermost first."""


def pick_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank. Raises ResourceError if the recipe requires one that does not exist."""
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ResourceError(
            (
                f"rank {local_rank} of this machine needs a CUDA device; there are "
                f"{torch.cuda.device_count()}"
            ),
            hint="set cluster.device=cpu, or fewer cluster.devices_per_node",
            code="R50",
        )
    return torch.device("cuda", local_rank)


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has computed everything that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_meshes(topology: Topology, device_type: str) -> Meshes:
    """Every rank makes every mesh, in the same order: making one is a collective of all ranks."""
    meshes: dict[tuple[tuple[int, ...], Mesh], Any] = {}
    for placement in topology.placements:
        layout = placement.ranks, placement.mesh
        if len(placement.ranks) > 1 and layout not in meshes:
            meshes[layout] = _device_mesh(placement, device_type)
    return {
        p.role: meshes[p.ranks, p.mesh] for p in topology.placements if (p.ranks, p.mesh) in meshes
    }


def _device_mesh(placement: RolePlacement, device_type: str) -> Any:
    """A mesh with all dimensions, including those of size 1. The ranks of a replica are adjacent,
    and within it the tensor-parallel ones: they communicate most,
    and adjacent ranks share a node."""
    from torch.distributed.device_mesh import DeviceMesh

    shape = tuple(getattr(placement.mesh, name) for name in MESH_ORDER)
    return DeviceMesh(
        device_type, torch.tensor(placement.ranks).view(shape), mesh_dim_names=MESH_ORDER
    )


def build_roles(
    recipe: Recipe,
    topology: Topology,
    rank: int,
    device: torch.device,
    meshes: Meshes,
    spec: FinetuneSpec,
    run_dir: Path | None = None,
) -> dict[str, tuple[Model, ModelBackend]]:
    """The roles that live on `rank`, initialised by their backends.
    `run_dir` has the folders of their servers."""
    updates = updates_per_step(train_graph(recipe))
    built = {}
    for name in topology.roles_on(rank):
        model, backend = describe_role(recipe, name, device)
        model.device_mesh = meshes.get(name)
        model.expert_ranks = topology.placement(name).mesh.ep
        if run_dir is not None:
            model.server_folders = server_folders(recipe, topology, name, rank, run_dir)
        own_spec = replace(spec, updates_per_step=updates.get(name, 1))
        built[name] = backend.initialize(model, own_spec), backend
    return built


def describe_role(recipe: Recipe, name: str, device: torch.device) -> tuple[Model, ModelBackend]:
    """A role that its backend has not initialised yet."""
    role = recipe.models[name]
    backend = registry.make_backend(ModelBackendAbstraction(role.engine.type, role.engine.args))
    tokenizer = role_tokenizer(recipe, name)
    data_role, data_tokenizer = prompt_role(recipe), tokenizer
    if tokenizer_source(recipe, name) != tokenizer_source(recipe, data_role):
        data_tokenizer = role_tokenizer(recipe, data_role)
    save_dtype = recipe.checkpoint.save_dtype
    source = family = None
    if role.has_weights and backend.READS_SOURCE:
        source = role_source(recipe, name, tokenizer)
        family = family_of(source.config.model_type)
    model = Model(
        name=name,
        module=None,
        tokenizer=tokenizer,
        device=device,
        seed=recipe.seed,
        source=source,
        family=family,
        save_dtype=None if save_dtype == "auto" else getattr(torch, save_dtype),
        data_tokenizer=data_tokenizer,
        call_deadline=recipe.launch.step_deadline,
    )
    return model, backend


def role_source(recipe: Recipe, name: str, tokenizer: PreTrainedTokenizerBase) -> ModelSource:
    """Where a role's weights come from. Roles with the same origin start alike. Raises ModelError,
    also for a model without a value head if nothing trains one."""
    origin = weights_origin(recipe, name)
    start = recipe.models[origin].path or recipe.models[origin].scratch
    assert start is not None
    source = open_source(
        start,
        head=recipe.models[name].head,
        tokenizer=tokenizer,
        seed=stable_seed(recipe.seed, origin),
    )
    if source.lacks_head and name not in recipe.changing_roles:
        raise ModelError(
            f"role {name}, which nothing trains, would give every text the value 0: the weights in "
            f"{start} have no value head that transformers knows",
            hint=f"set models.{origin}.path to a reward model, with a tensor score.weight",
        )
    return source


def role_tokenizer(recipe: Recipe, name: str) -> PreTrainedTokenizerBase:
    """A role's tokenizer: its own, that of its weights, or, without weights,
    that of the first role that has one."""
    source = tokenizer_source(recipe, name)
    if source.startswith("builtin:"):
        dataset: Any = registry.load("datasets", source.removeprefix("builtin:"))
        return dataset.make_tokenizer()
    return load_tokenizer(source)


class Interfaces:
    """One per role, type and arguments, so that calls of one role share its state. Calls of a step
    that share state have the same arguments; an evaluation call may have others,
    and gets the current state."""

    def __init__(self, training: Sequence[MFCDef], evaluating: Sequence[MFCDef]):
        self.evaluating = {mfc.name for mfc in evaluating}
        self._stateful = {
            (mfc.model_name, mfc.interface_impl.type_): mfc for mfc in reversed(training)
        }
        """The first training call of each role and type."""
        self._interfaces: dict[str, ModelInterface] = {}

    def of(self, mfc: MFCDef) -> ModelInterface:
        """The interface of a call."""
        described = mfc.interface_impl
        args = complete_arguments("interfaces", described.type_, described.args)
        name = f"{mfc.model_name}/{described.type_}/{args!r}"
        if name not in self._interfaces:
            # calls may run side by side
            self._interfaces.setdefault(name, registry.make_interface(described))
        interface = self._interfaces[name]
        trained = self._stateful.get((mfc.model_name, described.type_))
        if (
            mfc.name in self.evaluating
            and trained is not None
            and (stateful := self.of(trained)) is not interface
        ):
            interface.load_state_dict(stateful.state_dict())
        return interface

    def clear(self) -> None:
        self._interfaces.clear()


def seed_global_streams(seed: int, call: str, step: int, rank: int) -> None:
    """Seed the global random streams, which rlcli itself never uses, so that a component that does
    draws the same numbers in every run."""
    of_call = stable_seed(seed, call, step, rank)
    torch.manual_seed(of_call % 2**63)
    numpy.random.seed(of_call % 2**32)
    random.seed(of_call)
