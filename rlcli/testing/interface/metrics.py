"""Checks that every number that an interface reports has a unit and a meaning."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import LOGPROBS, MEANINGS
from rlcli.api.metrics import ENGINE_METRICS, declared_metrics, metric_for
from rlcli.testing.contract import Note, Violation, place_of, skip_unless
from rlcli.testing.declaration import DeclaredSubject
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial
from rlcli.testing.interface.training_trial import Make, Rehearsal, place_of_call

OF_ENGINES = tuple(name.removeprefix("<role>/") for name in ENGINE_METRICS)
ROUNDING = 1e-6
AT_LEAST_0 = re.compile(r"\bat\s+least\s+0\b")


class MetricChecks(DeclaredSubject, CallSubject):
    def test_metrics_have_a_unit_and_a_meaning(self, make: Make) -> None:
        """METRICS gives a unit and a meaning for each name"""
        interface = make()
        for name, entry in declared_metrics(type(interface)).items():
            if not isinstance(entry, tuple) or [*map(_is_text, entry)] != [True, True]:
                raise Violation(
                    f"METRICS gives {name} {entry!r:.80}",
                    f'for example "{name}": ("share", "share of responses that …")',
                    place_of(type(interface)),
                )

    def test_stats_of_training_are_in_its_metrics(
        self, rehearsal: Rehearsal, record_property: Note
    ) -> None:
        """METRICS names what training reports"""
        self._tell_unnamed(rehearsal.result.stats, rehearsal.make(), "train_step", record_property)

    def test_numbers_are_what_their_units_say(self, rehearsal: Rehearsal) -> None:
        """a share is at most 1, and the perplexity of a step is the exponential of its loss"""
        stats = rehearsal.result.stats
        loss = stats.get("loss", 0.0)
        for name, unit, _ in rehearsal.declared(stats):
            value = stats[name]
            is_perplexity = unit == "perplexity" and rehearsal.result.engine.steps == 1
            exponential = math.exp(min(loss, 700.0)) if is_perplexity else value
            is_too_large = unit == "share" and value > 1 + ROUNDING
            if is_too_large or not math.isclose(value, exponential, rel_tol=ROUNDING):
                raise Violation(
                    f"{name} is {value:.6g}, with a loss of {loss:.6g}",
                    "a share is at most 1; a perplexity e to the power of the loss per token",
                    rehearsal.where,
                )

    def test_numbers_at_least_0_are_not_below(self, rehearsal: Rehearsal) -> None:
        """what METRICS calls at least 0 is not below, even where another model was certain"""
        declared = rehearsal.declared(rehearsal.result.stats)
        bounded = [name for name, _, meaning in declared if AT_LEAST_0.search(meaning)]
        skip_unless(bounded, "METRICS calls nothing at least 0")
        for batch in (rehearsal.batch, _with_certain_others(rehearsal.batch)):
            stats = rehearsal.train(batch).stats
            for name in bounded:
                if stats[name] < -ROUNDING:
                    raise Violation(
                        f"{name} is {stats[name]:.6g}",
                        "bound it, or correct METRICS, which calls it at least 0",
                        rehearsal.where,
                    )

    def test_counts_of_inference_are_in_its_metrics(
        self, inferring: CallTrial, record_property: Note
    ) -> None:
        """METRICS names what inference counts"""
        counted = [
            name
            for name, values in inferring.result.metadata.items()
            if name not in inferring.batch.metadata and _are_numbers(values)
        ]
        self._tell_unnamed(counted, inferring.interface, "inference", record_property)

    def _tell_unnamed(
        self, reported: Iterable[str], interface: ModelInterface, call: str, record_property: Note
    ) -> None:
        named = (*declared_metrics(type(interface)), *OF_ENGINES)
        unnamed = [
            Violation(
                f"{call} reports {name}, which METRICS does not name",
                f'METRICS: ClassVar[Metrics] = {{"{name}": ("its unit", "its meaning")}}',
                place_of_call(interface, call),
            )
            for name in reported
            if metric_for(name, named) is None
        ]
        self.tell_unsaid(unnamed, record_property)


def _with_certain_others(batch: SequenceSample) -> SequenceSample:
    """A copy in which every log-prob of another model, or of an earlier one, is 0."""
    copy = batch.select(batch.keys)
    for key in batch.keys & MEANINGS.keys():
        if MEANINGS[key].numbers is LOGPROBS:
            copy.data[key] = torch.zeros_like(copy.data[key])
    return copy


def _is_text(text: Any) -> bool:
    return isinstance(text, str) and bool(text.strip())


def _are_numbers(values: Any) -> bool:
    """Numbers of samples, or sums with their counts."""
    return bool(values) and all(type(value) in (int, float, tuple) for value in values)
