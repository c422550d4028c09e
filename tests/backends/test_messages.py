"""What `rlcli plan` says that a rank sends in an update is what its collectives carry."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.api.config import MicroBatchSpec
from rlcli.api.memory import PlacedRole
from rlcli.backends._fsdp_memory import FSDPMemory
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS, answer_loss, answer_weight, batch
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model
from rlcli.topology.architecture import read_architecture

KINDS = {
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "send": "ring",
}


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends, one of two in every collective."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("c10d::").split(".")[0]
        if func.namespace == "c10d" and name in KINDS:
            self.bytes[KINDS[name]] += self._of(name, args)
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _of(name, args):
        if name == "alltoall_base_":
            _, tensor, *_ = args
            return tensor.nbytes // 2
        if name == "_allgather_base_":
            return args[1].nbytes
        if name == "_reduce_scatter_base_":
            return args[0].nbytes
        (tensor,) = args[1] if name == "allgather_" else args[0]
        return tensor.nbytes


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("llama", {"dp": 2}, {}),
        ("llama", {"dp": 2}, {"defer_reduction": True}),
        ("llama", {"tp": 2}, {}),
        ("qwen3", {"cp": 2}, {"context_parallel": "ulysses"}),
        ("qwen3", {"cp": 2}, {"context_parallel": "ring"}),
        ("qwen3", {"cp": 2}, {"context_parallel": "ring", "gradient_checkpointing": True}),
        ("mixtral", {"dp": 2, "ep": 2}, {}),
    ],
    ids=str,
)
def test_the_planned_messages_of_an_update_are_those_of_real_ranks(family, layout, settings):
    model = tiny_model(family, hidden_size=256)  # next to which statistics are small
    sample = batch()

    def work(rank):
        contract = type("Subject", (BackendContract,), {"name": "fsdp", "args": settings})()
        engine = contract.engine(
            lm=model, mesh=mesh_of_ranks(**layout), expert_ranks=layout.get("ep", 1), **SETTINGS
        )
        with Sent() as sent:
            engine.train_batch(sample, answer_loss, answer_weight, mb_spec=MicroBatchSpec(n_mbs=2))
        return dict(sent.bytes)

    planned = planned_bytes(model, layout, settings, sample)
    small = 0.01 * sum(planned.values())
    for carried in run_on_ranks(2, work, timeout=120):
        for kind in set(KINDS.values()):
            expected = planned.get(kind, 0)
            assert carried.get(kind, 0) == pytest.approx(expected, rel=0.05, abs=small), kind


def planned_bytes(model, layout, settings, sample):
    """Of an update of two micro-batches."""
    lengths = sample.flat_seqlens("packed_input_ids")
    role = PlacedRole(
        architecture=read_architecture(model.config.to_dict()),
        head="lm",
        mesh=dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), 1) | layout,
        arguments={"dtype": "float32", **settings},
        calls={"train_step"},
        longest=max(lengths),
        device="cpu",
    )
    return FSDPMemory(role).sent(sum(lengths) // 2, 2)
