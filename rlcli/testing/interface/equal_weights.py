"""Laws of a policy next to others, or to itself, with which it agrees about all tokens."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import REFERENCE, SAMPLED_LOGPROBS, SEQUENCES
from rlcli.api.metrics import declared_metrics
from rlcli.testing.batches import VOCABULARY
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import with_tensor
from rlcli.testing.interface.inference_trial import with_temperature
from rlcli.testing.interface.logprobs import all_logprobs
from rlcli.testing.interface.policies import (
    LOGPROBS,
    gap_of_weights,
    in_one_step,
    with_own_logprobs,
)
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Rehearsal,
    TrainingOutcome,
    as_of_teacher,
    is_close,
    place_of_number,
    teacher,
)
from rlcli.testing.tiny_engine import TinyEngine

TEMPERATURES = (0.5, 1.0, 2.0)
DISTANCE = re.compile(r"\bKL\b|\bdistance\b")
"""What the meaning of a metric says if it is 0 between equal policies."""
OF_REFERENCE = re.compile(r"\bKL\b.*\bfrom\b.*\b(reference|teacher)\b")
"""What it says if it is the KL of the policy from another model."""
IS_WEIGHTED = re.compile(
    r"\bweight\s+of\s+a\s+token\b.*\blikelier\s+since\s+it\s+was\s+sampled\b", re.I | re.S
)
"""What the documentation of an argument says if tokens are weighted by a ratio of probabilities."""
DIVIDES_LOGITS = re.compile(r"\blogits\b.*\bdivided\b|\bdivides?\b.*\blogits\b", re.I | re.S)
"""What the documentation of a temperature says that is not one of rewards or weights."""
OFTEN_SAMPLED = (2, 5)
"""Tokens that a sampler draws twice where it draws others once."""
NATS = "nats per token"
SMALL = 1e-5


class EqualWeightChecks(InterfaceSubject):
    def test_a_policy_is_at_no_distance_from_itself(self, rehearsal: Rehearsal) -> None:
        """a policy whose own log-probs are in the batch is at no distance from itself, at any
        temperature"""
        make = rehearsal.make
        expected = _expected(make())
        skip_if(
            not expected or not set(LOGPROBS) & rehearsal.batch.keys,
            "measures no distance from policies whose log-probs are in the batch",
        )
        for temperature in TEMPERATURES:
            interface = with_temperature(make, make(), temperature)
            if interface is None and temperature != 1:
                continue
            model = rehearsal.model(lr=0.0)
            batch = with_own_logprobs(rehearsal.batch, model.module, temperature)
            outcome = rehearsal.train(batch, model=model, interface=interface or make())
            for name, value in outcome.stats.items():
                if abs(value - expected.get(name, value)) > SMALL:
                    raise Violation(
                        f"{name} is {value:.3g} and not {expected[name]:g} at temperature "
                        f"{temperature:g}, though all log-probs are the policy's own",
                        "divide logits by the temperature that sampled; compare like with like",
                        place_of_number(rehearsal, name, outcome),
                    )

    def test_a_temperature_divides_logits(self, rehearsal: Rehearsal) -> None:
        """at another temperature, training is that of a model whose logits are divided by it"""
        make, batch = rehearsal.make, rehearsal.batch
        at_one = with_temperature(make, make(), 1.0)
        skip_if(at_one is None, "has no temperature")
        if hasattr(at_one, "temperature"):
            self.require_documented_as(DIVIDES_LOGITS, "has no temperature that divides logits")
        for temperature in TEMPERATURES:
            interface = with_temperature(make, make(), temperature)
            tempered = rehearsal.train(batch, lr=0.0, interface=interface)
            divided = rehearsal.model(lr=0.0)
            divided.module.model.head.data /= temperature
            expected = rehearsal.train(batch, model=divided, interface=at_one)
            for name, value in tempered.stats.items():
                if name != "grad_norm" and not is_close(value, expected.stats[name], SMALL):
                    raise Violation(
                        f"{name} is {value:.4g} at temperature {temperature:g}, and "
                        f"{expected.stats[name]:.4g} where logits are divided by it before",
                        "set output.temperature before output.logprobs",
                        place_of_number(rehearsal, name, tempered),
                    )

    def test_a_distance_from_a_reference_is_the_kl(self, rehearsal: Rehearsal) -> None:
        """a KL that is reported from a reference or teacher is, in the mean over all tokens, that
        of a policy to which they are equally likely"""
        names = _distances_from_references(rehearsal.make())
        skip_unless(names, "reports no KL from a reference")
        policy = rehearsal.model(lr=0.0)
        policy.module.model.head.data.zero_()
        batch = _each_token(rehearsal, policy.module)
        outcome = rehearsal.train(batch, model=policy)
        expected = -math.log(VOCABULARY) - float(all_logprobs(teacher().module, batch)[1::2].mean())
        skip_if(
            len({call.batch.bs for call in outcome.engine.calls}) > 1,
            "not tried: its minibatches differ in size",
        )
        for name in sorted(names & outcome.stats.keys()):
            if abs(outcome.stats[name] - expected) > SMALL:
                raise Violation(
                    f"{name} is {outcome.stats[name]:.4g} where the KL is {expected:.4g}",
                    "the sign of the difference of log-probs, or another direction of the KL",
                    place_of_number(rehearsal, name, outcome),
                )

    def test_another_sampler_changes_nothing_on_average(self, rehearsal: Rehearsal) -> None:
        """where tokens are weighted by how much likelier they have become since they were sampled,
        a step does not depend on how often each was sampled"""
        reason = "weights no tokens by how much likelier they have become"
        skip_if(SAMPLED_LOGPROBS not in rehearsal.batch.keys, reason)
        self.require_documented_as(IS_WEIGHTED, reason)
        outcomes = [_after_sampling(rehearsal, again) for again in ((), OFTEN_SAMPLED)]
        on_policy, weighted = (outcome.weights for outcome in outcomes)
        if (size := gap_of_weights(on_policy, weighted)) > SMALL:
            raise Violation(
                f"weights differ by {size:.3g} after a step on tokens that were sampled with other "
                "probabilities",
                "weight a token with its probability now over that when it was sampled",
                rehearsal.where,
            )


def _after_sampling(rehearsal: Rehearsal, again: Sequence[int]) -> TrainingOutcome:
    """A step of a policy to which all tokens are equally likely, on each of them, some of which
    were sampled again as they were likelier then; skips the check where an optimizer step takes
    them in other proportions."""
    policy = rehearsal.model()
    policy.module.model.head.data.zero_()
    batch = _each_token(rehearsal, policy.module, again)
    counts = _counts_of_last_tokens(batch)
    drawn = batch.data[SEQUENCES].view(-1, 3)[:, 2]
    logprobs = (counts / counts.sum()).log()[drawn].repeat_interleave(2)
    sampled = with_tensor(batch, SAMPLED_LOGPROBS, logprobs)
    outcome = rehearsal.train(sampled, model=policy, changes=in_one_step(rehearsal))
    for call in outcome.engine.calls:
        taken = _counts_of_last_tokens(call.batch)
        skip_unless(
            torch.equal(taken * counts.sum(), counts * taken.sum()),
            "not tried: its minibatches differ",
        )
    return outcome


def _counts_of_last_tokens(batch: SequenceSample) -> torch.Tensor:
    """[V] how many sequences, all of three tokens, end with each token of the vocabulary."""
    return torch.bincount(batch.data[SEQUENCES].view(-1, 3)[:, 2], minlength=VOCABULARY)


def _distances_from_references(interface: ModelInterface) -> set[str]:
    """The metrics that are a KL from a reference or a teacher."""
    metrics = declared_metrics(type(interface)).items()
    return {name for name, (unit, text) in metrics if unit == NATS and OF_REFERENCE.search(text)}


def _expected(interface: ModelInterface) -> dict[str, float]:
    """Metric → its value for a policy that is compared with itself."""
    expected = {}
    for name, (unit, meaning) in declared_metrics(type(interface)).items():
        if unit == "ratio" and "policy" in meaning:
            expected[name] = 1.0
        elif unit == NATS and DISTANCE.search(meaning):
            expected[name] = 0.0
    return expected


def _each_token(
    rehearsal: Rehearsal, policy: TinyEngine, again: Sequence[int] = ()
) -> SequenceSample:
    """Responses of one token to the same prompt of two: each token of the vocabulary, and some of
    them again, equally often in each of up to four minibatches. Log-probs are those of the policy,
    of the reference those of the teacher."""
    each = torch.tensor([*range(VOCABULARY), *again])
    batch = rehearsal.batches([[(2, 1)]] * (4 * len(each)))
    tokens = batch.data[SEQUENCES].view(batch.bs, -1, 3)
    tokens[:, :, :2] = tokens[0, 0, :2]
    tokens[:, :, 2] = each.repeat(4)[:, None]
    batch = with_own_logprobs(batch, policy)
    if REFERENCE in batch.keys:
        batch.data[REFERENCE] = all_logprobs(teacher().module, batch).float()
    return as_of_teacher(rehearsal.make(), batch)
