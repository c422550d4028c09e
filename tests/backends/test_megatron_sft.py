"""Supervised fine-tuning with megatron has the loss curve of fsdp: in a run on one rank, in a run
on two ranks that resumes in another layout, and step by step on four ranks."""

import importlib
import io
import json
import runpy
from pathlib import Path

import pytest
import torch
from pretend_cuda import needs_pretend_device, pretend_cuda
from warm_command import load_everything, run_here

from rlcli.api.config import (
    FinetuneSpec,
    MicroBatchSpec,
    ModelBackendAbstraction,
    ModelInterfaceAbstraction,
)
from rlcli.api.model import Model, call_interface
from rlcli.checkpoint.families import family_of
from rlcli.launch.run import run_recipe
from rlcli.observe.display import PlainDisplay
from rlcli.recipe.resolve import load_recipe
from rlcli.registry import make_backend, make_interface
from rlcli.testing.backend.samples import batch
from rlcli.testing.held_source import HeldSource
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model

pytestmark = needs_pretend_device

HERE = Path(__file__).parent
PRETEND_RANKS = runpy.run_path(str(HERE / "pretend_ranks" / "sitecustomize.py"))

TINY = (
    "{model_type: qwen3, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 128, "
    "tie_word_embeddings: true}"
)
SMALL = (
    f"models.actor.scratch={TINY}",
    "train.steps=6",
    "train.prompts_per_step=8",
    "datasets.train.args.problems=64",
    "models.actor.backend.args.warmup_steps=2",
    "models.actor.backend.args.eps=1e-3",
    "models.actor.backend.args.schedule=constant",
    "launch.type=inline",
    "log.trackers=[]",
    "log.plot=false",
)


@pytest.fixture(scope="module", autouse=True)
def _library():
    """Importing it takes seconds, so that only the process imports it which runs these tests."""
    pytest.importorskip("megatron.core")


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["actor/loss"] for record in records if "actor/loss" in record]


def run(folder, backend, device):
    changes = [*SMALL, f"models.actor.backend.type={backend}", f"cluster.device={device}"]
    run_recipe(load_recipe("sft_math", changes), folder, PlainDisplay(io.StringIO(), quiet=True))
    return losses(folder)


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Loaded once here rather than in every fork."""
    load_everything()
    with pretend_cuda():
        importlib.import_module("rlcli.backends._megatron_engine")


@pytest.fixture(scope="module")
def fsdp_losses(tmp_path_factory):
    """The loss of each step of a run with fsdp on the CPU."""
    step_losses = run(tmp_path_factory.mktemp("sft") / "fsdp", "fsdp", "cpu")
    assert len(step_losses) == 6
    assert step_losses[-1] < step_losses[0] - 0.1
    return step_losses


def test_a_run_with_megatron_has_the_loss_curve_of_fsdp(tmp_path, fsdp_losses):
    def work(rank):
        with pretend_cuda():
            return {"losses": run(tmp_path / "megatron", "megatron", "cuda")}

    (result,) = run_on_ranks(1, work, timeout=100)
    assert result["losses"] == pytest.approx(fsdp_losses, rel=1e-4)


@pytest.mark.exhaustive
def test_a_run_resumed_in_other_layouts_has_the_loss_curve_of_fsdp(tmp_path, fsdp_losses):
    """Two pipeline stages for two steps, then two tensor-parallel ranks,
    then two data-parallel ranks."""
    changes = [one for one in SMALL if not one.startswith(("launch.", "train.steps"))]
    changes += ["models.actor.backend.type=megatron", "cluster.device=cuda"]
    two_ranks = (
        "launch=local",
        "cluster.devices_per_node=2",
        "models.actor.mesh={pp: 2}",
        "train.steps=2",
    )
    folder = tmp_path / "run"
    for arguments in (
        ("train", "sft_math", *changes, *two_ranks, "--run-dir", str(folder)),
        ("resume", str(folder), "models.actor.mesh={_replace_: true, tp: 2}", "train.steps=4"),
        ("resume", str(folder), "models.actor.mesh={_replace_: true, dp: 2}", "train.steps=6"),
    ):
        ended = run_here(*arguments, cwd=tmp_path, prepare=PRETEND_RANKS["pretend"])
        assert ended.returncode == 0, ended.stderr
    assert losses(folder) == pytest.approx(fsdp_losses, rel=1e-4)


def loss_curve(backend, device, mesh=None):
    """The losses of six steps of the interface on a new model."""
    lm = tiny_model("qwen3", hidden_size=64)
    source, family = HeldSource(lm), family_of("qwen3")
    model = Model(
        "actor", None, TinyTokenizer(), device, source=source, family=family, device_mesh=mesh
    )
    args = {"dtype": "float32", "lr": 1e-2, "eps": 1e-3}
    spec = FinetuneSpec(total_train_steps=6, dataset_size=100, train_batch_size=10)
    make_backend(ModelBackendAbstraction(backend, args)).initialize(model, spec)
    sft = make_interface(ModelInterfaceAbstraction("sft"))
    return [
        call_interface(sft, "train_step", model, batch(step), MicroBatchSpec(n_mbs=1 + step % 3))[
            "loss"
        ]
        for step in range(6)
    ]


@pytest.mark.exhaustive
def test_tensor_parallel_stages_have_the_loss_curve_of_fsdp():
    def work(rank):
        mesh = mesh_of_ranks(pp=2, tp=2)
        with pretend_cuda() as device:
            return {"losses": loss_curve("megatron", device, mesh)}

    expected = loss_curve("fsdp", torch.device("cpu"))
    assert expected[-1] < expected[0]
    for rank in run_on_ranks(4, work, timeout=100):
        assert rank["losses"] == pytest.approx(expected, rel=1e-4)
