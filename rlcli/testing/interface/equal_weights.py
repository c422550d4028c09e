"""Invariants of steps that do not move a model: a policy is at distance 0 from itself, and what is
not trained on does not matter."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import ADVANTAGES, CHOSEN, PROMPT_MASK, REFERENCE, SEQUENCES
from rlcli.api.metrics import declared_metrics
from rlcli.testing.batches import VOCABULARY, Lengths
from rlcli.testing.contract import Violation
from rlcli.testing.interface.actions import (
    LOSS_MASK,
    padded,
    per_action,
    trained_actions,
    with_tensor,
)
from rlcli.testing.interface.inference_trial import all_logprobs, with_temperature
from rlcli.testing.interface.invariants import SIGNALS, ignorant
from rlcli.testing.interface.loss import gradients_of
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Rehearsal,
    TrainingOutcome,
    as_of_teacher,
    place_of_number,
    teacher,
)
from rlcli.testing.tiny_engine import TinyEngine, TinyLM

LOGPROBS = ("packed_logprobs", "old_logprobs", "packed_ref_logprobs", "proximal_logprobs")
TEMPERATURES = (0.5, 1.0, 2.0)
DISTANCE = re.compile(r"\bKL\b|\bdistance\b")
"""What the meaning of a metric says if it is 0 between equal policies."""
OF_REFERENCE = re.compile(r"\bKL\b.*\bfrom\b.*\b(reference|teacher)\b")
"""What it says if it is the KL of the policy from another model."""
IS_WEIGHTED = re.compile(
    r"\bweight\s+of\s+a\s+token\b.*\blikelier\s+since\s+it\s+was\s+sampled\b", re.I | re.S
)
"""What the documentation of an argument says if tokens are weighted by a ratio of probabilities."""
SAMPLED = "packed_logprobs"
OFTEN_SAMPLED = (2, 5)
"""Tokens that a sampler draws twice where it draws others once."""
NATS = "nats per token"
SHORT_TEXTS: Lengths = [[(2, 2)], [(2, 3)]]
LONG_TEXTS: Lengths = [[(2, 7)], [(3, 4)]]
SMALL = 1e-5
FAR = 0.5
"""In nats: beyond any usual bound of a policy's ratio."""
ROUNDING = 1e-12


class MemorylessLM(TinyLM):
    """Predicts a token from the one before it alone."""

    def forward(self, tokens: torch.Tensor, lengths: object) -> torch.Tensor:
        return torch.tanh(self.embedding[tokens])


class EqualWeightChecks(InterfaceSubject):
    def test_a_policy_is_at_no_distance_from_itself(self, rehearsal: Rehearsal) -> None:
        """a policy whose own log-probs are in the batch is at no distance from itself, at any
        temperature"""
        make = rehearsal.make
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

    def test_a_distance_from_a_reference_is_the_kl(self, rehearsal: Rehearsal) -> None:
        """a KL that is reported from a reference or teacher is, in the mean over all tokens, that
        of a policy to which they are equally likely"""
        names = _distances_from_references(rehearsal.make())
        if not names:
            pytest.skip("reports no KL from a reference")
        policy = rehearsal.model(lr=0.0)
        policy.module.model.head.data.zero_()
        batch = _each_token(rehearsal, policy.module)
        outcome = rehearsal.train(batch, model=policy)
        expected = -math.log(VOCABULARY) - float(all_logprobs(teacher().module, batch)[1::2].mean())
        if len({call.batch.bs for call in outcome.engine.calls}) > 1:
            pytest.skip("not tried: its minibatches differ in size")
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
        if SAMPLED not in rehearsal.batch.keys or not self.arguments_documented_as(IS_WEIGHTED):
            pytest.skip("weights no tokens by how much likelier they have become")
        outcomes = [_after_sampling(rehearsal, again) for again in ((), OFTEN_SAMPLED)]
        on_policy, weighted = (outcome.weights for outcome in outcomes)
        if (size := _distance(on_policy, weighted)) > SMALL:
            raise Violation(
                f"weights differ by {size:.3g} after a step on tokens that were sampled with other "
                "probabilities",
                "weight a token with its probability now over that when it was sampled",
                rehearsal.where,
            )

    def test_what_comes_back_is_not_clipped(self, rehearsal: Rehearsal) -> None:
        """where actions far from the old policy are left out, these are the ones that would go
        farther, not those that come back"""
        batch = rehearsal.batch
        if not {"old_logprobs", ADVANTAGES} <= set(batch.keys):
            pytest.skip("compares no old log-probs with the policy's, weighted by advantages")
        near = _with_own_logprobs(batch, rehearsal.model().module)
        for log_ratio, change in ((FAR, "likelier"), (-FAR, "less likely")):
            moved = with_tensor(near, "old_logprobs", near.data["old_logprobs"] - log_ratio)
            nothing, good, bad = (_learned(rehearsal, moved, by) for by in (0.0, 1.0, -1.0))
            rewarded, punished = _distance(nothing, good), _distance(nothing, bad)
            farther, back = (rewarded, punished) if log_ratio > 0 else (punished, rewarded)
            if back <= ROUNDING < farther:
                raise Violation(
                    f"of actions that became {change}, advantages teach nothing that would bring "
                    "them back, but take them farther",
                    "take the smaller of both objectives, that is the larger loss: min, not max",
                    rehearsal.where,
                )

    def test_texts_without_prompts_weigh_what_is_trained_on(self, rehearsal: Rehearsal) -> None:
        """where the loss is a mean over tokens, it is the same without prompts for a model to which
        all tokens are equally likely"""
        batch = rehearsal.batch
        if PROMPT_MASK not in batch.keys or rehearsal.result.engine.heads != {"lm"}:
            pytest.skip("does not tell prompts from responses, or does not learn tokens")
        if set(SIGNALS) & set(batch.keys):
            pytest.skip("learns from what responses earned")
        losses = [_loss_of_ignorant(rehearsal, lengths) for lengths in (SHORT_TEXTS, LONG_TEXTS)]
        if not math.isclose(*losses, rel_tol=SMALL):
            pytest.skip("not tried: its loss depends on lengths")
        loss = _loss_of_ignorant(rehearsal, LONG_TEXTS, has_prompts=False)
        if not math.isclose(loss, losses[0], rel_tol=SMALL):
            raise Violation(
                f"the loss of a model to which all tokens are equally likely is {losses[0]:.6g}, "
                f"and {loss:.6g} without prompts",
                "nothing predicts the first token of a text: it does not count either",
                rehearsal.where,
            )

    def test_advantages_teach_in_their_direction(self, rehearsal: Rehearsal) -> None:
        """where the policy is that which sampled, no token of a response with an advantage above 0
        becomes less likely, and none below 0 likelier"""
        batch = rehearsal.batch
        is_compared = bool(set(LOGPROBS) & set(batch.keys))
        if not is_compared or ADVANTAGES not in batch.keys or trained_actions(batch) is None:
            pytest.skip("learns from no advantages of what another policy sampled")
        near = _trained_on_policy(rehearsal)
        signs = 1.0 - 2.0 * (torch.arange(len(batch.flat_seqlens(SEQUENCES))) % 2)
        advantages = per_action(batch, signs).to(batch.data[ADVANTAGES])
        taught, nothing = (
            _gradient_of_logprobs(rehearsal, with_tensor(near, ADVANTAGES, numbers))
            for numbers in (advantages, torch.zeros_like(advantages))
        )
        wrong = int(((taught - nothing) * advantages > SMALL).sum())
        if wrong:
            raise Violation(
                f"{wrong} of {len(advantages)} tokens move against their advantages, though the "
                "policy is that which sampled them",
                "a weight or a ratio has a gradient that it should not have: detach it; or a sign",
                rehearsal.where,
            )

    def test_longer_prompts_change_nothing(self, rehearsal: Rehearsal) -> None:
        """with a model without memory, longer prompts change nothing"""
        if PROMPT_MASK not in rehearsal.batch.keys or trained_actions(rehearsal.batch) is None:
            pytest.skip("does not tell prompts from responses")
        short, longer = (
            rehearsal.train(batch, model=rehearsal.model(module=MemorylessLM()))
            for batch in (rehearsal.batch, padded(rehearsal.batch, in_front=True))
        )
        rehearsal.demand_same(
            short,
            longer,
            ("with short prompts", "with longer ones"),
            "prompts are not trained on: count and average over response tokens only",
        )


def _loss_of_ignorant(rehearsal: Rehearsal, lengths: Lengths, has_prompts: bool = True) -> float:
    """The loss of a model to which all tokens are equally likely, on texts of these lengths."""
    batch = rehearsal.batches(lengths)
    if not has_prompts:
        batch = with_tensor(batch, PROMPT_MASK, torch.zeros_like(batch.data[PROMPT_MASK]))
    return rehearsal.train(batch, model=ignorant(rehearsal)).stats["loss"]


def _trained_on_policy(rehearsal: Rehearsal) -> SequenceSample:
    """The usual batch, as the policy itself sampled it, with all sequences trained on."""
    near = _with_own_logprobs(rehearsal.batch, rehearsal.model().module)
    for mask in {LOSS_MASK, CHOSEN} & set(near.keys):
        near = with_tensor(near, mask, torch.ones_like(near.data[mask]))
    return near


def _gradient_of_logprobs(rehearsal: Rehearsal, batch: SequenceSample) -> torch.Tensor:
    """[T - N] that of all log-probs in an optimizer step that leaves the model as it is; skips the
    check where a step takes a part of the batch, or other outputs."""
    interface = rehearsal.make()
    single = {"minibatches": 1} if hasattr(interface, "minibatches") else {}
    model = rehearsal.model(lr=0.0)
    outcome = rehearsal.train(batch, model=model, interface=rehearsal.make(**single))
    gradient = gradients_of(outcome, "logprobs", len(batch.data[ADVANTAGES]))
    if gradient is None:
        pytest.skip("not tried: a step takes a part of the batch, or other outputs")
    return gradient


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
    single = {"minibatches": 1} if hasattr(rehearsal.make(), "minibatches") else {}
    outcome = rehearsal.train(
        with_tensor(batch, SAMPLED, logprobs), model=policy, interface=rehearsal.make(**single)
    )
    for call in outcome.engine.calls:
        taken = _counts_of_last_tokens(call.batch)
        if not torch.equal(taken * counts.sum(), counts * taken.sum()):
            pytest.skip("not tried: its minibatches differ")
    return outcome


def _counts_of_last_tokens(batch: SequenceSample) -> torch.Tensor:
    """[V] how many sequences, all of three tokens, end with each token of the vocabulary."""
    return torch.bincount(batch.data[SEQUENCES].view(-1, 3)[:, 2], minlength=VOCABULARY)


def _learned(
    rehearsal: Rehearsal, batch: SequenceSample, advantage: float
) -> dict[str, torch.Tensor]:
    """The weights after a step with this advantage for every action."""
    advantages = torch.full_like(batch.data[ADVANTAGES], advantage)
    return rehearsal.train(with_tensor(batch, ADVANTAGES, advantages)).weights


def _distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((weight - second[name]).abs().max()) for name, weight in first.items())


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


def _with_own_logprobs(
    batch: SequenceSample, engine: TinyEngine, temperature: float = 1.0
) -> SequenceSample:
    """The batch, all of whose log-probs are those of the model at this temperature."""
    logprobs = all_logprobs(engine, batch, temperature).float()
    copy = batch.select(batch.keys)
    copy.data |= dict.fromkeys(set(LOGPROBS) & set(batch.keys), logprobs)
    return copy


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
    batch = _with_own_logprobs(batch, policy)
    if REFERENCE in batch.keys:
        batch.data[REFERENCE] = all_logprobs(teacher().module, batch).float()
    return as_of_teacher(rehearsal.make(), batch)
