"""Training on ranks: however uneven their shares are, the steps are those of a plain loop, and all
ranks take or refuse them alike."""

from __future__ import annotations

import math
from itertools import product

import pytest

from rlcli.api.data import SequenceSample
from rlcli.testing.backend.differences import (
    Weights,
    require_number,
    require_small,
    weights_apart,
)
from rlcli.testing.backend.lifecycle import SCOPES, SHARES, share_of
from rlcli.testing.backend.objectives import OBJECTIVES
from rlcli.testing.backend.plain import PlainTraining, Stats
from rlcli.testing.backend.runs_of_ranks import Lives, RunsOfRanks, rank_name
from rlcli.testing.backend.samples import batch
from rlcli.testing.contract import Violation

TRAINING = ("optimizer_step", "backward", "forward_backward_batch")
"""Methods of engines that train."""
OF_LOSS, OF_NORM, OF_UPDATE = 1 / 50, 1 / 5, 20
"""Limits as shares of the tolerance. For float32: 1e-6 for the loss of the first step, 1e-5 for
gradient norms, 1e-3 for the total change of the weights."""
ONE_UPDATE = "apply one update to all parts"


class TrainingOnRanksChecks(RunsOfRanks):
    """`train_batch` on ranks."""

    def test_ranks_train_like_a_plain_loop(self, finished: Lives) -> None:
        """ranks, uneven shares: steps of a plain loop"""
        self._require_plain_steps_of_ranks("lm", finished)

    def test_value_heads_train_on_ranks_like_a_plain_loop(self, finished: Lives) -> None:
        """ranks, uneven shares: steps of a value head"""
        self._require_plain_steps_of_ranks("value", finished)

    def _require_plain_steps_of_ranks(self, head: str, lives: Lives) -> None:
        self.require_training()
        for layout, (report, *_) in lives.reports.items():
            plain = self.plain_training(self.family_of_ranks, head)
            first = {name: weight.clone() for name, weight in plain.weights().items()}
            for step, rate in enumerate(self.rates()):
                shares = _shares(step, report["replicas"])
                expected = plain.step(shares, OBJECTIVES[head].plain, rate)
                self._require_step_of_ranks(report["steps"][head][step], expected, step, layout)
            self._require_plain_weights(lives.weights(layout, head), plain, first, head, layout)

    def _require_step_of_ranks(
        self, actual: Stats, expected: Stats, step: int, layout: str
    ) -> None:
        occasions = f"at step {step} on {layout}", f"in a plain loop (scope {SCOPES[step]})"
        norm, plain_norm = actual["grad_norm"], expected["grad_norm"]
        cause, where = _cause_of_norm(norm / plain_norm), self.source(*TRAINING)
        limit = OF_NORM * self.tolerance
        require_number("gradient norm", norm, plain_norm, limit, occasions, cause, where)
        if step == 0:
            cause = "compute the same log-probs; sum losses, divide by the weight of all"
            loss, limit = expected["loss"], OF_LOSS * self.tolerance
            require_number("loss", actual["loss"], loss, limit, occasions, cause, where)

    def _require_plain_weights(
        self, weights: Weights, plain: PlainTraining, first: Weights, head: str, layout: str
    ) -> None:
        """The weights after the steps of a plain loop that began with `first`, and their change."""
        certain, where = self.certain(self.family_of_ranks, head), self.source(*TRAINING)
        after = f"after {len(SHARES)} steps on {layout}"
        apart = weights_apart(weights, plain.weights(), certain)
        require_small("weights", apart, self.tolerance, after, ONE_UPDATE, where)
        missed = _missed(weights, first, plain.weights(), certain)
        limit = OF_UPDATE * self.tolerance
        require_small("changes of the weights", missed, limit, after, ONE_UPDATE, where)

    def test_ranks_report_alike(self, finished: Lives) -> None:
        """ranks: stats and weights agree, stats with those of one rank too"""
        self.require_training()
        for head, (layout, ranks) in product(OBJECTIVES, finished.reports.items()):
            first = finished.weights(layout, head)
            for rank, report in enumerate(ranks):
                who = rank_name(layout, rank)
                for step, expected in enumerate(finished.alone["steps"][head]):
                    self._require_equal_stats(report["steps"][head][step], expected, step, who)
                apart = weights_apart(finished.weights(layout, head, rank), first)
                cause, where = "apply one update on all ranks", self.source("optimizer_step")
                occasion = f"from those of the first rank on {who}"
                require_small("weights", apart, 0.0, occasion, cause, where)

    def _require_equal_stats(self, actual: Stats, expected: Stats, step: int, who: str) -> None:
        for name in expected if SCOPES[step] == "global" else ("loss", "lr", "loss_weight"):
            if actual.get(name) != pytest.approx(expected[name], rel=1e-3, abs=1e-6):
                raise Violation(
                    f"{name} is {actual.get(name)} on {who} at step {step}, "
                    f"{expected[name]:.6g} on one rank",
                    "reduce it over the data-parallel ranks, with all_reduce",
                    self.source("all_reduce", "train_batch"),
                )

    def test_all_ranks_refuse_what_one_spoils(self, finished: Lives) -> None:
        """ranks: if a gradient is not finite on one, all refuse the step"""
        cause = "decide by the norm over all ranks, before anything is applied"
        self._require_skipped(finished, "spoiled", cause)

    def test_all_ranks_refuse_a_step(self, finished: Lives) -> None:
        """ranks: a step refused by step_if changes nothing"""
        cause = "step_if sees stats of all ranks; drop the gradients where it says no"
        self._require_skipped(finished, "refused", cause)

    def _require_skipped(self, lives: Lives, which: str, cause: str) -> None:
        self.require_training()
        for who, report in lives.by_rank().items():
            skipped, apart = report[which]
            if skipped != 1.0 or apart > 0:
                raise Violation(
                    f"{who}: update_skipped {skipped:g}, weights changed by {apart:.2g}",
                    cause,
                    self.source("optimizer_step"),
                )


def _shares(step: int, replicas: int) -> list[SequenceSample]:
    """The batches averaged in a step: the whole batch, or each replica's part."""
    if SCOPES[step] == "global":
        return [batch(step)]
    return [share_of(batch(step), SHARES[step], replica, replicas) for replica in range(replicas)]


def _missed(actual: Weights, first: Weights, expected: Weights, certain: Weights | None) -> float:
    """The relative error of the total weight change by training."""
    off, change = 0.0, 0.0
    for name, weight in expected.items():
        counts = 1.0 if certain is None else certain[name]
        off += float(((actual[name] - weight) * counts).square().sum())
        change += float(((weight - first[name]) * counts).square().sum())
    return math.sqrt(off / change) if change else 0.0


def _cause_of_norm(ratio: float) -> str:
    if ratio == pytest.approx(0.5, rel=1e-3):
        return (
            "gradients are averaged over the ranks; sum them: the loss is divided by the "
            "weight of all ranks already"
        )
    if ratio == pytest.approx(2, rel=1e-3):
        return "gradients are summed over the ranks once too often"
    return "sum gradients over all ranks before the norm is taken; the norm is that of all parts"
