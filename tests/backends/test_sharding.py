"""Parameters that ranks cannot divide equally: each rank has the part that it takes itself to have.

One rank of many is looked at, without the others.
"""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlcli.api.model_source import local_part
from rlcli.errors import ModelError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.differences import weights_apart
from rlcli.testing.backend.layouts import ranks_in
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.samples import batch
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model


class Subject(BackendContract):
    name = "fsdp"


def engine_of(rank, layout, family="llama", **changes):
    """The engine of one of the ranks of a layout, and the weights of the whole model. To be called
    in a process of its own, because torch remembers what belongs to a rank."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks_in(layout))
    lm = tiny_model(family, **changes)
    weights = {name: parameter.detach().clone() for name, parameter in lm.named_parameters()}
    mesh, expert_ranks = mesh_of_ranks(**layout), layout.get("ep", 1)
    return Subject().engine(lm=lm, mesh=mesh, expert_ranks=expert_ranks), weights


@pytest.mark.parametrize(
    ("rank", "layout", "family", "changes"),
    [
        # 97 rows: 49 and 48, of which three ranks have 17, 17, 15 and 16, 16, 16
        (4, {"dp": 3, "tp": 2}, "llama", {"hidden_size": 48, "head_dim": 12}),
        # three ranks share two experts: of 48 x 32 and 32 x 24 numbers, of 56 x 32 and 32 x 28
        (5, {"dp": 6, "ep": 2}, "mixtral", {}),
        (3, {"dp": 6, "ep": 2}, "mixtral", {"intermediate_size": 28}),
    ],
)
def test_a_rank_holds_what_it_reads(rank, layout, family, changes):
    def work(_):
        engine, weights = engine_of(rank, layout, family, **changes)
        parts = {name: local_part(p.detach()) for name, p in engine.lm.named_parameters()}
        return {
            name: torch.equal(values, weights[name][region])
            for name, (values, region) in parts.items()
        }

    (are_equal,) = run_on_ranks(1, work)
    assert [name for name, is_equal in are_equal.items() if not is_equal] == []


def test_a_vocabulary_that_cannot_be_sharded_is_refused():
    def work(_):
        with pytest.raises(ModelError, match="97 rows cannot be sharded over 2 tensor-parallel"):
            engine_of(4, {"dp": 3, "tp": 2})
        return {}

    run_on_ranks(1, work)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"model_type": "apertus", "hidden_act": "xielu"}),
        ("cohere", {"use_qk_norm": True}),
        ("llama", {"model_type": "hrm_text"}),
    ],
    ids=[
        "activations that are trained",
        "norms with a row for each head",
        "a parameter next to all layers",
    ],
)
def test_what_a_plan_of_transformers_leaves_out_is_trained_like_the_whole_model(family, changes):
    """The plan of one family says nothing of its activations, which compute with a rank's own
    columns, that of another nothing of its norms of queries and keys. The third has a parameter
    that is in no layer."""

    def trained(**layout):
        engine = Subject().engine(lm=tiny_model(family, **changes), **layout, **SETTINGS)
        stats = engine.train_batch(batch(), answer_loss, answer_weight)
        return stats["grad_norm"], Subject().weights(engine)

    norm, weights = trained()

    def work(rank):
        norm_here, weights_here = trained(mesh=mesh_of_ranks(tp=2))
        return norm_here / norm - 1, weights_apart(weights_here, weights)

    for norms_apart, apart in run_on_ranks(2, work, timeout=60):
        assert abs(norms_apart) < 1e-6
        assert apart < 2e-5
