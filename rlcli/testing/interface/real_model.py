"""Checks over a two-layer transformers model and the default backend: number formats,
real ranks, files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlcli.api.config import FinetuneSpec, MicroBatchSpec, ModelBackendAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.default_backends import TRAINED
from rlcli.api.interface import ModelInterface
from rlcli.api.model import Model, call_interface
from rlcli.api.value_model import value_model_class
from rlcli.registry import make_backend
from rlcli.testing.batches import TOKENIZER_FILE, DigitTokenizer
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.held_source import HeldSource
from rlcli.testing.interface.loss import cause_unless_no_sum
from rlcli.testing.interface.training_trial import InterfaceSubject, Rehearsal

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
                    place_of(rehearsal.train_step),
                )

    def test_frozen_weights_stay_in_a_real_model(self, rehearsal: Rehearsal) -> None:
        """what is frozen in a transformers model stays as it is"""
        model = _model(rehearsal, frozen="layers.0")
        lm = model.module.lm
        before = {name: parameter.detach().clone() for name, parameter in lm.named_parameters()}
        _step(rehearsal, model)
        moved = {
            name
            for name, parameter in lm.named_parameters()
            if not torch.equal(parameter, before[name])
        }
        frozen = {name for name in before if "layers.0" in name}
        if moved & frozen:
            raise Violation(
                f"the frozen {min(moved & frozen)} changed",
                "leave requires_grad and the parameters alone",
                place_of(rehearsal.train_step),
            )
        if not moved:
            raise Violation(
                "no weight of the model changed in a step",
                "the loss must come from the output that train_batch hands to it",
                place_of(rehearsal.train_step),
            )

    def test_two_processes_change_nothing(self, rehearsal: Rehearsal) -> None:
        """the same on two processes with a sharded model"""
        from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks, skip_without_forks

        skip_without_forks()
        lr = 1e-5  # AdamW makes full steps of rounding errors; these must stay small
        alone = _model(rehearsal, lr=lr)
        batch = _batch(rehearsal, alone)
        expected = [_train(rehearsal, alone, batch) for _ in range(2)]
        cut = batch.bs // 2 + 1

        def one_rank(rank: int) -> dict[str, Any]:
            model = _model(rehearsal, mesh=mesh_of_ranks(dp=2), lr=lr)
            share = batch.select_indices(range(cut) if rank == 0 else range(cut, batch.bs))
            return {"steps": [_train(rehearsal, model, share) for _ in range(2)]}

        for rank, answer in enumerate(run_on_ranks(2, one_rank)):
            for number, (stats, on_rank) in enumerate(zip(expected, answer["steps"], strict=True)):
                for name, value in stats.items():
                    rank_value = on_rank[name]
                    if not abs(rank_value - value) <= 1e-3 * max(1.0, abs(value)):
                        raise Violation(
                            (
                                f"{name} of step {number} is {value:.6g} in one process, "
                                f"{rank_value:.6g} on rank {rank}"
                            ),
                            cause_unless_no_sum(
                                rehearsal.result,
                                "it depends on one rank's share; reduce over ranks",
                            ),
                            place_of(rehearsal.train_step),
                        )

    def test_saves_what_transformers_loads(self, rehearsal: Rehearsal, tmp_path: Path) -> None:
        """trained, saved, loaded by transformers: the same weights"""
        interface = rehearsal.make()
        model, folder = _model(rehearsal), tmp_path / "saved"
        _step(rehearsal, model, interface)
        interface.save(model, str(folder))
        where = place_of(type(interface).save)
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
        loaded = _loaded(folder, _head(rehearsal)).state_dict()
        for name, tensor in model.module.lm.state_dict().items():
            if name not in loaded or not torch.equal(loaded[name], tensor):
                raise Violation(
                    f"{name} is not in the folder as it was trained",
                    "save the trained model",
                    where,
                )


def _head(rehearsal: Rehearsal) -> str:
    """The head that training uses."""
    heads = rehearsal.result.engine.heads
    if len(heads) != 1:
        pytest.skip(f"not tried: asks for {len(heads)} heads of one model")
    return next(iter(heads))


def _model(
    rehearsal: Rehearsal,
    dtype: str = "float32",
    mesh: Any = None,
    frozen: str | None = None,
    lr: float = 1e-3,
) -> Model:
    from rlcli.testing.tiny_models import tiny_model

    module = tiny_model(head=_head(rehearsal))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    source = HeldSource(module)
    model = Model(
        "tested", None, DigitTokenizer(), torch.device("cpu"), source=source, device_mesh=mesh
    )
    backend = make_backend(ModelBackendAbstraction(TRAINED, {"dtype": dtype, "lr": lr}))
    return backend.initialize(
        model, FinetuneSpec(total_train_steps=4, dataset_size=8, train_batch_size=8)
    )


def _step(
    rehearsal: Rehearsal, model: Model, interface: ModelInterface | None = None
) -> dict[str, float]:
    """One step of a new interface on a batch sampled by the model."""
    return _train(rehearsal, model, _batch(rehearsal, model), interface)


def _batch(rehearsal: Rehearsal, model: Model) -> SequenceSample:
    """The training batch of a model without a language-model head, sampled by another one."""
    return rehearsal.fit(rehearsal.batches(), model if _head(rehearsal) == "lm" else None)


def _train(
    rehearsal: Rehearsal,
    model: Model,
    batch: SequenceSample,
    interface: ModelInterface | None = None,
) -> dict[str, float]:
    stats: dict[str, float] = call_interface(
        interface or rehearsal.make(), "train_step", model, batch, MicroBatchSpec(n_mbs=2)
    )
    for name, value in stats.items():
        if not math.isfinite(value):
            raise Violation(
                f"{name} is {value} over a transformers model",
                "keep log-probs, sums and normalisations in float32",
                place_of(rehearsal.train_step),
            )
    return stats


def _loaded(folder: Path, head: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind: Any = (
        AutoModelForCausalLM
        if head == "lm"
        else value_model_class(AutoConfig.from_pretrained(folder))
    )
    return kind.from_pretrained(folder, dtype=torch.float32)
