"""Invariants of steps that do not move a model: a policy is at distance 0 from itself, and what is
not trained on does not matter."""

from __future__ import annotations

import re

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import PROMPT_MASK, SEQUENCES
from rlcli.api.metrics import declared_metrics
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.interface.actions import padded, trained_actions
from rlcli.testing.interface.inference_trial import own_logprobs, with_temperature
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Make,
    Rehearsal,
    difference,
    place_of_number,
)
from rlcli.testing.tiny_engine import TinyEngine, TinyLM

LOGPROBS = ("packed_logprobs", "old_logprobs", "packed_ref_logprobs", "proximal_logprobs")
TEMPERATURES = (0.5, 1.0, 2.0)
DISTANCE = re.compile(r"\bKL\b|\bdistance\b")
"""What the meaning of a metric says if it is 0 between equal policies."""
SMALL = 1e-5


class MemorylessLM(TinyLM):
    """Predicts a token from the one before it alone."""

    def forward(self, tokens: torch.Tensor, lengths: object) -> torch.Tensor:
        return torch.tanh(self.embedding[tokens])


class EqualWeightChecks(InterfaceSubject):
    def test_a_policy_is_at_no_distance_from_itself(self, make: Make, rehearsal: Rehearsal) -> None:
        """a policy whose own log-probs are in the batch is at no distance from itself, at any
        temperature"""
        expected = _expected(make())
        if not expected or not set(LOGPROBS) & set(rehearsal.batch.keys):
            pytest.skip("measures no distance from policies whose log-probs are in the batch")
        for temperature in TEMPERATURES:
            interface = with_temperature(make, make(), temperature)
            if interface is None and temperature != 1:
                continue
            model = rehearsal.model(lr=0.0)
            batch = _with_own_logprobs(rehearsal.batch, model.module, temperature)
            outcome = rehearsal.train(batch, model=model, interface=interface or make())
            for name, value in outcome.stats.items():
                if abs(value - expected.get(name, value)) > SMALL:
                    raise Violation(
                        f"{name} is {value:.3g} and not {expected[name]:g} at temperature "
                        f"{temperature:g}, though all log-probs are the policy's own",
                        "divide logits by the temperature that sampled; compare like with like",
                        place_of_number(rehearsal, name, outcome),
                    )

    def test_longer_prompts_change_nothing(self, rehearsal: Rehearsal) -> None:
        """with a model without memory, longer prompts change nothing"""
        if PROMPT_MASK not in rehearsal.batch.keys or trained_actions(rehearsal.batch) is None:
            pytest.skip("does not tell prompts from responses")
        short, longer = (
            rehearsal.train(batch, model=rehearsal.model(module=MemorylessLM()))
            for batch in (rehearsal.batch, padded(rehearsal.batch, in_front=True))
        )
        mismatch = difference(short, longer)
        if mismatch is not None:
            raise Violation(
                mismatch.describe("with short prompts", "with longer ones"),
                "prompts are not trained on: count and average over response tokens only",
                place_of(rehearsal.train_step),
            )


def _expected(interface: ModelInterface) -> dict[str, float]:
    """Metric → its value for a policy that is compared with itself."""
    expected = {}
    for name, (unit, meaning) in declared_metrics(type(interface)).items():
        if unit == "ratio" and "policy" in meaning:
            expected[name] = 1.0
        elif unit == "nats per token" and DISTANCE.search(meaning):
            expected[name] = 0.0
    return expected


def _with_own_logprobs(
    batch: SequenceSample, engine: TinyEngine, temperature: float
) -> SequenceSample:
    """The batch, all of whose log-probs are those of the model at this temperature."""
    sequences = batch.data[SEQUENCES].split(batch.flat_seqlens(SEQUENCES))
    logprobs = torch.cat([own_logprobs(engine, tokens, temperature) for tokens in sequences])
    copy = batch.select(batch.keys)
    copy.data |= dict.fromkeys(set(LOGPROBS) & set(batch.keys), logprobs.float())
    return copy
