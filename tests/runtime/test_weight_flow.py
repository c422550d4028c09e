"""Weights between roles on different ranks, from any layout to any other."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rlcli.api.config import ModelVersion
from rlcli.recipe.mesh import Mesh
from rlcli.runtime import weight_flow
from rlcli.runtime.roles import MESH_ORDER
from rlcli.runtime.weight_flow import WeightChannel, WeightTransfer
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS, train
from rlcli.testing.pretend_cuda import pretend_cuda
from rlcli.testing.ranks import RankError, run_on_ranks
from rlcli.topology import RolePlacement

CPU = torch.device("cpu")
LAYOUTS = {
    "actor": ("fsdp", {}, (0, 1), {"dp": 2}),
    "sharded": ("fsdp", {}, (2, 3), {"tp": 2}),
    "staged": ("megatron", {}, (0, 3), {"pp": 2}),
    "divided": ("deepspeed", {"zero_stage": 3}, (1, 2), {"dp": 2}),
    "rollout": ("inference", {}, (3,), {"dp": 1}),
}  # fmt: skip


def placement(role):
    _, _, ranks, mesh = LAYOUTS[role]
    return RolePlacement(role, ranks, Mesh(**mesh))


def engine(role, rank):
    """Of random weights that differ from role to role. All ranks make all meshes."""
    backend, settings, ranks, degrees = LAYOUTS[role]
    shape = [degrees.get(name, 1) for name in MESH_ORDER]
    mesh = DeviceMesh("cpu", torch.tensor(ranks).view(shape), mesh_dim_names=MESH_ORDER) if len(ranks) > 1 else None
    if rank not in ranks:
        return None

    class Checks(BackendContract):
        name = backend
        args = settings
        device = "cuda:0" if backend == "megatron" else "cpu"

    wanted = {} if backend == "inference" else SETTINGS
    return Checks().engine("llama", mesh=mesh, seed=len(role), dtype="float32", **wanted)


def fingerprint(engine):
    """Bits of all weights, by name."""
    whole = ((name, tensor.cpu()) for name, tensor in engine.whole_parameters())
    return {name: tensor.view(torch.int32).sum(dtype=torch.int64).item() for name, tensor in whole}


def copy(source, target, engines, rank, bucket=weight_flow.BUCKET, eta=1.0):
    channel = WeightChannel(placement(source), placement(target))
    model = SimpleNamespace(module=engines[source], version=ModelVersion(0, 3, 3)) if engines[source] else None
    if model is None and engines[target] is None:
        return None
    transfer = WeightTransfer(channel, rank, CPU, model, bucket)
    if engines[target] is None:
        transfer.finish()
        return None
    engines[target].take_parameters(transfer, eta)
    return transfer.version.global_step


def test_any_layout_to_any_layout():
    """Sharded by rows, by tensor parallelism, by stages on a device, into ranges, and whole; ranks that are apart, and
    some that are in both."""

    def work(rank):
        with pretend_cuda():
            return flow(rank)

    def flow(rank):
        engines = {role: engine(role, rank) for role in LAYOUTS}
        if engines["actor"] is not None:
            train(engines["actor"], 0)
        before = {role: fingerprint(one) for role, one in engines.items() if one is not None}
        chain = ["actor", "sharded", "staged", "divided", "rollout"]
        versions = [copy(*pair, engines, rank, bucket=2000) for pair in pairwise(chain)]
        after = {role: fingerprint(one) for role, one in engines.items() if one is not None}
        return {"before": before, "after": after, "versions": versions}

    told = run_on_ranks(4, work)
    actor = told[0]["before"]["actor"]
    assert actor != told[3]["before"]["rollout"]
    for one in told:
        for role, weights in one["after"].items():
            assert weights == actor, role
    assert [one["versions"] for one in told] == [
        [None, 3, None, None], [None, None, 3, None], [3, None, 3, None], [3, 3, None, 3],
    ]  # fmt: skip


def test_a_moving_average_between_ranks():
    def row(engine):
        """The embedding of a token, which is random."""
        return None if engine is None else dict(engine.whole_parameters())["model.embed_tokens.weight"][3].tolist()

    def work(rank):
        engines = {role: engine(role, rank) for role in ("actor", "rollout")}
        before = {role: row(one) for role, one in engines.items()}
        copy("actor", "rollout", engines, rank, eta=0.25)
        return {"before": before, "mixed": row(engines["rollout"])}

    told = run_on_ranks(4, work)
    actor, rollout = torch.tensor(told[0]["before"]["actor"]), torch.tensor(told[3]["before"]["rollout"])
    assert torch.tensor(told[3]["mixed"]) == pytest.approx(0.25 * actor + 0.75 * rollout, abs=1e-6)
    assert (actor - rollout).abs().max() > 1e-3


def test_a_bucket_that_was_damaged_on_the_way_is_noticed():
    def work(rank):
        engines = {role: engine(role, rank) for role in ("actor", "rollout")}
        broadcast = dist.broadcast

        def damaged(tensor, *args, **kwargs):
            broadcast(tensor, *args, **kwargs)
            if rank == 3 and tensor.is_floating_point():
                tensor[len(tensor) // 2] += 1e-3

        dist.broadcast = damaged
        copy("actor", "rollout", engines, rank)
        return {}

    with pytest.raises(RankError, match=r"rank 3: .*weights did not arrive as they were sent"):
        run_on_ranks(4, work)
