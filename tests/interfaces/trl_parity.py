"""What the comparisons with TRL share: a step of ours on a real backend,
and when it equals theirs."""

import pytest
import torch

from rlcli.api.config import FinetuneSpec, ModelBackendAbstraction
from rlcli.api.model import MicroBatchSpec, Model, call_interface
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
