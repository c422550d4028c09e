"""Ranks in every layout that the backend declares: together they compute what one rank does,
however unevenly."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file

from rlcli.api.data import SequenceSample
from rlcli.testing.backend.base import (
    OBJECTIVES,
    BackendChecks,
    Layout,
    Weights,
    batch,
    source_of,
    weights_apart,
)
from rlcli.testing.backend.lifecycle import (
    ALONE,
    OF_ONE,
    OF_OTHERS,
    ON_ONE,
    OWN,
    SCOPES,
    SHARES,
    Life,
    RankReport,
    layout_name,
    ranks_in,
    share_of,
    weights_file,
)
from rlcli.testing.backend.plain import Stats
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.ranks import Frame, RankDeath, RankTimeout, run_on_ranks, skip_without_forks
from rlcli.testing.tiny_models import tiny_model

Reports = dict[str, list[RankReport]]
"""By layout and rank."""


@dataclass(frozen=True)
class Lives:
    """The results of each layout's ranks, or why they failed."""

    folder: Path
    reports: Reports
    error: Exception | None = None

    def weights(self, layout: str, head: str, rank: int = 0) -> Weights:
        return load_file(self.folder / layout / weights_file(head, rank))


ULYSSES, RING = {"context_parallel": "ulysses"}, {"context_parallel": "ring"}
LAYOUTS: tuple[Layout, ...] = (
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp": 2, "tp": 2}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"cp": 2, "tp": 2}, ULYSSES),
    ({"dp": 2, "cp": 2}, RING),
    ({"cp": 4}, ULYSSES),  # more ranks than key heads
)
"""Tried as far as the backend supports them: the first, or all."""
WITH_EXPERTS: tuple[Layout, ...] = (
    ({"dp": 2, "ep": 2}, {}),
    ({"dp": 4, "ep": 2}, {}),
    ({"cp": 2, "ep": 2}, ULYSSES),
    ({"dp": 2, "cp": 2, "ep": 2}, RING),
    ({"dp": 2, "pp": 2, "ep": 2}, {}),
    ({"dp": 2, "tp": 2, "ep": 2}, {}),
)
"""The same for a model with experts."""
EXPERTS = "mixtral"
WITH_VIRTUAL_STAGES: tuple[Layout, ...] = (
    ({"pp": 2}, {"virtual_stages": 2}),
    ({"dp": 2, "pp": 2}, {"virtual_stages": 2}),
)
"""The same for a model with a layer for every virtual stage."""
DEEP = "deep_llama"
TRAINING = ("optimizer_step", "backward", "forward_backward_batch")
"""Methods of engines that train."""
LOADED = (OWN, OF_ONE, ON_ONE, OF_OTHERS)

OF_LOSS, OF_NORM, OF_UPDATE = 1 / 50, 1 / 5, 20
"""Limits as shares of the tolerance. For float32: 1e-6 for the loss of the first step, 1e-5 for
gradient norms, 1e-3 for the total change of the weights."""


class RanksChecks(BackendChecks):
    """Everything ranks do in one run: forward passes, training, generation, saving, loading."""

    rank_seconds: ClassVar[float] = 200
    """Time limit for all work of a layout's ranks: at least ten times what they need on an
    otherwise idle machine."""

    @pytest.fixture(scope="class")
    @classmethod
    def lives(cls, tmp_path_factory: pytest.TempPathFactory) -> Lives:
        """Run once for all checks of ranks."""
        skip_without_forks()
        return cls().live(tmp_path_factory.mktemp("ranks"))

    layouts: ClassVar[Sequence[Layout]] = LAYOUTS
    layouts_with_experts: ClassVar[Sequence[Layout]] = WITH_EXPERTS

    def live(self, folder: Path) -> Lives:
        """First a single rank, then the ranks of each layout."""
        with self.at_device():
            self.scoring_engine()  # skips if there is none
        lives = Lives(folder, {})
        try:
            alone = Life(self, {}, folder)
            lives.reports[ALONE] = [alone.live()]
            before: Life | None = None
            for layout, settings in self.tried(self.layouts, self.family_of_ranks):
                size = ranks_in(layout)
                ranks = [Life(self, layout, folder, rank, before, settings) for rank in range(size)]

                def live(rank: int, ranks: list[Life] = ranks) -> Any:
                    return ranks[rank].live()

                reports = run_on_ranks(size, live, self.rank_seconds)
                if OF_ONE in reports[0]:
                    reports[0][ON_ONE] = alone.live_on(ranks[0])
                lives.reports[layout_name(layout, settings)] = reports
                before = ranks[0]
        except Exception as error:
            return Lives(folder, {}, error)
        return lives

    @pytest.fixture
    def reports(self, lives: Lives) -> Reports:
        """The results; skips the check if the ranks failed."""
        if lives.error is not None:
            pytest.skip("not tried: the ranks did not finish")
        return lives.reports

    def test_ranks_get_through(self, lives: Lives) -> None:
        """all ranks finish; none waits forever for another"""
        if lives.error is None:
            return
        if isinstance(lives.error, RankTimeout):
            stood = [
                f"rank {rank} in {_own_place(frames)}"
                for rank, frames in lives.error.stacks.items()
            ]
            finding = f"ranks did not finish within {self.rank_seconds:g} s: {', '.join(stood)}"
        elif isinstance(lives.error, RankDeath):
            finding = f"rank {lives.error.rank} {lives.error.error}"
        else:
            raise lives.error
        raise self._violation(
            finding,
            "every rank takes part in every collective; idle micro-batches run through "
            "the model as others do",
            "forward_micro_batch",
            "forward_backward_batch",
            "forward_batch",
        )

    def _violation(self, finding: str, cause: str, *methods: str) -> Violation:
        """With the location of the first of these methods of an engine, which is made for that."""
        return Violation(finding, cause, source_of(self.engine(), *methods))

    def _require_training(self) -> None:
        skip_unless(self.trains(), "does not train")

    @pytest.fixture(scope="class")
    @classmethod
    def lives_with_experts(cls, tmp_path_factory: pytest.TempPathFactory) -> OtherLives:
        checks = cls()
        skip_if("ep" not in checks.dimensions(), "does not support ep")
        checks.require_all_layouts()
        folder = tmp_path_factory.mktemp("experts")
        return cls._other_lives(EXPERTS, cls.layouts_with_experts, folder)

    @pytest.fixture(scope="class")
    @classmethod
    def lives_with_virtual_stages(cls, tmp_path_factory: pytest.TempPathFactory) -> OtherLives:
        checks = cls()
        skip_unless(hasattr(checks.backend(), "virtual_stages"), "has no setting virtual_stages")
        checks.require_all_layouts()
        folder = tmp_path_factory.mktemp("virtual-stages")
        return cls._other_lives(DEEP, WITH_VIRTUAL_STAGES, folder)

    @classmethod
    def _other_lives(
        cls,
        family: str,
        layouts: Sequence[Layout],
        folder: Path,
    ) -> OtherLives:
        skip_without_forks()
        checks = type("OtherRanks", (cls,), {"family_of_ranks": family, "layouts": layouts})()
        return checks, checks.live(folder)

    def test_ranks_that_divide_experts_pass_the_checks_of_ranks(
        self, lives_with_experts: OtherLives
    ) -> None:
        """ranks that divide experts (ep) pass the checks of ranks"""
        _require_checks_of_ranks(*lives_with_experts)

    def test_ranks_with_virtual_stages_pass_the_checks_of_ranks(
        self, lives_with_virtual_stages: OtherLives
    ) -> None:
        """ranks that take turns at a pipeline pass the checks of ranks"""
        _require_checks_of_ranks(*lives_with_virtual_stages)

    def test_ranks_share_a_forward_pass(self, reports: Reports) -> None:
        """ranks: log-probs and values of uneven and of empty shares"""
        cause = (
            "a rank computes its own share; one that has none takes part with idle micro-batches"
        )
        for head, quantity in {"lm": "log-probs", "value": "values"}.items():
            errors = {who: life["forward"][head] for who, life in _by_rank(reports).items()}
            self._require_small(errors, quantity, cause, "forward_micro_batch", "forward_batch")

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
        certain = self.certain(tiny_model(self.family_of_ranks, head=head), OBJECTIVES[head].plain)
        for layout, (life, *_) in reports.items():
            plain = self.plain_training(self.family_of_ranks, head)
            first = {name: weight.clone() for name, weight in plain.weights().items()}
            for step, rate in enumerate(self.rates()):
                expected = plain.step(_shares(step, layout), OBJECTIVES[head].plain, rate)
                self._require_plain_step(life["steps"][head][step], expected, step, layout)
            weights, one_update = lives.weights(layout, head), "apply one update to all parts"
            apart = weights_apart(weights, plain.weights(), certain)
            if apart > self.tolerance:
                finding = f"weights are off by {apart:.2g} after {len(SHARES)} steps on {layout}"
                raise self._violation(finding, one_update, *TRAINING)
            missed = _missed(weights, first, plain.weights(), certain)
            if missed > OF_UPDATE * self.tolerance:
                finding = (
                    f"the change of the weights by {len(SHARES)} steps on {layout} is off by "
                    f"{missed:.2g} of itself"
                )
                raise self._violation(finding, one_update, *TRAINING)

    def _require_plain_step(
        self, actual: Mapping[str, float], expected: Mapping[str, float], step: int, layout: str
    ) -> None:
        norm, plain_norm = actual["grad_norm"], expected["grad_norm"]
        if norm != pytest.approx(plain_norm, rel=OF_NORM * self.tolerance):
            finding = f"gradient norm {norm:.6g} at step {step} on {layout}, {plain_norm:.6g}"
            finding += f" in a plain loop (scope {SCOPES[step]})"
            raise self._violation(finding, _cause_of_norm(norm / plain_norm), *TRAINING)
        loss, plain_loss = actual["loss"], expected["loss"]
        if step == 0 and loss != pytest.approx(plain_loss, rel=OF_LOSS * self.tolerance):
            finding = f"the first loss is {loss:.8g} on {layout}, {plain_loss:.8g} in a plain loop"
            raise self._violation(
                finding,
                "compute the same log-probs; sum losses, divide by the weight of all",
                *TRAINING,
            )

    def test_ranks_report_alike(self, lives: Lives, reports: Reports) -> None:
        """ranks: stats and weights agree, stats with those of one rank too"""
        self._require_training()
        (alone,) = reports[ALONE]
        for head, (layout, ranks) in product(OBJECTIVES, reports.items()):
            first = lives.weights(layout, head)
            for rank, life in enumerate(ranks):
                steps = life["steps"][head], alone["steps"][head]
                self._require_equal_stats(*steps, _who(layout, rank))
                apart = weights_apart(lives.weights(layout, head, rank), first)
                if apart:
                    raise self._violation(
                        f"the weights of the ranks of {layout} differ by {apart:.2g}",
                        "apply one update on all ranks",
                        "optimizer_step",
                    )

    def _require_equal_stats(self, steps: list[Stats], alone: list[Stats], who: str) -> None:
        for step, expected in enumerate(alone):
            for name in expected if SCOPES[step] == "global" else ("loss", "lr", "loss_weight"):
                actual = steps[step].get(name)
                if actual != pytest.approx(expected[name], rel=1e-3, abs=1e-6):
                    raise self._violation(
                        f"{name} is {actual} on {who} at step {step}, "
                        f"{expected[name]:.6g} on one rank",
                        "reduce it over the data-parallel ranks, with all_reduce",
                        "all_reduce",
                        "train_batch",
                    )

    def test_all_ranks_refuse_what_one_spoils(self, reports: Reports) -> None:
        """ranks: if a gradient is not finite on one, all refuse the step"""
        self._require_skipped(
            reports, "spoiled", "decide by the norm over all ranks, before anything is applied"
        )

    def test_all_ranks_refuse_a_step(self, reports: Reports) -> None:
        """ranks: a step refused by step_if changes nothing"""
        self._require_skipped(
            reports,
            "refused",
            "step_if sees stats of all ranks; drop the gradients where it says no",
        )

    def _require_skipped(self, reports: Reports, which: str, cause: str) -> None:
        self._require_training()
        for who, life in _by_rank(reports).items():
            skipped, apart = life[which]
            if skipped != 1.0 or apart > 0:
                raise self._violation(
                    f"{who}: update_skipped {skipped:g}, weights changed by {apart:.2g}",
                    cause,
                    "optimizer_step",
                )

    def test_ranks_export_their_weights(self, reports: Reports) -> None:
        """ranks: an export holds the weights of all"""
        cause = "gather every parameter whole; one rank writes the folder"
        errors = _differences(reports, "exported")
        self._require_small(errors, "weights of an export", cause, "save_to_hf", limit=0.0)

    def test_ranks_generate_with_the_weights_of_now(self, reports: Reports) -> None:
        """ranks: greedy answers are those of the trained weights"""
        skip_unless(self.generates(), "does not generate")
        for who, life in _by_rank(reports).items():
            loaded = {
                f"after loading {which}": life[which]["answers"]
                for which in LOADED
                if which in life
            }
            for when, (actual, expected) in (life["answers"] | loaded).items():
                if actual != expected:
                    finding = (
                        f"greedy answers of {who} {when} are {actual}; transformers' are {expected}"
                    )
                    raise self._violation(
                        finding,
                        "all ranks use the current weights; renew whole copies when the "
                        "weights have changed",
                        "generator",
                        "generate",
                    )

    def test_offloading_gives_memory_back(self, reports: Reports) -> None:
        """an offloaded rank holds its part of the state and no more"""
        for who, life in _by_rank(reports).items():
            skip_if("held" not in life, "does not offload, or cannot be checkpointed")
            if life["held"] > 1.4:
                raise self._violation(
                    f"{who} holds {life['held']:.2f} times its part of the state after offload",
                    "drop whole copies, gradients and caches",
                    "offload",
                )

    def test_ranks_give_the_blocks_that_they_hold(self, reports: Reports) -> None:
        """ranks: weight_blocks names the numbers that are read"""
        errors = _differences(reports, "blocks")
        skip_unless(errors, "gathers its parameters")
        cause = "offsets and sizes are those of this rank's part in the whole parameter"
        self._require_small(errors, "numbers of weight_blocks", cause, "weight_blocks", limit=0.0)

    def test_ranks_take_parameters(self, reports: Reports) -> None:
        """ranks: take_parameters mixes weights by eta"""
        errors = _differences(reports, "taken")
        skip_unless(errors, "takes no parameters of other engines")
        cause = "mix whole parameters with whole ones, or parts with parts"
        self._require_small(errors, "weights at eta 0.25", cause, "take_parameters")

    def test_a_checkpoint_of_two_ranks_continues(self, reports: Reports) -> None:
        """ranks: saved and loaded, training continues bit for bit"""
        cause = "state() must return everything that the next step depends on"
        errors = _differences(reports, OWN)
        self._require_small(errors, f"weights, a step after {OWN},", cause, "state", limit=0.0)

    def test_checkpoints_fit_any_number_of_ranks(self, reports: Reports) -> None:
        """a checkpoint of one layout continues in another"""
        cause = "return DTensors where ranks hold parts, so that they can be resharded"
        for which in (OF_ONE, ON_ONE, OF_OTHERS):
            errors = _differences(reports, which)
            if errors or which != OF_OTHERS:  # which are none of the first layout
                self._require_small(errors, f"weights, a step after {which}", cause, "state")

    def _require_small(
        self,
        differences: Mapping[str, float],
        quantity: str,
        cause: str,
        *methods: str,
        limit: float | None = None,
    ) -> None:
        """Check that no rank reported a difference above the limit."""
        if not differences:
            pytest.skip("does not train" if not self.trains() else "cannot be checkpointed")
        for who, apart in differences.items():
            if apart > (self.tolerance if limit is None else limit):
                raise self._violation(
                    f"{quantity} are off by {apart:.2g} on {who}", cause, *methods
                )


OtherLives = tuple[RanksChecks, Lives]
"""Checks for other models and layouts, and the ranks that they are of."""


def _require_checks_of_ranks(checks: RanksChecks, lives: Lives) -> None:
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


def _differences(reports: Reports, which: str) -> Stats:
    """Those that the ranks have found, as far as they have looked."""
    lives = _by_rank(reports)
    return {who: _apart(life[which]) for who, life in lives.items() if which in life}


def _own_place(frames: list[Frame]) -> str:
    """The innermost frame outside libraries."""
    locations = (
        f"{function} ({Path(file).name}:{line})"
        for file, line, function in frames
        if "site-packages" not in file
    )
    return next(locations, "an unknown location")


def _apart(report: RankReport | float) -> float:
    return float(report["apart"] if isinstance(report, dict) else report)


def _cause_of_norm(ratio: float) -> str:
    if ratio == pytest.approx(0.5, rel=1e-3):
        return (
            "gradients are averaged over the ranks; sum them: the loss is divided by the "
            "weight of all ranks already"
        )
    if ratio == pytest.approx(2, rel=1e-3):
        return "gradients are summed over the ranks once too often"
    return "sum gradients over all ranks before the norm is taken; the norm is that of all parts"
