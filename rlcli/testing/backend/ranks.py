"""Ranks in every layout that the backend declares: together they compute what one rank does,
however unevenly."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file

from rlcli.api.data import SequenceSample
from rlcli.testing.backend.base import BackendChecks, source_of
from rlcli.testing.backend.differences import (
    Weights,
    require_number,
    require_small,
    weights_apart,
)
from rlcli.testing.backend.layouts import (
    ALONE,
    LAYOUTS,
    WITH_EXPERTS,
    WITH_VIRTUAL_STAGES,
    Layout,
    layout_name,
    ranks_in,
)
from rlcli.testing.backend.lifecycle import (
    OF_ONE,
    OF_OTHERS,
    ON_ONE,
    OWN,
    SCOPES,
    SHARES,
    Life,
    RankReport,
    share_of,
    weights_file,
)
from rlcli.testing.backend.objectives import OBJECTIVES
from rlcli.testing.backend.plain import PlainTraining, Stats
from rlcli.testing.backend.samples import batch
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.ranks import Frame, RankDeath, RankTimeout, run_on_ranks, skip_without_forks

Reports = dict[str, list[RankReport]]
"""By layout and rank."""

EXPERTS = "mixtral"
DEEP = "deep_llama"
"""Has a layer for every virtual stage."""
TRAINING = ("optimizer_step", "backward", "forward_backward_batch")
"""Methods of engines that train."""
OF_LOSS, OF_NORM, OF_UPDATE = 1 / 50, 1 / 5, 20
"""Limits as shares of the tolerance. For float32: 1e-6 for the loss of the first step, 1e-5 for
gradient norms, 1e-3 for the total change of the weights."""
ONE_UPDATE = "apply one update to all parts"


@dataclass(frozen=True)
class Lives:
    """The results of each layout's ranks, or why they failed."""

    folder: Path
    reports: Reports
    error: Exception | None = None

    def weights(self, layout: str, head: str, rank: int = 0) -> Weights:
        return load_file(self.folder / layout / weights_file(head, rank))


class RanksChecks(BackendChecks):
    """Everything ranks do in one run: forward passes, training, generation, saving, loading."""

    rank_seconds: ClassVar[float] = 200
    """Time limit for all work of a layout's ranks: at least ten times what they need on an
    otherwise idle machine."""
    layouts: ClassVar[Sequence[Layout]] = LAYOUTS

    @pytest.fixture(scope="class")
    @classmethod
    def lives(cls, tmp_path_factory: pytest.TempPathFactory) -> Lives:
        """Run once for all checks of ranks."""
        return cls().live(tmp_path_factory.mktemp("ranks"))

    def live(self, folder: Path) -> Lives:
        """First a single rank, then the ranks of each layout."""
        skip_without_forks()
        with self.at_device():
            self.scoring_engine()  # skips if there is none
        reports: Reports = {}
        before: Life | None = None
        try:
            alone = Life(self, {}, folder)
            reports[ALONE] = [alone.on_rank(0)]
            for degrees, settings in self.tried(self.layouts, self.family_of_ranks):
                first = Life(self, degrees, folder, settings, before)
                ranks = run_on_ranks(ranks_in(degrees), first.on_rank, self.rank_seconds)
                if OF_ONE in ranks[0]:
                    with self.at_device():
                        alone.resume(first, ON_ONE, ranks[0])
                reports[layout_name(degrees, settings)] = ranks
                before = first
        except Exception as error:
            return Lives(folder, {}, error)
        return Lives(folder, reports)

    @pytest.fixture
    def reports(self, lives: Lives) -> Reports:
        """The results; skips the check if the ranks failed."""
        skip_if(lives.error, "not tried: the ranks did not finish")
        return lives.reports

    def test_ranks_get_through(self, lives: Lives) -> None:
        """all ranks finish; none waits forever for another"""
        if isinstance(lives.error, RankTimeout):
            stood = (f"rank {rank} in {_where(at)}" for rank, at in lives.error.stacks.items())
            finding = f"ranks did not finish within {self.rank_seconds:g} s: {', '.join(stood)}"
        elif isinstance(lives.error, RankDeath):
            finding = f"rank {lives.error.rank} {lives.error.error}"
        elif lives.error is not None:
            raise lives.error
        else:
            return
        raise Violation(
            finding,
            "every rank takes part in every collective; idle micro-batches run through "
            "the model as others do",
            self._source("forward_micro_batch", "forward_backward_batch", "forward_batch"),
        )

    def test_ranks_that_divide_experts_pass_the_checks_of_ranks(self, tmp_path: Path) -> None:
        """ranks that divide experts (ep) pass the checks of ranks"""
        skip_if("ep" not in self.dimensions(), "does not support ep")
        self._require_checks_of_ranks(EXPERTS, WITH_EXPERTS, tmp_path)

    def test_ranks_with_virtual_stages_pass_the_checks_of_ranks(self, tmp_path: Path) -> None:
        """ranks that take turns at a pipeline pass the checks of ranks"""
        skip_unless(hasattr(self.backend(), "virtual_stages"), "has no setting virtual_stages")
        self._require_checks_of_ranks(DEEP, WITH_VIRTUAL_STAGES, tmp_path)

    def _require_checks_of_ranks(
        self, family: str, layouts: Sequence[Layout], folder: Path
    ) -> None:
        """All checks below, of ranks that run another model in other layouts."""
        self.require_all_layouts()
        cls = type("OtherRanks", (type(self),), {"family_of_ranks": family, "layouts": layouts})
        checks = cls()
        lives = checks.live(folder)
        checks.test_ranks_get_through(lives)
        available = {"lives": lives, "reports": lives.reports}
        for name, check in vars(RanksChecks).items():
            taken = inspect.signature(check).parameters if name.startswith("test_") else {}
            if "reports" not in taken:
                continue
            try:
                check(checks, **{key: available[key] for key in available if key in taken})
            except pytest.skip.Exception:
                continue  # what the backend does not do, others of its ranks do not either

    def test_ranks_share_a_forward_pass(self, reports: Reports) -> None:
        """ranks: log-probs and values of uneven and of empty shares"""
        cause = (
            "a rank computes its own share; one that has none takes part with idle micro-batches"
        )
        for quantity in ("log-probs", "values"):
            where = self._source("forward_micro_batch", "forward_batch")
            self._require_small(reports, quantity, quantity, cause, where)

    def test_ranks_train_like_a_plain_loop(self, lives: Lives, reports: Reports) -> None:
        """ranks, uneven shares: steps of a plain loop"""
        self._require_plain_steps_of_ranks("lm", lives, reports)

    def test_value_heads_train_on_ranks_like_a_plain_loop(
        self, lives: Lives, reports: Reports
    ) -> None:
        """ranks, uneven shares: steps of a value head"""
        self._require_plain_steps_of_ranks("value", lives, reports)

    def _require_plain_steps_of_ranks(self, head: str, lives: Lives, reports: Reports) -> None:
        self._require_training()
        for layout, (life, *_) in reports.items():
            plain = self.plain_training(self.family_of_ranks, head)
            first = {name: weight.clone() for name, weight in plain.weights().items()}
            for step, rate in enumerate(self.rates()):
                expected = plain.step(_shares(step, layout), OBJECTIVES[head].plain, rate)
                self._require_step_of_ranks(life["steps"][head][step], expected, step, layout)
            self._require_plain_weights(lives.weights(layout, head), plain, first, head, layout)

    def _require_step_of_ranks(
        self, actual: Stats, expected: Stats, step: int, layout: str
    ) -> None:
        occasions = f"at step {step} on {layout}", f"in a plain loop (scope {SCOPES[step]})"
        norm, plain_norm = actual["grad_norm"], expected["grad_norm"]
        cause, where = _cause_of_norm(norm / plain_norm), self._source(*TRAINING)
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
        certain, where = self.certain(self.family_of_ranks, head), self._source(*TRAINING)
        after = f"after {len(SHARES)} steps on {layout}"
        apart = weights_apart(weights, plain.weights(), certain)
        require_small("weights", apart, self.tolerance, after, ONE_UPDATE, where)
        missed = _missed(weights, first, plain.weights(), certain)
        limit = OF_UPDATE * self.tolerance
        require_small("changes of the weights", missed, limit, after, ONE_UPDATE, where)

    def test_ranks_report_alike(self, lives: Lives, reports: Reports) -> None:
        """ranks: stats and weights agree, stats with those of one rank too"""
        self._require_training()
        (alone,) = reports[ALONE]
        for head, (layout, ranks) in product(OBJECTIVES, reports.items()):
            first = lives.weights(layout, head)
            for rank, life in enumerate(ranks):
                who = _who(layout, rank)
                for step, expected in enumerate(alone["steps"][head]):
                    self._require_equal_stats(life["steps"][head][step], expected, step, who)
                apart = weights_apart(lives.weights(layout, head, rank), first)
                cause, where = "apply one update on all ranks", self._source("optimizer_step")
                occasion = f"from those of the first rank on {who}"
                require_small("weights", apart, 0.0, occasion, cause, where)

    def _require_equal_stats(self, actual: Stats, expected: Stats, step: int, who: str) -> None:
        for name in expected if SCOPES[step] == "global" else ("loss", "lr", "loss_weight"):
            if actual.get(name) != pytest.approx(expected[name], rel=1e-3, abs=1e-6):
                raise Violation(
                    f"{name} is {actual.get(name)} on {who} at step {step}, "
                    f"{expected[name]:.6g} on one rank",
                    "reduce it over the data-parallel ranks, with all_reduce",
                    self._source("all_reduce", "train_batch"),
                )

    def test_all_ranks_refuse_what_one_spoils(self, reports: Reports) -> None:
        """ranks: if a gradient is not finite on one, all refuse the step"""
        cause = "decide by the norm over all ranks, before anything is applied"
        self._require_skipped(reports, "spoiled", cause)

    def test_all_ranks_refuse_a_step(self, reports: Reports) -> None:
        """ranks: a step refused by step_if changes nothing"""
        cause = "step_if sees stats of all ranks; drop the gradients where it says no"
        self._require_skipped(reports, "refused", cause)

    def _require_skipped(self, reports: Reports, which: str, cause: str) -> None:
        self._require_training()
        for who, life in _by_rank(reports).items():
            skipped, apart = life[which]
            if skipped != 1.0 or apart > 0:
                raise Violation(
                    f"{who}: update_skipped {skipped:g}, weights changed by {apart:.2g}",
                    cause,
                    self._source("optimizer_step"),
                )

    def test_ranks_export_their_weights(self, reports: Reports) -> None:
        """ranks: an export holds the weights of all"""
        cause = "gather every parameter whole; one rank writes the folder"
        where = self._source("save_to_hf")
        self._require_small(reports, "exported", "weights of an export", cause, where, 0.0)

    def test_ranks_generate_with_the_weights_of_now(self, reports: Reports) -> None:
        """ranks: greedy answers are those of the trained weights"""
        skip_unless(self.generates(), "does not generate")
        for who, life in _by_rank(reports).items():
            for when, (actual, expected) in life["answers"].items():
                if actual != expected:
                    raise Violation(
                        f"greedy answers of {who} {when} are {actual}, not {expected}",
                        "all ranks use the current weights; renew whole copies when the "
                        "weights have changed",
                        self._source("generator", "generate"),
                    )

    def test_offloading_gives_memory_back(self, reports: Reports) -> None:
        """an offloaded rank holds its part of the state and no more"""
        for who, life in _by_rank(reports).items():
            skip_if("held" not in life, "does not offload, or cannot be checkpointed")
            if life["held"] > 1.4:
                raise Violation(
                    f"{who} holds {life['held']:.2f} times its part of the state after offload",
                    "drop whole copies, gradients and caches",
                    self._source("offload"),
                )

    def test_ranks_give_the_blocks_that_they_hold(self, reports: Reports) -> None:
        """ranks: weight_blocks names the numbers that are read"""
        cause = "offsets and sizes are those of this rank's part in the whole parameter"
        where = self._source("weight_blocks")
        skip_unless("blocks" in reports[ALONE][0], "gathers its parameters")
        self._require_small(reports, "blocks", "numbers of weight_blocks", cause, where, 0.0)

    def test_ranks_take_parameters(self, reports: Reports) -> None:
        """ranks: take_parameters mixes weights by eta"""
        cause = "mix whole parameters with whole ones, or parts with parts"
        where = self._source("take_parameters")
        skip_unless("taken" in reports[ALONE][0], "takes no parameters of other engines")
        self._require_small(reports, "taken", "weights at eta 0.25", cause, where)

    def test_a_checkpoint_of_two_ranks_continues(self, reports: Reports) -> None:
        """ranks: saved and loaded, training continues bit for bit"""
        cause = "state() must return everything that the next step depends on"
        self._require_continued(reports, OWN, cause, 0.0)

    def test_checkpoints_fit_any_number_of_ranks(self, reports: Reports) -> None:
        """a checkpoint of one layout continues in another"""
        cause = "return DTensors where ranks hold parts, so that they can be resharded"
        for which in (OF_ONE, ON_ONE, OF_OTHERS):
            self._require_continued(reports, which, cause)

    def _require_continued(
        self, reports: Reports, which: str, cause: str, limit: float | None = None
    ) -> None:
        is_continued = any(OWN in life for life in _by_rank(reports).values())
        skip_unless(self.trains() and is_continued, "does not train, or cannot be checkpointed")
        quantity = f"weights, a step after {which},"
        self._require_small(reports, which, quantity, cause, self._source("state"), limit)

    def _require_small(
        self,
        reports: Reports,
        name: str,
        quantity: str,
        cause: str,
        where: str,
        limit: float | None = None,
    ) -> None:
        """Check that no rank reported, under this name, an error above the limit, by default the
        tolerance."""
        tolerance = self.tolerance if limit is None else limit
        for who, life in _by_rank(reports).items():
            require_small(quantity, life.get(name, 0.0), tolerance, f"on {who}", cause, where)

    def _require_training(self) -> None:
        skip_unless(self.trains(), "does not train")

    def _source(self, *methods: str) -> str:
        """Where the first of these methods of an engine is."""
        return source_of(self._any_engine, *methods)

    @cached_property
    def _any_engine(self) -> Any:
        return self.engine()


def _shares(step: int, layout: str) -> list[SequenceSample]:
    """The batches averaged in a step: the whole batch, or each replica's part."""
    match = re.search(r"dp (\d+)", layout)
    replicas = int(match[1]) if match else 1
    if SCOPES[step] == "global" or replicas == 1:
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


def _who(layout: str, rank: int) -> str:
    return layout if layout == ALONE else f"rank {rank} of {layout}"


def _by_rank(reports: Reports) -> dict[str, RankReport]:
    return {
        _who(layout, rank): life
        for layout, ranks in reports.items()
        for rank, life in enumerate(ranks)
    }


def _where(frames: list[Frame]) -> str:
    """The innermost frame outside libraries."""
    for file, line, function in frames:
        if "site-packages" not in file:
            return f"{function} ({Path(file).name}:{line})"
    return "an unknown location"


def _cause_of_norm(ratio: float) -> str:
    if ratio == pytest.approx(0.5, rel=1e-3):
        return (
            "gradients are averaged over the ranks; sum them: the loss is divided by the "
            "weight of all ranks already"
        )
    if ratio == pytest.approx(2, rel=1e-3):
        return "gradients are summed over the ranks once too often"
    return "sum gradients over all ranks before the norm is taken; the norm is that of all parts"
