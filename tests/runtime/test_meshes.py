"""The process groups of a role, dimension by dimension."""

import torch.distributed as dist

from rlcli.recipe.mesh import Mesh
from rlcli.runtime.roles import make_meshes
from rlcli.testing.ranks import run_on_ranks
from rlcli.topology import RolePlacement


class Placed:
    """As much of a topology as meshes need."""

    def __init__(self, *placements):
        self.placements = placements


def groups_of(mesh):
    return {
        name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names
    }


def test_a_mesh_has_every_dimension_and_tensor_parallel_ranks_are_neighbours():
    topology = Placed(
        RolePlacement("actor", (0, 1, 2, 3), Mesh(dp=2, tp=2)),
        RolePlacement("critic", (0, 1, 2, 3), Mesh(dp=2, tp=2)),
        RolePlacement("ref", (0, 1), Mesh(tp=2)),
        RolePlacement("judge", (2, 3), Mesh(pp=2)),
        RolePlacement("reward", (3,), Mesh()),
    )

    def look(rank):
        meshes = make_meshes(topology, "cpu")
        mine = {
            p.role: groups_of(meshes[p.role])
            for p in topology.placements
            if rank in p.ranks and p.role in meshes
        }
        return {
            "groups": mine,
            "shared": meshes["actor"] is meshes["critic"],
            "single": "reward" in meshes,
        }

    told = run_on_ranks(4, look)
    assert all(one["shared"] and not one["single"] for one in told)
    assert told[0]["groups"]["actor"] == {"dp": [0, 2], "pp": [0], "cp": [0], "tp": [0, 1]}
    assert told[3]["groups"]["actor"] == {"dp": [1, 3], "pp": [3], "cp": [3], "tp": [2, 3]}
    assert told[1]["groups"]["ref"] == {"dp": [1], "pp": [1], "cp": [1], "tp": [0, 1]}
    assert told[2]["groups"]["judge"]["pp"] == [2, 3]
