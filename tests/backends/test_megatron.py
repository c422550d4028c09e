"""megatron: the contract on an emulated GPU, and its specifics: an embedding tied to the head of
another stage, roles with separate meshes, bfloat16 parameters, checkpoints that convert or that
other backends continue, and what it refuses."""

import functools
import importlib
import math

import pytest
import torch
import torch.distributed as dist
from pretend_cuda import needs_pretend_device, pretend_cuda
from router_checks import RouterChecks
from safetensors.torch import load_file, save_file

from rlcli.api.config import FinetuneSpec, MicroBatchSpec, ModelBackendAbstraction
from rlcli.api.model import GenerationEngine, Model, TrainEngine
from rlcli.backends.megatron import Megatron
from rlcli.checkpoint.convert import convert, plan_to_hf
from rlcli.checkpoint.families import family_of
from rlcli.errors import ModelError, ResourceError, UsageError
from rlcli.registry import make_backend
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.differences import distance
from rlcli.testing.backend.forward import ForwardChecks
from rlcli.testing.backend.objectives import OBJECTIVES, answer_loss, answer_weight
from rlcli.testing.backend.optimizer import OptimizerChecks
from rlcli.testing.backend.plain import AdamW, PlainTraining, plain_answer_loss
from rlcli.testing.backend.samples import batch
from rlcli.testing.backend.state import StateChecks, restore, save
from rlcli.testing.backend.training import BackendTrainingChecks
from rlcli.testing.held_source import HeldSource
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model

# ranks that wait for each other are found by the contract itself
pytestmark = [needs_pretend_device, pytest.mark.timeout(900)]

SIZE = {"hidden_size": 64}
ROLES = {
    "tied, tp2 x pp2": ("llama", "lm", {"pp": 2, "tp": 2}, {"tie_word_embeddings": True}),
    "tied, dp2 x pp2": ("llama", "lm", {"dp": 2, "pp": 2}, {"tie_word_embeddings": True}),
    "tied, virtual stages, dp2 x pp2": (
        "llama",
        "lm",
        {"dp": 2, "pp": 2},
        {"tie_word_embeddings": True, "num_hidden_layers": 4},
    ),
    "windows, cp2 x pp2": ("mistral", "lm", {"pp": 2, "cp": 2}, {}),
    "experts, recomputed, cp2 x ep2 x pp2": (
        "qwen2_moe",
        "lm",
        {"pp": 2, "cp": 2, "ep": 2},
        {"num_experts": 4},
    ),
    "recomputed in part, cp2 x tp2": ("qwen3", "value", {"cp": 2, "tp": 2}, {}),
    "norms of heads, tp2 x dp2": ("qwen3", "lm", {"dp": 2, "tp": 2}, {}),
    "biases, tp2 x pp2": ("qwen2", "lm", {"pp": 2, "tp": 2}, {}),
    "critic, pp2 x dp2": ("qwen2", "value", {"dp": 2, "pp": 2}, {}),
    "critic, dp4": ("mistral", "value", {"dp": 4}, {}),
}
"""Family, head, mesh and changes to the model. All are roles of the same four processes; 97, the
size of their vocabulary, is prime."""
WHOLE_LAYERS = {"gradient_checkpointing": True}
SETTINGS_OF_ROLES = {
    "tied, virtual stages, dp2 x pp2": {"virtual_stages": 2},
    "experts, recomputed, cp2 x ep2 x pp2": WHOLE_LAYERS | {"context_parallel": "ring"},
    "recomputed in part, cp2 x tp2": WHOLE_LAYERS | {"recompute": "selective"},
}
STEPS = 2
RATES = (1 / 3, 2 / 3, 1.0, 1 - 0.9 / 8)


@pytest.fixture(scope="module", autouse=True)
def _library():
    """Importing it takes seconds, so that only the process imports it which runs these tests."""
    pytest.importorskip("megatron.core")


@pytest.fixture(scope="module", autouse=True)
def library():
    """Loaded once here rather than in every fork."""
    with pretend_cuda():
        importlib.import_module("rlcli.backends._megatron_engine")


class OnEmulatedGPU:
    name = "megatron"
    device = "cuda:0"

    def at_device(self):
        return pretend_cuda()


@pytest.mark.long
class TestContract(OnEmulatedGPU, BackendContract):
    families = ("llama", "mixtral")


@pytest.mark.long
class TestRouters(OnEmulatedGPU, RouterChecks):
    """Losses of routers, likewise."""


@pytest.mark.exhaustive
class TestOtherFamilies(
    OnEmulatedGPU, StateChecks, OptimizerChecks, BackendTrainingChecks, ForwardChecks
):
    families = tuple(name for name in Megatron.FAMILIES if name not in TestContract.families)


def tied_model(seed=0):
    return tiny_model("llama", seed=seed, tie_word_embeddings=True, **SIZE)


def plain_loop(lm):
    return PlainTraining(
        lm, AdamW.described_by(make_backend(ModelBackendAbstraction("megatron", SETTINGS)))
    )


def make_engine(lm, device, mesh=None, backend="megatron", expert_ranks=1, **args):
    backend = make_backend(
        ModelBackendAbstraction(backend, {**SETTINGS, "dtype": "float32", **args})
    )
    family = family_of(lm.config.model_type)
    source = HeldSource(lm)
    model = Model(
        "actor",
        None,
        TinyTokenizer(),
        device,
        source=source,
        family=family,
        device_mesh=mesh,
        expert_ranks=expert_ranks,
    )
    spec = FinetuneSpec(total_train_steps=10, dataset_size=100, train_batch_size=10)
    return backend.initialize(model, spec).module


def share_of(sample, mesh):
    """Uneven shares: the first data-parallel rank has most samples,
    and of four ranks some have none."""
    if mesh is None or mesh["dp"].size() == 1:
        return sample
    number, cut = mesh["dp"].get_local_rank(), 5 if mesh["dp"].size() == 2 else sample.bs - 1
    return sample.select_indices(
        range(cut) if number == 0 else range(cut, sample.bs) if number == 1 else ()
    )


def full_weights(engine):
    return {name: parameter.cpu() for name, parameter in engine.whole_parameters()}


@functools.cache
def run_roles(folder):
    """By rank and role: its steps and their deviation from a plain loop;
    the first role is saved as well."""

    def work(rank):
        with pretend_cuda() as device:
            seen = {name: role(name, device) for name in ROLES}
            seen["saved"] = checkpoint(next(iter(ROLES)), device, rank)
            return seen

    def role(name, device):
        family, head, degrees, changes = ROLES[name]
        objective = OBJECTIVES[head]
        mesh = mesh_of_ranks(**degrees)
        args = SETTINGS_OF_ROLES.get(name, {}) | {"expert_ranks": degrees.get("ep", 1)}
        engine = make_engine(tiny_model(family, head=head, **SIZE, **changes), device, mesh, **args)
        plain = plain_loop(tiny_model(family, head=head, **SIZE, **changes))
        seen = []
        for number in range(STEPS):
            share = share_of(batch(number).to(device), mesh)
            cut = MicroBatchSpec(n_mbs=1 + number)
            actual = engine.train_batch(
                share, objective.loss, objective.weight, mb_spec=cut, version_steps=number
            )
            expected = plain.step([batch(number)], objective.plain, RATES[number])
            seen.append(
                [actual["loss"], expected["loss"], actual["grad_norm"], expected["grad_norm"]]
            )
        weights = full_weights(engine)
        assert weights.keys() == plain.weights().keys()
        return {
            "steps": seen,
            "apart": max(distance(weights[n], w, 1e-2) for n, w in plain.weights().items()),
        }

    def checkpoint(name, device, rank):
        """For a role with tied embedding: the deviation of a new engine that continues its
        checkpoint."""
        mesh = mesh_of_ranks(**ROLES[name][2])
        engine, continued = (
            make_engine(tied_model(), device, mesh),
            make_engine(tied_model(seed=1), device, mesh),
        )
        train_step(engine, 0, mesh)
        save(engine, folder, rank)
        saved = full_weights(engine)
        if rank == 0:
            engine.save_description(None, str(folder / "models"))
            save_file(saved, folder / "saved.safetensors")
        dist.barrier()
        restore(continued, folder)
        for trained in (engine, continued):
            train_step(trained, 1, mesh)
        weights, theirs = full_weights(engine), full_weights(continued)
        return max(float((weights[name] - theirs[name]).abs().max().detach()) for name in weights)

    return run_on_ranks(4, work, timeout=150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("megatron")


@pytest.mark.exhaustive
@pytest.mark.parametrize("role", ROLES)
def test_every_role_trains_like_a_plain_loop(role, folder):
    for rank in run_roles(folder):
        for loss, wanted_loss, norm, wanted_norm in rank[role]["steps"]:
            assert loss == pytest.approx(wanted_loss, rel=1e-6)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)
        assert rank[role]["apart"] < 1e-4


@pytest.mark.exhaustive
def test_a_checkpoint_of_an_embedding_tied_across_stages_can_be_continued(folder):
    assert [rank["saved"] for rank in run_roles(folder)] == [0.0] * 4


@pytest.mark.exhaustive
def test_the_model_of_a_checkpoint_converts_to_transformers(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    run_roles(folder)
    convert(plan_to_hf(folder / "models", tmp_path / "hf"), lambda done: None)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    expected = load_file(folder / "saved.safetensors")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.items())


def train_step(engine, number, mesh=None):
    share = share_of(batch(number).to(engine.device), mesh)
    return engine.train_batch(share, answer_loss, answer_weight, version_steps=number)["loss"]


@pytest.mark.long
def test_a_checkpoint_of_bfloat16_parameters_has_float32_copies(tmp_path):
    def work(rank):
        with pretend_cuda() as device:
            mesh = mesh_of_ranks(dp=2)
            engine = make_engine(tied_model(), device, mesh, dtype="bfloat16")
            losses = [train_step(engine, number, mesh) for number in range(2)]
            save(engine, tmp_path, rank)
            dist.barrier()
            continued = make_engine(tied_model(seed=1), device, mesh, dtype="bfloat16")
            restore(continued, tmp_path)
            for trained in (engine, continued):
                losses += [train_step(trained, number, mesh) for number in (2, 3)]
            mine, theirs = full_weights(engine), full_weights(continued)
            same = all(
                weight.dtype is torch.float32 and torch.equal(weight, theirs[n])
                for n, weight in mine.items()
            )
            dtypes = {str(parameter.dtype) for _, parameter in engine.parameters}
            return {"losses": losses, "same": same, "kept": sorted(dtypes)}

    plain = plain_loop(tied_model())
    expected = [
        plain.step([batch(number)], plain_answer_loss, RATES[number])["loss"] for number in range(4)
    ]
    for rank in run_on_ranks(2, work):
        assert rank["losses"] == pytest.approx(expected + expected[2:], rel=0.05)
        assert rank["losses"][2:4] == rank["losses"][4:]
        assert rank["same"]
        assert rank["kept"] == ["torch.bfloat16"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_fsdp_and_megatron_continue_each_others_checkpoints(tmp_path, family):
    def some_model(seed=0):
        return tiny_model(family, seed=seed, tie_word_embeddings=True, **SIZE)

    def work(rank):
        with pretend_cuda() as device:
            devices = {"fsdp": torch.device("cpu"), "megatron": device}
            engines = {
                name: make_engine(some_model(), target, backend=name)
                for name, target in devices.items()
            }
            for name, engine in engines.items():
                for number in range(2):
                    train_step(engine, number)
                save(engine, tmp_path / name)
                train_step(engine, 2)
            apart = []
            for name, source in (("fsdp", "megatron"), ("megatron", "fsdp")):
                engine = make_engine(some_model(seed=1), devices[name], backend=name)
                restore(engine, tmp_path / source)
                train_step(engine, 2)
                mine, theirs = full_weights(engine), full_weights(engines[source])
                apart.append(max(float((mine[n] - theirs[n]).abs().max().detach()) for n in theirs))
            return {"apart": apart}

    (seen,) = run_on_ranks(1, work)
    assert max(seen["apart"]) < 1e-5


# -- what it refuses -------------------------------------------------------------------------------


def test_the_engine_trains_but_does_not_generate():
    def work(rank):
        with pretend_cuda() as device:
            engine = make_engine(tied_model(), device)
            return {
                "trains": isinstance(engine, TrainEngine),
                "generates": isinstance(engine, GenerationEngine),
            }

    assert run_on_ranks(1, work) == [{"trains": True, "generates": False}]


def test_a_cpu_device_is_refused():
    with pytest.raises(ResourceError, match="needs a CUDA device"):
        make_engine(tied_model(), torch.device("cpu"))


def test_sequence_parallelism_is_refused_with_what_divides_sequences():
    with pytest.raises(UsageError, match=r"sequence_parallel is not supported yet; mesh\.cp"):
        make_backend(ModelBackendAbstraction("megatron", {"sequence_parallel": True}))


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"pp": 2}, "each of the 2 stages of role actor has 1 layers"),
        ({"dp": 2}, "virtual_stages of role actor is 2, but its pipeline has one stage"),
    ],
)
def test_virtual_stages_that_do_not_fit_are_refused(degrees, message):
    def work(rank):
        mesh = mesh_of_ranks(**degrees)
        with pretend_cuda() as device, pytest.raises(ModelError) as caught:
            make_engine(tiny_model("llama"), device, mesh, virtual_stages=2)
        return {"said": str(caught.value)}

    for result in run_on_ranks(2, work):
        assert message in result["said"]


@pytest.mark.parametrize(
    ("family", "changes", "degrees", "message"),
    [
        ("gpt2", {}, {}, "its family is gpt2"),
        ("gpt_neox", {}, {}, "its family gpt_neox is not implemented"),
        ("llama", {"attention_bias": True}, {}, "some of its linear layers have biases"),
        ("llama", {"num_hidden_layers": 3}, {"pp": 2}, "3 layers, which pp=2 does not divide"),
        (
            "llama",
            {"num_key_value_heads": 1},
            {"tp": 2},
            "1 key-value heads, which tp=2 does not divide",
        ),
        ("qwen3_moe", {}, {"dp": 2, "ep": 2}, "3 experts, which ep=2 does not divide"),
        ("llama", {}, {"dp": 2, "ep": 2}, "0 experts, which ep=2 does not divide"),
        ("mixtral", {"intermediate_size": 25}, {"tp": 2}, "25 MLP columns"),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(family, changes, degrees, message):
    def work(rank):
        mesh, expert_ranks = mesh_of_ranks(**degrees), degrees.get("ep", 1)
        with pretend_cuda() as device, pytest.raises(ModelError) as caught:
            make_engine(tiny_model(family, **changes), device, mesh, expert_ranks=expert_ranks)
        return {"said": str(caught.value)}

    ranks = math.prod(size for name, size in degrees.items() if name != "ep")
    for result in run_on_ranks(ranks, work):
        assert message in result["said"]


# -- in host memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_engine_leaves_the_device_and_returns_on_demand(dtype):
    def work(rank):
        with pretend_cuda() as device:
            engine = make_engine(tied_model(), device, dtype=dtype)
            train_step(engine, 0)
            loaded = torch.cuda.memory_allocated()
            engine.offload()
            engine.offload()
            left = torch.cuda.memory_allocated()
            undisturbed = make_engine(tied_model(), device, dtype=dtype)
            train_step(undisturbed, 0)
            actual = [train_step(engine, number) for number in (1, 2)]
            expected = [train_step(undisturbed, number) for number in (1, 2)]
            engine.offload()
            mine, theirs = full_weights(engine), full_weights(undisturbed)
            return {
                "left": left / loaded,
                "steps": [actual, expected],
                "same": all(torch.equal(mine[name], theirs[name]) for name in theirs),
            }

    (seen,) = run_on_ranks(1, work)
    assert seen["left"] < 0.02
    assert seen["steps"][0] == seen["steps"][1]
    assert seen["same"]


def test_grouped_products_of_experts_are_those_of_a_loop():
    from rlcli.backends._megatron_experts import _products

    torch.manual_seed(0)
    rows, matrices = torch.randn(7, 16), torch.randn(3, 24, 16)
    counts = torch.tensor([4, 0, 3])
    expected = _products(rows, matrices, counts)
    with pretend_cuda() as device:
        narrow = (tensor.to(device, torch.bfloat16) for tensor in (rows, matrices))
        actual = _products(*narrow, counts.to(device))
        assert actual.dtype is torch.bfloat16
        assert distance(actual.float().cpu(), expected) < 0.02
