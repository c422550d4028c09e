"""What `rlcli plan` says that a rank sends in an update is what its collectives carry."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from pretend_cuda import pretend_cuda
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli import registry
from rlcli.api.config import MicroBatchSpec
from rlcli.api.memory import PlacedRole
from rlcli.backends import _deepspeed_memory
from rlcli.backends._zero import import_deepspeed
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.objectives import answer_weight
from rlcli.testing.backend.samples import batch
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model
from rlcli.topology.architecture import read_architecture

KINDS = {
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "send": "ring",
}


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others in float32: statistics and shapes have other
    dtypes."""

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
        ranks = next(_group(each).size() for each in args if isinstance(each, torch.ScriptObject))
        if name == "send":
            return _bytes(args[0])
        others = (ranks - 1) / ranks
        if name == "allreduce_":
            return 2 * others * _bytes(args[0])
        if "allgather" in name:  # the input is a rank's own
            return (ranks - 1) * _bytes(args[1])
        return others * _bytes(args[1])


def _group(boxed):
    return ProcessGroup.unbox(boxed)


def _bytes(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes if tensors.dtype is torch.float32 else 0
    return sum(map(_bytes, tensors))


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    """Loaded before there are forks, which would each do it."""
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_deepspeed(torch.device("cpu"))
        importlib.import_module("megatron.core.models.gpt")


needs_megatron = pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core")
needs_deepspeed = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed")
ULYSSES, RING = {"context_parallel": "ulysses"}, {"context_parallel": "ring"}
RECOMPUTED = {"gradient_checkpointing": True}
SELECTIVE = {**RECOMPUTED, "recompute": "selective"}
CASES = [
    ("fsdp", "llama", {"dp": 2}, {}),
    ("fsdp", "llama", {"dp": 2}, {"defer_reduction": True}),
    ("fsdp", "llama", {"tp": 2}, {}),
    ("fsdp", "qwen3", {"cp": 2}, ULYSSES),
    ("fsdp", "qwen3", {"cp": 2}, RING),
    ("fsdp", "qwen3", {"cp": 2}, RING | RECOMPUTED),
    ("fsdp", "mixtral", {"dp": 2, "ep": 2}, {}),
    ("fsdp", "mixtral", {"cp": 2, "ep": 2}, RING),
    *(("deepspeed", "llama", {"dp": 2}, {"zero_stage": stage}) for stage in range(4)),
    ("megatron", "llama", {"dp": 2}, {}),
    ("megatron", "llama", {"tp": 2}, {}),
    ("megatron", "llama", {"tp": 2}, RECOMPUTED),
    ("megatron", "qwen2_moe", {"tp": 2}, SELECTIVE),
    ("megatron", "llama", {"pp": 2}, {}),
    ("megatron", "tied_llama", {"pp": 2}, {}),
    ("megatron", "deep_llama", {"pp": 2}, {"virtual_stages": 2}),
    ("megatron", "qwen3", {"cp": 2}, ULYSSES),
    ("megatron", "qwen3", {"cp": 2}, RING | SELECTIVE),
    ("megatron", "mixtral", {"dp": 2, "ep": 2}, RECOMPUTED),
]
MARKS = {"megatron": needs_megatron, "deepspeed": needs_deepspeed}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "family", "layout", "settings"),
    [pytest.param(*case, marks=MARKS.get(case[0], ()), id=str(case)) for case in CASES],
)
def test_the_planned_messages_of_an_update_are_those_of_real_ranks(
    backend, family, layout, settings
):
    compare(backend, model_of(family), layout, settings)


@pytest.mark.exhaustive
@needs_deepspeed
@pytest.mark.parametrize("settings", [{}, RECOMPUTED], ids=str)
def test_stage_3_gathers_again_what_its_buckets_do_not_hold(monkeypatch, settings):
    monkeypatch.setattr(_deepspeed_memory, "BUCKET", 300_000)
    model = model_of("llama", num_hidden_layers=8)
    gathered, planned = compare("deepspeed", model, {"dp": 2}, {"zero_stage": 3, **settings})
    assert planned["all-gather"] > 1.5 * planned["reduce-scatter"]
    assert gathered["all-gather"] > 1.5 * gathered["reduce-scatter"]


def model_of(family, **changes):
    """Large next to what is not counted."""
    if family == "tied_llama":
        family, changes = "llama", {**changes, "tie_word_embeddings": True}
    return tiny_model(family, hidden_size=256, **changes)


def nll_of_all_actions(output, sample):
    """What is planned: a loss that reads fewer actions sends less."""
    return -output.logprobs.sum()


def compare(backend, model, layout, settings):
    """The bytes that are sent by the rank that sends most, and the planned ones."""
    sample = batch()

    def work(rank):
        contract = contract_of(backend, settings)
        with contract.at_device():
            engine = contract.engine(
                lm=model, mesh=mesh_of_ranks(**layout), expert_ranks=layout.get("ep", 1), **SETTINGS
            )
            for counted in (contextlib.nullcontext(), Sent()):  # stage 3 of ZeRO records its first
                with counted:
                    engine.train_batch(
                        sample, nll_of_all_actions, answer_weight, mb_spec=MicroBatchSpec(n_mbs=2)
                    )
        return dict(counted.bytes)

    planned = planned_bytes(backend, model, layout, settings, sample)
    planned["ring"] = planned.pop("pipeline", 0) + planned.get("ring", 0)
    sent = max(run_on_ranks(2, work, timeout=120), key=lambda of: sum(of.values()))
    small = 0.01 * sum(planned.values())
    for kind in set(KINDS.values()):
        expected = planned.get(kind, 0)
        assert sent.get(kind, 0) == pytest.approx(expected, rel=0.05, abs=small), kind
    return sent, planned


def contract_of(backend, settings):
    """On a pretend device, if the backend needs one."""
    subject = type("Subject", (BackendContract,), {"name": backend, "args": settings})
    if backend == "megatron":
        subject.device, subject.at_device = "cuda:0", lambda self: pretend_cuda()
    return subject()


def planned_bytes(backend, model, layout, settings, sample):
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
    memory = registry.load_declared("backends", backend, "MEMORY")
    return dict(memory(role).sent(sum(lengths) // 2, 2))
