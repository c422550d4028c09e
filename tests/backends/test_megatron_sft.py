"""Supervised fine-tuning by megatron has the loss curve of fsdp: as a run on one rank, and step by step on four."""

import io
import json

import pytest
import torch

from rlcli.api.config import FinetuneSpec, MicroBatchSpec, ModelBackendAbstraction, ModelInterfaceAbstraction
from rlcli.api.model import Model, call_interface
from rlcli.checkpoint.families import family_of
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe
from rlcli.registry import make_backend, make_interface
from rlcli.testing.backend.base import batch
from rlcli.testing.held_source import HeldSource
from rlcli.testing.pretend_cuda import pretend_cuda
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model

pytest.importorskip("megatron.core")

TINY = (
    "{model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 128, tie_word_embeddings: true}"
)
SMALL = (
    f"models.actor.scratch={TINY}", "train.steps=6", "train.prompts_per_step=8", "datasets.train.args.problems=64",
    "models.actor.backend.args.warmup_steps=2", "models.actor.backend.args.eps=1e-3",
    "launch.type=inline", "log.tensorboard=false", "log.plot=false",
)  # fmt: skip


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["actor/loss"] for record in records if "actor/loss" in record]


def test_a_recipe_with_megatron_has_the_loss_curve_of_fsdp(tmp_path):
    def run(backend, device):
        changes = [*SMALL, f"models.actor.backend.type={backend}", f"cluster.device={device}"]
        folder = tmp_path / backend
        run_recipe(load_recipe("sft_math", changes), folder, PlainDisplay(io.StringIO(), quiet=True))
        return losses(folder)

    def work(rank):
        with pretend_cuda():
            return {"losses": run("megatron", "cuda")}

    (found,) = run_on_ranks(1, work, timeout=100)
    wanted = run("fsdp", "cpu")
    assert len(wanted) == 6
    assert wanted[-1] < wanted[0] - 0.1
    assert found["losses"] == pytest.approx(wanted, rel=1e-4)


def curve(backend, device, mesh=None):
    """Six steps of the interface on a model of its own."""
    lm = tiny_model("qwen3", hidden_size=64)
    source, family = HeldSource(lm), family_of("qwen3")
    model = Model("actor", None, TinyTokenizer(), device, source=source, family=family, device_mesh=mesh)
    args = {"dtype": "float32", "lr": 1e-2, "eps": 1e-3}
    spec = FinetuneSpec(total_train_steps=6, dataset_size=100, train_batch_size=10)
    make_backend(ModelBackendAbstraction(backend, args)).initialize(model, spec)
    sft = make_interface(ModelInterfaceAbstraction("sft"))
    return [
        call_interface(sft, "train_step", model, batch(step), MicroBatchSpec(n_mbs=1 + step % 3))["loss"]
        for step in range(6)
    ]


def test_a_pipeline_of_tensor_parallel_stages_has_the_loss_curve_of_one_rank_of_fsdp():
    def work(rank):
        mesh = mesh_of_ranks(pp=2, tp=2)
        with pretend_cuda() as device:
            return {"losses": curve("megatron", device, mesh)}

    wanted = curve("fsdp", torch.device("cpu"))
    assert wanted[-1] < wanted[0]
    for rank in run_on_ranks(4, work, timeout=100):
        assert rank["losses"] == pytest.approx(wanted, rel=1e-4)
