"""Muon: what it computes, which parameters it trains, and that layouts and resumed runs agree."""

import math

import pytest
import torch

from rlcli.backends._muon import COEFFICIENTS, ITERATIONS, RMS, Muon, orthogonalized
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import SETTINGS
from rlcli.testing.backend.differences import weights_apart
from rlcli.testing.backend.layouts import ranks_in
from rlcli.testing.backend.objectives import answer_loss, answer_weight
from rlcli.testing.backend.samples import groups
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model

MUON = {**SETTINGS, "optimizer": "muon", "momentum": 0.9, "dtype": "float32"}


class Subject(BackendContract):
    name = "fsdp"


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_singular_values(matrix):
    """The result by its definition: the same polynomial of every singular value."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(ITERATIONS):
        first, third, fifth = (
            c * values**power for c, power in zip(COEFFICIENTS, (1, 3, 5), strict=True)
        )
        values = first + third + fifth
    return (left * values) @ right


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)], ids=str)
def test_the_result_has_the_same_singular_vectors_and_values_near_one(shape):
    matrix = random(*shape)
    result = orthogonalized(matrix, torch.float32)
    torch.testing.assert_close(result.double(), by_singular_values(matrix), atol=1e-4, rtol=1e-4)
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.3
    assert values.max() < 1.3


def test_experts_of_a_stack_are_independent():
    stack = random(3, 8, 5)
    expected = torch.stack([orthogonalized(matrix, torch.float32) for matrix in stack])
    torch.testing.assert_close(orthogonalized(stack, torch.float32), expected)


@pytest.mark.parametrize("shape", [(8, 8), (6, 16), (16, 6)], ids=str)
def test_updates_are_those_of_the_optimizer_of_torch(shape, monkeypatch):
    """torch's computes in bfloat16, unless it is kept from converting."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor)
    ours, theirs = (torch.nn.Parameter(random(*shape)) for _ in range(2))
    optimizer = Muon(
        [{"params": [ours], "weight_decay": 0.1}], lr=0.02, momentum=0.95, dtype=torch.float32
    )
    reference = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        ours.grad = random(*shape, seed=step + 1)
        theirs.grad = ours.grad.clone()
        before = ours.detach().clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(ours - before, theirs - before, atol=1e-6, rtol=1e-4)
    assert (ours - random(*shape)).abs().max() > 0.02


def updated(parameter, gradient):
    parameter = torch.nn.Parameter(parameter.clone())
    parameter.grad = gradient
    groups_ = [{"params": [parameter], "weight_decay": 0.1}]
    Muon(groups_, lr=0.02, momentum=0.95, dtype=torch.float32).step()
    return parameter.detach()


def test_a_stack_is_updated_like_its_matrices():
    stack, gradients = random(3, 5, 8), random(3, 5, 8, seed=1)
    gradients[2] = 0.0  # an expert that no token was sent to
    expected = torch.stack(list(map(updated, stack, gradients)))
    torch.testing.assert_close(updated(stack, gradients), expected)
    torch.testing.assert_close(expected[2], stack[2] * (1 - 0.02 * 0.1))


def test_an_update_has_the_size_of_one_of_adamw():
    parameter = torch.nn.Parameter(torch.zeros(64, 256))
    parameter.grad = random(64, 256)
    groups_ = [{"params": [parameter], "weight_decay": 0.0}]
    Muon(groups_, lr=0.01, momentum=0.95, dtype=torch.float32).step()
    rms = parameter.square().mean().sqrt().item()
    assert rms == pytest.approx(0.01 * RMS * math.sqrt(256) / math.sqrt(256), rel=0.3)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "cohere"])
def test_muon_trains_the_matrices_of_layers_and_adamw_the_rest(family):
    """Norms of Cohere's queries and keys have a row for each head, and are no matrices either."""
    lm = tiny_model("cohere", use_qk_norm=True) if family == "cohere" else None
    engine = Subject().engine(None if lm else family, lm=lm, **MUON)
    engine.train_batch(groups(), answer_loss, answer_weight)
    state = engine.state().optimizer
    shapes = {name: p.shape for name, p in engine.lm.named_parameters()}
    for name, shape in shapes.items():
        is_outside = any(word in name for word in ("embed", "wte", "wpe", "lm_head", "norm"))
        moments = {key.rsplit("/", 1)[1] for key in state if key.rsplit("/", 1)[0] == name}
        if len(shape) > 1 and not is_outside:
            assert moments == {"momentum_buffer"}, name
        else:
            assert moments == {"step", "exp_avg", "exp_avg_sq"}, name


def built(family, **arguments):
    """Three experts are cut where two ranks share them."""
    lm = tiny_model("mixtral", num_local_experts=3) if family == "three experts" else None
    return Subject().engine(None if lm else family, lm=lm, **arguments, **MUON)


def trained(layout=None, family="llama", share=None, steps=2):
    """The weights after a few updates on a rank's `share` of the samples."""
    mesh = mesh_of_ranks(**layout) if layout else None
    experts = layout.get("ep", 1) if layout else 1
    engine = built(family, mesh=mesh, expert_ranks=experts)
    for seed in range(steps):
        sample = groups(seed)
        sample = sample if share is None else sample.select_indices(share)
        engine.train_batch(sample, answer_loss, answer_weight, version_steps=seed, cut="sequence")
    return Subject().weights(engine)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"dp": 2}),
        ("llama", {"tp": 2}),
        ("llama", {"cp": 2}),
        ("llama", {"dp": 2, "tp": 2}),
        ("mixtral", {"dp": 2}),
        ("mixtral", {"dp": 2, "ep": 2}),
        ("three experts", {"dp": 2}),
    ],
    ids=str,
)
def test_an_update_does_not_depend_on_the_layout(family, layout):
    weights = trained(family=family)
    start = Subject().weights(built(family))
    assert weights_apart(start, weights) > 1e-3

    def work(rank):
        replicas, ranks = layout.get("dp", 1), ranks_in(layout)
        share = [[0, 1, 2], [0], [1, 2]][replicas - 1 + rank * replicas // ranks]
        return weights_apart(trained(layout, family, share), weights)

    for apart in run_on_ranks(ranks_in(layout), work, timeout=120):
        assert apart < 2e-5


def test_training_continues_exactly_from_its_state():
    """Also in an engine that has not made an update yet."""
    engine, resumed = built("llama"), built("llama")
    engine.train_batch(groups(0), answer_loss, answer_weight)
    saved, room = engine.state(), resumed.state(room_for_optimizer=True)
    assert saved.optimizer.keys() == room.optimizer.keys()
    for name, tensor in {**room.weights, **room.optimizer}.items():
        source = saved.weights if name in room.weights else saved.optimizer
        tensor.data.copy_(source[name])
    resumed.state_was_filled(room)
    for each in (engine, resumed):
        each.train_batch(groups(1), answer_loss, answer_weight)
    for name, weight in Subject().weights(engine).items():
        assert torch.equal(weight, Subject().weights(resumed)[name]), name


def test_an_offloaded_engine_makes_the_same_update():
    plain, offloaded = built("llama"), built("llama")
    offloaded.offload()
    for engine in (plain, offloaded):
        engine.train_batch(groups(0), answer_loss, answer_weight)
    assert weights_apart(Subject().weights(plain), Subject().weights(offloaded)) == 0.0
