"""State that outlives an engine: checkpoints that continue bit for bit, folders for transformers,
released memory."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from rlcli.api.model import ForwardEngine, HoldsWeights
from rlcli.checkpoint.state import copy_to_host, write_optimizer, write_weights
from rlcli.checkpoint.state_reading import fill
from rlcli.testing.backend.base import SETTINGS, BackendChecks, offers, source_of
from rlcli.testing.backend.differences import require_close, require_same, require_same_weights
from rlcli.testing.backend.forward import outputs, plain_outputs, scores
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.objectives import train
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
                occasion = f"in {description} ({family}), a step after it was filled"
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
        """an export, loaded by transformers: equal outputs"""
        heads = ("lm", "value") if self.cls.SCORES else ("lm",)
        for family, head in product(self.families, heads):
            engine = self.engine(family, head=head, lr=0.05)
            if self.cls.TRAINS and head == "lm":
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
        where = source_of(engine, "offload")
        cause = "bring the weights back unchanged, before they are used"
        for step in range(2):
            engine.offload()
            engine.offload()
            if self.cls.SCORES:
                actual, expected = scores(engine), scores(untouched)
                require_same("log-probs", actual, expected, "after offload", cause, where)
            if self.cls.GENERATES:
                engine.offload()
                drawn = generate(engine, greedy=True).tokens
                answers = generate(untouched, greedy=True).tokens
                require_same("responses", drawn, answers, "after offload", cause, where)
            if self.cls.TRAINS:
                engine.offload()
                train(engine, step)
                train(untouched, step)
        engine.offload()
        self._require_equal(engine, untouched, "after offload")

    # -- comparing ---------------------------------------------------------------------------------

    def _kept(self, engine: Any) -> Any:
        skip_unless(offers(engine, "state"), "cannot be checkpointed")
        return engine

    def _require_equal(self, actual: HoldsWeights, expected: HoldsWeights, occasion: str) -> None:
        require_same_weights(
            self.weights(actual),
            self.weights(expected),
            occasion,
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
        written, occasion = dict(loaded.named_parameters()), f"from those in a folder of {method}"
        cause = "write the weights as they are now, in their own dtype"
        require_same_weights(self.weights(engine), written, occasion, cause, where)
        if isinstance(engine, ForwardEngine):
            lm = loaded.eval().requires_grad_(False)
            actual, expected = outputs(engine, batch(), head), plain_outputs(lm, batch(), head)
            quantity = f"{head} outputs of a folder"
            cause = "write the weights and the configuration that the engine computes with"
            require_close(quantity, actual, expected, self.tolerance, cause, where)


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
