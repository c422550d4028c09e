"""State that outlives an engine: checkpoints that continue bit for bit, folders for transformers,
released memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlcli.api.model import ForwardEngine, HoldsWeights
from rlcli.checkpoint.state import copy_to_host, write_optimizer, write_weights
from rlcli.checkpoint.state_reading import fill
from rlcli.testing.backend.base import SETTINGS, BackendChecks, offers, source_of
from rlcli.testing.backend.differences import different, require_close, weights_apart
from rlcli.testing.backend.forward import outputs, scores
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.objectives import train
from rlcli.testing.backend.plain import logits_of, values_by
from rlcli.testing.backend.samples import batch
from rlcli.testing.contract import Violation, skip_unless
from rlcli.testing.saved_models import load_saved
from rlcli.testing.tiny_models import tiny_model


class StateChecks(BackendChecks):
    """`state`, `save_to_hf`, `save_description`, `offload`."""

    def test_a_checkpoint_continues_bit_for_bit(self, tmp_path: Path) -> None:
        """saved and loaded, training continues bit for bit"""
        for family in self.families:
            engine = self._kept(self.trained_engine(family, **SETTINGS))
            for step in range(2):
                train(engine, step)
            save(engine, tmp_path / family)
            train(engine, 2)
            filled = {"a new engine": self.engine(family, seed=1, **SETTINGS)}
            if family == self.families[0]:  # what it had before is overwritten in all alike
                filled["an engine that has trained"] = self.engine(family, seed=2, **SETTINGS)
                train(filled["an engine that has trained"], 0)
            for description, resumed in filled.items():
                restore(resumed, tmp_path / family)
                train(resumed, 2)
                occasion = f"{description} ({family}), filled with the state of step 2"
                self._require_equal(resumed, engine, occasion)

    def test_a_checkpoint_has_the_names_of_transformers(self) -> None:
        """a checkpoint uses transformers' names and holds tied weights once"""
        for family in self.families:
            engine = self._kept(self.engine(family))
            actual = set(engine.state().weights)
            expected = {name for name, _ in tiny_model(family).named_parameters()}
            if actual != expected:
                raise Violation(
                    f"state() of {family} lacks {sorted(expected - actual)} and adds "
                    f"{sorted(actual - expected)}",
                    "use the names of named_parameters() of the given model",
                    source_of(engine, "state"),
                )

    def test_checkpoints_are_read_by_transformers(self, tmp_path: Path) -> None:
        """weights and description of a checkpoint are a HF folder"""
        engine = self._kept(self.engine(seed=3))
        save(engine, tmp_path)
        engine.save_description(None, str(tmp_path / "models"))
        self._require_export(engine, tmp_path / "models", "lm", "state and save_description")

    def test_exports_are_read_by_transformers(self, tmp_path: Path) -> None:
        """an export, loaded by transformers: equal logits"""
        heads = ("lm", "value") if self.cls.SCORES else ("lm",)
        for family, head in product(self.families, heads):
            engine = self.engine(family, head=head, lr=0.05)
            if self.trains() and head == "lm":
                train(engine, 0)
            parent = tmp_path / f"{family}-{head}"
            parent.mkdir()
            engine.save_to_hf(None, str(parent / "model"))
            self._require_export(engine, parent / "model", head, "save_to_hf")
            left = sorted(path.name for path in parent.iterdir() if path.name != "model")
            if left:
                raise Violation(
                    f"save_to_hf leaves {left} outside its folder",
                    "remove it",
                    source_of(engine, "save_to_hf"),
                )

    def test_an_offloaded_engine_goes_on(self) -> None:
        """offloaded and back: the same numbers, bit for bit"""
        engine, untouched = self.engine(**SETTINGS), self.engine(**SETTINGS)
        skip_unless(offers(engine, "offload"), "does not offload")
        for step in range(2):
            engine.offload()
            engine.offload()
            if self.cls.SCORES:
                _require_same("log-probs", engine, scores(engine), scores(untouched))
            if self.generates():
                engine.offload()
                answers = (
                    generate(engine, greedy=True).tokens,
                    generate(untouched, greedy=True).tokens,
                )
                _require_same("responses", engine, *map(torch.cat, answers))
            if self.trains():
                engine.offload()
                train(engine, step)
                train(untouched, step)
        engine.offload()
        self._require_equal(engine, untouched, "weights after offload")

    # -- comparing ---------------------------------------------------------------------------------

    def _kept(self, engine: Any) -> Any:
        skip_unless(offers(engine, "state"), "cannot be checkpointed")
        return engine

    def _require_equal(self, actual: HoldsWeights, expected: HoldsWeights, occasion: str) -> None:
        mine, theirs = self.weights(actual), self.weights(expected)
        differ = different(mine, theirs)
        if differ:
            raise Violation(
                f"{occasion}: {len(differ)} of {len(theirs)} weights differ, by "
                f"{weights_apart(mine, theirs):.2g} of the largest ({differ[0]})",
                "state() must return everything that the next step depends on, live, not as copies",
                source_of(actual, "state", "offload"),
            )

    def _require_export(self, engine: HoldsWeights, folder: Path, head: str, method: str) -> None:
        loaded, report = load_saved(folder, head, output_loading_info=True)
        where = source_of(engine, method.split()[-1])
        keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
        wrong = {key: report[key] for key in keys if report[key]}
        if wrong:
            raise Violation(
                f"the folder of {method} has {wrong}", "write every parameter once", where
            )
        differ = different(self.weights(engine), dict(loaded.named_parameters()))
        if differ:
            raise Violation(
                f"{len(differ)} weights in the folder of {method} are not the engine's, "
                f"{differ[0]} among them",
                "write the weights as they are now, in their own dtype",
                where,
            )
        if isinstance(engine, ForwardEngine):
            self._require_outputs(engine, loaded.eval().requires_grad_(False), head, where)

    def _require_outputs(self, engine: ForwardEngine, lm: nn.Module, head: str, where: str) -> None:
        """Raises Violation unless they are those of `lm`, from a folder that it has written."""
        if head == "lm":
            actual, expected = engine.forward(batch()), torch.cat(logits_of(lm, batch()))
        else:
            actual, expected = outputs(engine, batch(), head), values_by(lm, batch())
        require_close(
            f"{head} outputs of a folder",
            actual,
            expected,
            self.tolerance,
            "write the weights and the configuration that the engine computes with",
            where,
        )


def _require_same(
    quantity: str, engine: HoldsWeights, actual: torch.Tensor, expected: torch.Tensor
) -> None:
    if not torch.equal(actual, expected):
        raise Violation(
            f"{quantity} differ after offload",
            "bring the weights back unchanged, before they are used",
            source_of(engine, "offload"),
        )


def save(engine: HoldsWeights, folder: Path, rank: int = 0) -> None:
    """Write a checkpoint as a run does: each rank its own part."""
    copy = copy_to_host(engine.state(), leads=rank == 0)
    for folder_name in ("models", "optim"):
        (folder / folder_name).mkdir(parents=True, exist_ok=True)
    write_weights(copy, folder / "models", rank)
    write_optimizer(copy, folder / "optim", rank)


def restore(engine: HoldsWeights, folder: Path) -> None:
    """Read a checkpoint as a run does, on any number of ranks."""
    state = engine.state(room_for_optimizer=True)
    fill(state.weights, folder / "models")
    if state.optimizer:
        fill(state.optimizer, folder / "optim")
    engine.state_was_filled(state)
