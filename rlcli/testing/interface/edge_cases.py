"""Checks of edge-case batches: nothing may fail, and nothing may become NaN."""

from __future__ import annotations

import contextlib
import math

import pytest

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.testing.batches import Lengths
from rlcli.testing.contract import Violation
from rlcli.testing.interface.actions import LOSS_MASK, trained_actions, without_trained_actions
from rlcli.testing.interface.loss import counts_tokens
from rlcli.testing.interface.policies import gap_of_weights
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Rehearsal,
    TrainingOutcome,
    place_of_number,
)

EDGES: dict[str, Lengths] = {
    "a batch of one sample": [[(2, 4)]],
    "a response of one token": [[(2, 1)]],
    "a batch of one token": [[(1, 0)]],
    "sequences of one token among others": [[(1, 0)], [(2, 3)], [(1, 0)]],
    "responses without a token": [[(3, 0)], [(2, 0)]],
    "responses without a token among others": [[(3, 0)], [(2, 3)], [(2, 0)]],
    "lengths from 2 to 121": [
        [(1, 1)],
        [(40, 1)],
        [(1, 120)],
        [(2, 0)],
        [(7, 30), (7, 1)],
        [(1, 1)],
    ],
}
ROOM = 64
"""Tokens for which a micro-batch has room at least: of these batches, the last one is cut."""


class EdgeChecks(InterfaceSubject):
    def test_edges_of_lengths(self, rehearsal: Rehearsal) -> None:
        """one sample, one token, responses without a token, very ragged lengths"""
        for edge, lengths in EDGES.items():
            with contextlib.suppress(pytest.skip.Exception):
                _survive_edge(rehearsal, edge, lengths)

    def test_all_masked(self, rehearsal: Rehearsal) -> None:
        """a batch with nothing to train on leaves the model unchanged, and does not count"""
        batch = without_trained_actions(_batch(rehearsal, [[(2, 3)], [(3, 2)]]))
        if batch is None:
            pytest.skip("reads no prompt_mask")
        outcome = _survive(rehearsal, batch, "a batch of prompts only")
        demand_nothing_learned(rehearsal, outcome, "a batch of prompts only")
        weight = outcome.stats.get("loss_weight", 0.0)
        leaves_out = LOSS_MASK in batch.keys and not rehearsal.make().counts_left_out("train_step")
        if weight and (leaves_out or counts_tokens(rehearsal)):
            raise Violation(
                f"a batch of prompts only has the loss weight {weight:g}",
                "count only what is trained on, or declare COUNTS_LEFT_OUT",
                place_of_number(rehearsal, "loss_weight", outcome),
            )


_ROUNDING = 1e-9
"""Relative to a weight's size: the residue of gradients that cancel each other."""


def _batch(rehearsal: Rehearsal, lengths: Lengths) -> SequenceSample:
    try:
        batch = rehearsal.batches(lengths)
    except ValueError as error:
        pytest.skip(f"not tried: no batch of these lengths: {error}")
    return rehearsal.fit(batch)


def _survive(
    rehearsal: Rehearsal, batch: SequenceSample, case: str, spec: MicroBatchSpec | None = None
) -> TrainingOutcome:
    outcome = rehearsal.train(batch, spec=spec or MicroBatchSpec())
    numbers = {
        **outcome.stats,
        **{name: float(tensor.sum()) for name, tensor in outcome.weights.items()},
    }
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise Violation(
                f"{case}: {name} becomes {value}",
                "a division by a count or a spread that is 0: clamp it, or add a small number",
                place_of_number(rehearsal, name, outcome),
            )
    return outcome


def _survive_edge(rehearsal: Rehearsal, edge: str, lengths: Lengths) -> None:
    batch = _batch(rehearsal, lengths)
    longest = max(map(sum, batch.seqlens["packed_input_ids"]))
    spec = MicroBatchSpec(max_tokens_per_mb=max(longest, ROOM))
    outcome = _survive(rehearsal, batch, edge, spec)
    trained = trained_actions(batch)
    if trained is not None and not trained.any():
        demand_nothing_learned(rehearsal, outcome, edge)


def demand_nothing_learned(rehearsal: Rehearsal, outcome: TrainingOutcome, case: str) -> None:
    moved = gap_of_weights(outcome.weights, dict(rehearsal.model().module.model.named_parameters()))
    if moved > _ROUNDING * max(float(tensor.abs().max()) for tensor in outcome.weights.values()):
        raise Violation(
            f"{case}: the weights still move, by up to {moved:.3g}",
            "count and train only the tokens that the mask keeps",
            rehearsal.where,
        )
