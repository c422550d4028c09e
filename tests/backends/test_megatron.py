"""megatron in every layout, with an embedding that may be the head of another stage: the numbers of a plain loop. Also
two roles with meshes of their own, bfloat16 parameters, checkpoints that other backends continue, and what it refuses.

Each layout is one launch of ranks that does everything, on a device that computes in host memory; the tests then look
at what its ranks saw. A layout also continues from the checkpoint of the one before it.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rlcli.api.config import FinetuneSpec, MicroBatchSpec, ModelBackendAbstraction
from rlcli.api.model import GenerationEngine, Model, TrainEngine
from rlcli.checkpoint.convert import convert, plan_to_hf
from rlcli.checkpoint.families import family_of
from rlcli.errors import ModelError, ResourceError, UsageError
from rlcli.registry import make_backend
from rlcli.testing.backend.base import SETTINGS, answer_loss, answer_weight, batch, distance, value_loss, value_weight
from rlcli.testing.backend.plain import AdamW, PlainTraining, plain_answer_loss, plain_value_loss, scores_of
from rlcli.testing.backend.state import restore, save
from rlcli.testing.held_source import HeldSource
from rlcli.testing.pretend_cuda import pretend_cuda
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model

pytest.importorskip("megatron.core")

SIZE = {"hidden_size": 64}
LAYOUTS = {
    "1 rank": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "tp2 x pp2": {"pp": 2, "tp": 2},
    "tp2 x dp2": {"dp": 2, "tp": 2},
}
OTHERS = {
    "1 rank": ("mistral", {}),
    "tp2": ("qwen3", {"tp": 2}),
    "pp2": ("qwen2", {"pp": 2}),
    "tp2 x pp2": ("llama", {"dp": 2, "pp": 2}),
    "tp2 x dp2": ("qwen3", {"dp": 4}),
}
"""In each launch a second role: another family, with a mesh of its own where there is room for one."""
STEPS = 3
RATES = (1 / 3, 2 / 3, 1.0, 1 - 0.9 / 8)


def tied_model(seed=0):
    """Its embedding is its head as well, on another stage where there are two; its 97 tokens divide by nothing."""
    return tiny_model("llama", seed=seed, tie_word_embeddings=True, **SIZE)


def plain_loop(lm):
    return PlainTraining(lm, AdamW.described_by(make_backend(ModelBackendAbstraction("megatron", SETTINGS))))


def make_engine(lm, device, mesh=None, backend="megatron", **args):
    backend = make_backend(ModelBackendAbstraction(backend, {**SETTINGS, "dtype": "float32", **args}))
    family = family_of(lm.config.model_type)
    source = HeldSource(lm)
    model = Model("actor", None, TinyTokenizer(), device, source=source, family=family, device_mesh=mesh)
    spec = FinetuneSpec(total_train_steps=10, dataset_size=100, train_batch_size=10)
    return backend.initialize(model, spec).module


def share_of(sample, mesh):
    """Of four data-parallel ranks or two, the first has most and one has nothing."""
    if mesh is None or mesh["dp"].size() == 1:
        return sample
    number, cut = mesh["dp"].get_local_rank(), 5 if mesh["dp"].size() == 2 else sample.bs - 1
    return sample.select_indices(range(cut) if number == 0 else range(cut, sample.bs) if number == 1 else ())


@dataclass(frozen=True)
class Life:
    """All that one rank of a layout does."""

    layout: str
    folder: Path
    earlier: Path | None
    """Of a layout that has lived before."""

    def __call__(self, rank):
        with pretend_cuda() as device:
            self.home.mkdir(exist_ok=True)
            mesh = mesh_of_ranks(**LAYOUTS[self.layout])
            engine = make_engine(tied_model(), device, mesh)
            seen = {"scores": self.scores(engine, mesh, device)}
            seen["steps"] = [self.step(engine, mesh, device, number) for number in range(STEPS)]
            weights = whole_weights(engine)
            seen["apart"] = self.difference(weights)
            seen["spoiled"] = self.spoil(engine, mesh, device)
            seen |= self.export(engine, rank)
            seen |= self.checkpoint(engine, mesh, device, rank)
            seen["other"] = self.another_role(device)
            return seen

    @property
    def home(self):
        return self.folder / self.layout.replace(" ", "")

    def scores(self, engine, mesh, device):
        share = share_of(batch().to(device), mesh)
        rows = [[max(0, length - 1) for length in group] for group in share.seqlens["packed_input_ids"]]
        found = engine.forward(share, MicroBatchSpec(n_mbs=3), lambda output, _: output.logprobs, rows)
        wanted = scores_of(tied_model().double(), share.to("cpu"))[0] if share.bs else torch.zeros(0)
        return distance(found.cpu(), wanted) if share.bs else float(found.numel())

    def step(self, engine, mesh, device, number, loss=answer_loss):
        share = share_of(batch(number).to(device), mesh)
        cut = MicroBatchSpec(n_mbs=1 + number)
        return engine.train_batch(share, loss, answer_weight, mb_spec=cut, version_steps=number)

    def difference(self, weights):
        """Of the update, the relative error."""
        plain, before = plain_loop(tied_model()), dict(tied_model().named_parameters())
        for number in range(STEPS):
            plain.step([batch(number)], plain_answer_loss, RATES[number])
        moved = {name: weight - before[name].double() for name, weight in plain.weights().items()}
        errors = {name: weights[name].double() - weight for name, weight in plain.weights().items()}
        assert errors.keys() == weights.keys()
        return float(max(errors[name].norm() / moved[name].norm() for name in errors).detach())

    def spoil(self, engine, mesh, device):
        """A loss that is not a number on one rank, and a step that is refused."""

        def loss(output, sample):
            summed, stats = answer_loss(output, sample)
            last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
            return (summed * math.nan if last else summed), stats

        before = self.state(engine)
        spoiled = self.step(engine, mesh, device, 1, loss)["update_skipped"]
        after = self.state(engine)
        refused = engine.train_batch(
            share_of(batch(1).to(device), mesh), answer_loss, answer_weight, step_if=lambda stats: False
        )["update_skipped"]
        again = self.state(engine)
        same = [before.keys() == other.keys() and all(torch.equal(before[name], other[name]) for name in before)
                for other in (after, again)]  # fmt: skip
        empty = all(not bool(buffer.grad_data.any()) for buffer in engine.wrapped.buffers)
        return {"skipped": [spoiled, refused], "same": same, "no gradients left": empty}

    def state(self, engine):
        state = engine.state()
        both = (*state.weights.items(), *state.optimizer.items())
        return {name: (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone() for name, tensor in both}

    def export(self, engine, rank):
        from transformers import AutoModelForCausalLM

        engine.save_to_hf(None, str(self.home / "export"))
        loaded = dict(AutoModelForCausalLM.from_pretrained(self.home / "export").named_parameters())
        mine = whole_weights(engine)
        return {"exported": loaded.keys() == mine.keys() and all(torch.equal(loaded[n], mine[n]) for n in mine)}

    def checkpoint(self, engine, mesh, device, rank):
        """Saved, then a step: others must arrive at the same."""
        save(engine, self.home, rank)
        if rank == 0:
            engine.save_description(None, str(self.home / "models"))
        saved = whole_weights(engine)
        self.step(engine, mesh, device, STEPS)
        later = whole_weights(engine)
        if rank == 0:
            save_file(saved, self.home / "saved.safetensors")
            save_file(later, self.home / "later.safetensors")
        if dist.is_initialized():
            dist.barrier()
        seen = {"own": self.resumed(self.home, mesh, device)}
        if self.earlier is not None:
            seen["earlier"] = self.resumed(self.earlier, mesh, device)
        return seen

    def resumed(self, home, mesh, device):
        """A new engine with the checkpoint in `home`: how far it is, as filled and a step later."""
        engine = make_engine(tied_model(seed=1), device, mesh)
        restore(engine, home)
        saved = self.apart(whole_weights(engine), home / "saved.safetensors")
        self.step(engine, mesh, device, STEPS)
        return [saved, self.apart(whole_weights(engine), home / "later.safetensors")]

    def apart(self, weights, file):
        wanted = load_file(file)
        return max(float((weights[name] - weight).abs().max()) for name, weight in wanted.items())

    def another_role(self, device):
        """In the same process, with its own mesh: steps of its own, and of a critic."""
        family, degrees = OTHERS[self.layout]
        mesh = mesh_of_ranks(**degrees)
        seen = {}
        for head, loss, weight, plain_loss in (
            ("lm", answer_loss, answer_weight, plain_answer_loss),
            ("value", value_loss, value_weight, plain_value_loss),
        ):
            engine = make_engine(tiny_model(family, head=head, **SIZE), device, mesh)
            share = share_of(batch().to(device), mesh)
            found = engine.train_batch(share, loss, weight, mb_spec=MicroBatchSpec(n_mbs=2))
            plain = plain_loop(tiny_model(family, head=head, **SIZE))
            wanted = plain.step([batch()], plain_loss, RATES[0])
            mine = whole_weights(engine)
            apart = max(distance(mine[name], weight, 1e-2) for name, weight in plain.weights().items())
            seen[head] = [found["loss"], wanted["loss"], found["grad_norm"], wanted["grad_norm"], apart]
        return seen


@functools.cache
def live(folder, layout):
    """By rank, what the layout's ranks saw."""
    names = list(LAYOUTS)
    place = names.index(layout)
    if place:
        live(folder, names[place - 1])
    earlier = Life(names[place - 1], folder, None).home if place else None
    degrees = LAYOUTS[layout].values()
    return run_on_ranks(math.prod(degrees), Life(layout, folder, earlier), timeout=110)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(params=LAYOUTS)
def lived(request, folder):
    return SimpleNamespace(
        layout=request.param, ranks=live(folder, request.param), home=Life(request.param, folder, None).home
    )


def test_log_probs_are_those_of_transformers(lived):
    assert [rank["scores"] for rank in lived.ranks] == pytest.approx([0.0] * len(lived.ranks), abs=1e-5)


def test_losses_and_gradient_norms_are_those_of_a_plain_loop(lived):
    plain = plain_loop(tied_model())
    for number in range(STEPS):
        wanted = plain.step([batch(number)], plain_answer_loss, RATES[number])
        for rank in lived.ranks:
            assert rank["steps"][number]["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
            assert rank["steps"][number]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
            assert rank["steps"][number] == lived.ranks[0]["steps"][number]


def test_updates_are_those_of_a_plain_loop(lived):
    assert max(rank["apart"] for rank in lived.ranks) < 1e-3


def test_a_step_that_must_not_be_leaves_no_trace_on_any_rank(lived):
    for rank in lived.ranks:
        assert rank["spoiled"] == {"skipped": [1.0, 1.0], "same": [True, True], "no gradients left": True}


def test_exports_are_what_transformers_reads(lived):
    assert all(rank["exported"] for rank in lived.ranks)


def test_a_checkpoint_continues_bit_for_bit(lived):
    assert [rank["own"] for rank in lived.ranks] == [[0.0, 0.0]] * len(lived.ranks)


def test_a_checkpoint_of_another_layout_continues(lived):
    if lived.layout == next(iter(LAYOUTS)):
        pytest.skip("the first has none before it")
    for rank in lived.ranks:
        saved, later = rank["earlier"]
        assert saved == 0.0
        assert later < 1e-5


def test_the_model_of_a_checkpoint_converts_to_what_transformers_reads(lived, tmp_path):
    from transformers import AutoModelForCausalLM

    convert(plan_to_hf(lived.home / "models", tmp_path / "hf"), lambda done: None)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    wanted = load_file(lived.home / "saved.safetensors")
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in wanted.items())


def test_a_second_role_has_its_own_family_head_and_mesh(lived):
    for rank in lived.ranks:
        for loss, wanted_loss, norm, wanted_norm, apart in rank["other"].values():
            assert loss == pytest.approx(wanted_loss, rel=1e-6)
            assert norm == pytest.approx(wanted_norm, rel=1e-5)
            assert apart < 1e-4


def step_of(engine, number, mesh=None):
    share = share_of(batch(number).to(engine.device), mesh)
    return engine.train_batch(share, answer_loss, answer_weight, version_steps=number)["loss"]


def whole_weights(engine):
    return {name: parameter.cpu() for name, parameter in engine.whole_parameters()}


def test_bfloat16_parameters_have_float32_copies_that_a_checkpoint_keeps(tmp_path):
    def work(rank):
        with pretend_cuda() as device:
            mesh = mesh_of_ranks(dp=2)
            engine = make_engine(tied_model(), device, mesh, dtype="bfloat16")
            losses = [step_of(engine, number, mesh) for number in range(2)]
            save(engine, tmp_path, rank)
            dist.barrier()
            other = make_engine(tied_model(seed=1), device, mesh, dtype="bfloat16")
            restore(other, tmp_path)
            for one in (engine, other):
                losses += [step_of(one, number, mesh) for number in (2, 3)]
            mine, theirs = whole_weights(engine), whole_weights(other)
            same = all(weight.dtype is torch.float32 and torch.equal(weight, theirs[n]) for n, weight in mine.items())
            kept = {str(parameter.dtype) for parameter in engine.stage.parameters()}
            return {"losses": losses, "same": same, "kept": sorted(kept)}

    plain = plain_loop(tied_model())
    wanted = [plain.step([batch(number)], plain_answer_loss, RATES[number])["loss"] for number in range(4)]
    for rank in run_on_ranks(2, work):
        assert rank["losses"] == pytest.approx(wanted + wanted[2:], rel=0.05)
        assert rank["losses"][2:4] == rank["losses"][4:]
        assert rank["same"]
        assert rank["kept"] == ["torch.bfloat16"]


def test_fsdp_and_megatron_continue_from_each_other(tmp_path):
    def work(rank):
        with pretend_cuda() as device:
            places = {"fsdp": torch.device("cpu"), "megatron": device}
            engines = {name: make_engine(tied_model(), place, backend=name) for name, place in places.items()}
            for name, engine in engines.items():
                for number in range(2):
                    step_of(engine, number)
                save(engine, tmp_path / name)
                step_of(engine, 2)
            apart = []
            for name, other in (("fsdp", "megatron"), ("megatron", "fsdp")):
                engine = make_engine(tied_model(seed=1), places[name], backend=name)
                restore(engine, tmp_path / other)
                step_of(engine, 2)
                mine, theirs = whole_weights(engine), whole_weights(engines[other])
                apart.append(max(float((mine[n] - theirs[n]).abs().max().detach()) for n in theirs))
            return {"apart": apart}

    (seen,) = run_on_ranks(1, work)
    assert max(seen["apart"]) < 1e-5


# -- what it refuses -------------------------------------------------------------------------------------------------


def test_it_scores_and_trains_and_nothing_more():
    def work(rank):
        with pretend_cuda() as device:
            engine = make_engine(tied_model(), device)
            return {"trains": isinstance(engine, TrainEngine), "generates": isinstance(engine, GenerationEngine)}

    assert run_on_ranks(1, work) == [{"trains": True, "generates": False}]


def test_it_needs_a_cuda_device():
    with pytest.raises(ResourceError, match="needs a CUDA device"):
        make_engine(tied_model(), torch.device("cpu"))


@pytest.mark.parametrize("name", ["packed_sequences", "sequence_parallel"])
def test_what_nobody_has_run_on_a_gpu_is_refused_by_name(name):
    with pytest.raises(UsageError, match=name):
        make_backend(ModelBackendAbstraction("megatron", {name: True}))


@pytest.mark.parametrize(
    ("family", "changes", "degrees", "message"),
    [
        ("gpt2", {}, {}, "its family is gpt2"),
        ("gpt_neox", {}, {}, "nobody wrote its family gpt_neox"),
        ("llama", {"attention_bias": True}, {}, "some of its linear layers have biases"),
        ("llama", {"num_hidden_layers": 3}, {"pp": 2}, "3 layers, which pp=2 does not divide"),
        ("llama", {"num_key_value_heads": 1}, {"tp": 2}, "1 key-value heads, which tp=2 does not divide"),
    ],
)
def test_models_that_it_cannot_run_are_refused_with_the_reason(family, changes, degrees, message):
    def work(rank):
        with pretend_cuda() as device, pytest.raises(ModelError) as caught:
            make_engine(tiny_model(family, **changes), device, mesh_of_ranks(**degrees))
        return {"said": str(caught.value)}

    for said in run_on_ranks(math.prod(degrees.values()), work):
        assert message in said["said"]
