"""Checks over a two-layer transformers model and the default backend: number formats,
real ranks, files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlcli.api.config import FinetuneSpec, MicroBatchSpec, ModelBackendAbstraction
from rlcli.api.default_backends import TRAINED
from rlcli.api.interface import ModelInterface
from rlcli.api.model import Model, call_interface
from rlcli.registry import make_backend
from rlcli.testing.batches import TOKENIZER_FILE, DigitTokenizer
from rlcli.testing.contract import Violation
from rlcli.testing.held_source import HeldSource
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Rehearsal,
    as_of_teacher,
    place_of_call,
)
from rlcli.testing.saved_models import load_saved

_BF16 = 0.3
"""Tolerance of bfloat16 against float32: numbers have two digits,
and several optimizer steps drift apart."""


class RealModelChecks(InterfaceSubject):
    def test_works_in_bfloat16(self, rehearsal: Rehearsal) -> None:
        """works in bfloat16, close to float32"""
        exact, rounded = (
            _step(rehearsal, _model(rehearsal, dtype=dtype)) for dtype in ("float32", "bfloat16")
        )
        for name in ("loss", "grad_norm"):
            gap = abs(exact[name] - rounded[name])
            if not gap <= _BF16 * max(1.0, abs(exact[name])):
                raise Violation(
                    f"{name} is {exact[name]:.6g} in float32, {rounded[name]:.6g} in bfloat16",
                    (
                        "keep log-probs, sums and normalisations in float32, and cast "
                        "nothing to bfloat16 yourself"
                    ),
                    rehearsal.where,
                )

    def test_saves_what_transformers_loads(self, rehearsal: Rehearsal, tmp_path: Path) -> None:
        """trained, saved, loaded by transformers: the same weights"""
        interface = rehearsal.make()
        model, folder = _model(rehearsal), tmp_path / "saved"
        _step(rehearsal, model, interface)
        interface.save(model, str(folder))
        where = place_of_call(interface, "save")
        if not list(folder.glob("*.safetensors")):
            names = (
                ", ".join(sorted(path.name for path in folder.iterdir()))
                if folder.is_dir()
                else "nothing"
            )
            raise Violation(
                f"the folder has no weights (*.safetensors) but {names}", "use save_to_hf", where
            )
        if not (folder / TOKENIZER_FILE).exists():
            raise Violation(
                "the folder has no tokenizer: the model in it cannot be used",
                "pass it on: model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)",
                where,
            )
        loaded = load_saved(folder, _head(rehearsal), dtype=torch.float32).state_dict()
        for name, tensor in model.module.lm.state_dict().items():
            if name not in loaded or not torch.equal(loaded[name], tensor):
                raise Violation(
                    f"{name} is not in the folder as it was trained",
                    "save the trained model",
                    where,
                )


def _head(rehearsal: Rehearsal) -> str:
    """The head that training uses."""
    heads = rehearsal.heads
    if len(heads) != 1:
        pytest.skip(f"not tried: asks for {len(heads)} heads of one model")
    return next(iter(heads))


def _model(
    rehearsal: Rehearsal,
    dtype: str = "float32",
    lr: float = 1e-3,
) -> Model:
    from rlcli.testing.tiny_models import tiny_model

    source = HeldSource(tiny_model(head=_head(rehearsal)))
    model = Model("tested", None, DigitTokenizer(), torch.device("cpu"), source=source)
    backend = make_backend(ModelBackendAbstraction(TRAINED, {"dtype": dtype, "lr": lr}))
    return backend.initialize(
        model, FinetuneSpec(total_train_steps=4, dataset_size=8, train_batch_size=8)
    )


def _step(
    rehearsal: Rehearsal, model: Model, interface: ModelInterface | None = None
) -> dict[str, float]:
    """One step of a new interface on a batch that was sampled by the model; by another one if it
    has no language-model head."""
    sampler = model if _head(rehearsal) == "lm" else None
    batch = as_of_teacher(rehearsal.make(), rehearsal.fit(rehearsal.batches(), sampler), sampler)
    stats = call_interface(
        interface or rehearsal.make(), "train_step", model, batch, MicroBatchSpec(n_mbs=2)
    )
    for name, value in stats.items():
        if not math.isfinite(value):
            raise Violation(
                f"{name} is {value} over a transformers model",
                "keep log-probs, sums and normalisations in float32",
                rehearsal.where,
            )
    return stats
