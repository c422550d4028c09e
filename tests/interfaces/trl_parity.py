"""What the comparisons with TRL share: a step of ours on a real backend,
and when it equals theirs.

They hold with TRL 1.12, which is installed because it is the last release with PPO, and with 1.16.
"""

import copy

import pytest
import torch

from rlcli.api.config import FinetuneSpec, ModelBackendAbstraction
from rlcli.api.model import MicroBatchSpec, Model, call_interface
from rlcli.interfaces.reference import ReferenceInterface
from rlcli.registry import make_backend
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import TinyTokenizer

TOLERANCE = 1e-5


def role(module, backend="fsdp"):
    """A role on one rank of a real backend."""
    model = Model("tested", None, TinyTokenizer(), torch.device("cpu"), source=HeldSource(module))
    args = {"lr": 1e-3} if backend == "fsdp" else {}
    backend_there = make_backend(ModelBackendAbstraction(backend, {"dtype": "float32", **args}))
    return backend_there.initialize(
        model, FinetuneSpec(total_train_steps=4, dataset_size=8, train_batch_size=8)
    )


def near(module, seed, distance):
    """The same model, some steps away."""
    moved, generator = copy.deepcopy(module), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(distance * torch.randn(parameter.shape, generator=generator))
    return moved


def with_logprobs(batch, **modules):
    """The batch with a key of log-probs for each model."""
    for key, module in modules.items():
        logprobs = call_interface(
            ReferenceInterface(), "inference", role(module, "inference"), batch
        )
        logprobs.remap_keys_({"packed_ref_logprobs": key})
        batch.update_(logprobs)
    return batch


def ours(interface, module, batch, micro_batches):
    """(stats, gradients by name) of a training step."""
    model, gradients = role(module), {}
    step = model.module.optimizer_step

    def watched():
        gradients.update({name: p.grad.clone() for name, p in model.module.lm.named_parameters()})
        return step()

    model.module.optimizer_step = watched
    stats = call_interface(
        interface, "train_step", model, batch, MicroBatchSpec(n_mbs=micro_batches)
    )
    return stats, gradients


def with_weights(model, module):
    """The model of a trainer with the weights of another one, ready for gradients. TRL since 1.13
    gives it a `forward` of its own, so no other model will do."""
    model.load_state_dict(module.state_dict())
    model.zero_grad(set_to_none=True)
    return model.requires_grad_(True)


def check_equal(ours, theirs, factor=1.0, least=100 * TOLERANCE):
    """(stats, gradients) of ours are (loss, gradients) of theirs times a factor that a convention
    explains, and some gradient is above `least`, so that there is something to compare."""
    (stats, gradients), (loss, expected) = ours, theirs
    assert stats["loss"] == pytest.approx(factor * loss, rel=TOLERANCE, abs=TOLERANCE)
    assert expected.keys() <= gradients.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], factor * gradient, rtol=TOLERANCE, atol=TOLERANCE, msg=name
        )
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > least
