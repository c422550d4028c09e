"""Ranks in every layout that the backend declares: together they compute what one rank does,
however unevenly."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from rlcli.testing.backend.layouts import WITH_EXPERTS, WITH_VIRTUAL_STAGES, Layout
from rlcli.testing.backend.lifecycle import OF_ONE, OF_OTHERS, ON_ONE, OWN
from rlcli.testing.backend.runs_of_ranks import Lives
from rlcli.testing.backend.training_on_ranks import TrainingOnRanksChecks
from rlcli.testing.contract import Violation, skip_if, skip_unless

EXPERTS = "mixtral"
DEEP = "deep_llama"
"""Has a layer for every virtual stage."""


class RanksChecks(TrainingOnRanksChecks):
    """Forward passes, generation, saving and loading on ranks, and the checks of training."""

    def test_ranks_that_divide_experts_pass_the_checks_of_ranks(self, tmp_path: Path) -> None:
        """ranks that divide experts (ep) pass the checks of ranks"""
        skip_if("ep" not in self.dimensions(), "does not support ep")
        self._require_checks_of_ranks(EXPERTS, WITH_EXPERTS, tmp_path)

    def test_ranks_with_virtual_stages_pass_the_checks_of_ranks(self, tmp_path: Path) -> None:
        """ranks that take turns at a pipeline pass the checks of ranks"""
        self.require_settings("virtual_stages")
        self._require_checks_of_ranks(DEEP, WITH_VIRTUAL_STAGES, tmp_path)

    def _require_checks_of_ranks(
        self, family: str, layouts: Sequence[Layout], folder: Path
    ) -> None:
        """All checks of ranks that have finished, of ranks that run another model in other
        layouts."""
        self.require_all_layouts()
        cls = type("OtherRanks", (type(self),), {"family_of_ranks": family, "layouts": layouts})
        checks = cls()
        lives = checks.live(folder)
        checks.test_ranks_get_through(lives)
        for _, check in inspect.getmembers(cls, inspect.isfunction):
            if "finished" in inspect.signature(check).parameters:
                # what the backend does not do, others of its ranks do not either
                with suppress(pytest.skip.Exception):
                    check(checks, lives)

    def test_ranks_share_a_forward_pass(self, finished: Lives) -> None:
        """ranks: log-probs and values of uneven and of empty shares"""
        cause = (
            "a rank computes its own share; one that has none takes part with idle micro-batches"
        )
        methods = "forward_micro_batch", "forward_batch"
        for quantity in ("log-probs", "values"):
            self.require_small_errors(finished, quantity, quantity, cause, *methods)

    def test_ranks_export_their_weights(self, finished: Lives) -> None:
        """ranks: an export holds the weights of all"""
        quantity = "weights of an export"
        cause = "gather every parameter whole; one rank writes the folder"
        self.require_small_errors(finished, "exported", quantity, cause, "save_to_hf", limit=0.0)

    def test_ranks_generate_with_the_weights_of_now(self, finished: Lives) -> None:
        """ranks: greedy answers are those of the trained weights"""
        skip_unless(self.cls.GENERATES, "does not generate")
        for who, report in finished.by_rank().items():
            for when, (actual, expected) in report["answers"].items():
                if actual != expected:
                    raise Violation(
                        f"greedy answers of {who} {when} are {actual}, not {expected}",
                        "all ranks use the current weights; renew whole copies when the "
                        "weights have changed",
                        self.source("generator", "generate"),
                    )

    def test_offloading_gives_memory_back(self, finished: Lives) -> None:
        """an offloaded rank holds its part of the state and no more"""
        for who, report in finished.by_rank().items():
            skip_if("held" not in report, "does not offload, or cannot be checkpointed")
            if report["held"] > 1.4:
                raise Violation(
                    f"{who} holds {report['held']:.2f} times its part of the state after offload",
                    "drop whole copies, gradients and caches",
                    self.source("offload"),
                )

    def test_ranks_give_the_blocks_that_they_hold(self, finished: Lives) -> None:
        """ranks: weight_blocks names the numbers that are read"""
        skip_unless("blocks" in finished.alone, "gathers its parameters")
        quantity = "numbers of weight_blocks"
        cause = "offsets and sizes are those of this rank's part in the whole parameter"
        self.require_small_errors(finished, "blocks", quantity, cause, "weight_blocks", limit=0.0)

    def test_ranks_take_parameters(self, finished: Lives) -> None:
        """ranks: take_parameters mixes weights by eta"""
        skip_unless("taken" in finished.alone, "takes no parameters of other engines")
        quantity = "weights at eta 0.25"
        cause = "mix whole parameters with whole ones, or parts with parts"
        self.require_small_errors(finished, "taken", quantity, cause, "take_parameters")

    def test_a_checkpoint_of_two_ranks_continues(self, finished: Lives) -> None:
        """ranks: saved and loaded, training continues bit for bit"""
        cause = "state() must return everything that the next step depends on"
        self._require_continued(finished, OWN, cause, 0.0)

    def test_checkpoints_fit_any_number_of_ranks(self, finished: Lives) -> None:
        """a checkpoint of one layout continues in another"""
        cause = "return DTensors where ranks hold parts, so that they can be resharded"
        for which in (OF_ONE, ON_ONE, OF_OTHERS):
            self._require_continued(finished, which, cause)

    def _require_continued(
        self, lives: Lives, which: str, cause: str, limit: float | None = None
    ) -> None:
        is_continued = any(OWN in report for report in lives.by_rank().values())
        skip_unless(self.cls.TRAINS and is_continued, "does not train, or cannot be checkpointed")
        quantity = f"weights, a step after {which},"
        self.require_small_errors(lives, which, quantity, cause, "state", limit=limit)
