"""Supervised fine-tuning by megatron has the loss curve of fsdp: as a run on one rank, as one on two ranks that resumes
in another layout, and step by step on four."""

import importlib
import io
import json
import runpy
from pathlib import Path

import pytest
import torch
from warm_command import load_everything, run_here

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

HERE = Path(__file__).parent
PRETEND_RANKS = runpy.run_path(str(HERE / "pretend_ranks" / "sitecustomize.py"))

TINY = (
    "{model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 128, tie_word_embeddings: true}"
)
SMALL = (
    f"models.actor.scratch={TINY}", "train.steps=6", "train.prompts_per_step=8", "datasets.train.args.problems=64",
    "models.actor.backend.args.warmup_steps=2", "models.actor.backend.args.eps=1e-3",
    "models.actor.backend.args.schedule=constant",
    "launch.type=inline", "log.tensorboard=false", "log.plot=false",
)  # fmt: skip


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["actor/loss"] for record in records if "actor/loss" in record]


def run(folder, backend, device):
    changes = [*SMALL, f"models.actor.backend.type={backend}", f"cluster.device={device}"]
    run_recipe(load_recipe("sft_math", changes), folder, PlainDisplay(io.StringIO(), quiet=True))
    return losses(folder)


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Loaded once, here, and not in every fork."""
    load_everything()
    with pretend_cuda():
        importlib.import_module("rlcli.backends._megatron_engine")


@pytest.fixture(scope="module")
def of_fsdp(tmp_path_factory):
    """The loss of each step of a run on the host."""
    found = run(tmp_path_factory.mktemp("sft") / "fsdp", "fsdp", "cpu")
    assert len(found) == 6
    assert found[-1] < found[0] - 0.1
    return found


def test_a_recipe_with_megatron_has_the_loss_curve_of_fsdp(tmp_path, of_fsdp):
    def work(rank):
        with pretend_cuda():
            return {"losses": run(tmp_path / "megatron", "megatron", "cuda")}

    (found,) = run_on_ranks(1, work, timeout=100)
    assert found["losses"] == pytest.approx(of_fsdp, rel=1e-4)


def test_two_ranks_of_a_run_have_the_loss_curve_of_fsdp_in_one_layout_and_another(tmp_path, of_fsdp):
    """A pipeline of two stages for two steps; then two tensor-parallel ranks, and two that share the data."""
    changes = [one for one in SMALL if not one.startswith(("launch.", "train.steps"))]
    changes += ["models.actor.backend.type=megatron", "cluster.device=cuda"]
    two_ranks = ("launch=local", "cluster.devices_per_node=2", "models.actor.mesh={pp: 2}", "train.steps=2")
    folder = tmp_path / "run"
    for arguments in (
        ("train", "sft_math", *changes, *two_ranks, "--run-dir", str(folder)),
        ("resume", str(folder), "models.actor.mesh={_replace_: true, tp: 2}", "train.steps=4"),
        ("resume", str(folder), "models.actor.mesh={_replace_: true, dp: 2}", "train.steps=6"),
    ):
        ended = run_here(*arguments, cwd=tmp_path, prepare=PRETEND_RANKS["pretend"])
        assert ended.returncode == 0, ended.stderr
    assert losses(folder) == pytest.approx(of_fsdp, rel=1e-4)


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
