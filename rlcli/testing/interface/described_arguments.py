"""Laws that follow from what the documentation of an argument says that its number is: the least or
the largest value of a key, a bound, a target, or what is subtracted."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import REWARDS, SEQUENCES
from rlcli.api.limits import needs_of
from rlcli.errors import RlcliError
from rlcli.testing.arguments import Changes, arguments_of, described
from rlcli.testing.batches import Lengths
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import last_rows, with_groups_reversed, with_tensor
from rlcli.testing.interface.advantages import RETURNS, VALUES
from rlcli.testing.interface.edge_cases import demand_nothing_learned
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial, inference_batches_for
from rlcli.testing.interface.invariants import (
    LEAD,
    SMALL_STEP,
    ignorant,
    pairs_of_equal_length,
    preferring,
    without_preference,
)
from rlcli.testing.interface.loss import gradients_of
from rlcli.testing.interface.outputs import TOLERANCE, check_same, tensor_of
from rlcli.testing.interface.training_trial import (
    Batches,
    Rehearsal,
    TrainingOutcome,
    is_close,
)

BOUND_OF_KEY = re.compile(r"(min|max)_(\w+)")
"""The name of an argument that is the least or the largest value of a key."""
SELECTS = re.compile(r"\b(train|keep|drop|accept|skip|discard|leave)", re.I)
"""The meaning of one that what is beyond it does not count."""
CLIPS_VALUES = re.compile(r"\bclip.*\bprediction.*\b(earlier|old|previous)\b", re.I | re.S)
TARGET_MARGIN = re.compile(r"\btarget\s+margin\b", re.I)
PULLS_TO_ZERO = re.compile(r"\bmean\s+(score|reward)s?\s+(near|towards?|to|at)\s+0\b", re.I)
BIAS = re.compile(r"\Asubtracted\s+from\s+((the|each|all|task|raw)\s+)*rewards?\b", re.I)
SCALE = re.compile(r"\Amultiplies\s+((the|each|all|task|raw)\s+)*rewards?\b", re.I)
FACTOR_OF_REWARDS = re.compile(r"\brewards\s+are\s+\w+\s+times\b", re.I)
"""Written of the argument itself."""
CHANGE_IN_SCORE = re.compile(r"\bchange\s+(in|of)\s+the\s+score\b", re.I)
BEFORE_LIMIT = re.compile(r"\bpenalty\b.*\btokens\s+before\b", re.I | re.S)
"""Where a penalty begins that is complete at a limit."""
LONGEST = re.compile(r"\bmaximum\s+length\s+of\s+a\s+response\b", re.I)

NARROW, WIDE = 0.01, 1000.0
FACTOR = 2.0
SHIFT = 64.0
"""Beyond any usual bound of a reward, and no reward is rounded by it."""
LONG: Lengths = [[(2, 3 + (2 * i) % 5), (2, 4 + i % 4), (2, 3 + i % 3)] for i in range(6)]
SHORTEST = 3
"""Of the responses in LONG."""


class DescribedArgumentChecks(CallSubject):
    def test_a_value_at_its_bound_is_accepted(self, rehearsal: Rehearsal) -> None:
        """what is as low as the least value that is accepted, or as high as the largest, counts;
        where all is beyond, nothing is trained on"""
        bounds = list(_bounds_of_keys(rehearsal, self.arguments_documented_as(SELECTS)))
        skip_unless(bounds, "has no argument that is the least or the largest value of a key")
        for name, key, beyond in bounds:
            batch = with_tensor(rehearsal.batch, key, torch.ones_like(rehearsal.batch.data[key]))
            within, at = (
                rehearsal.train(batch, changes={name: bound}) for bound in (1.0 + beyond, 1.0)
            )
            rehearsal.demand_same(
                within,
                at,
                (f"with {name} {1 + beyond:g} and {key} of 1", f"with {name} 1"),
                f"{name} is accepted itself: compare with >= or <=",
            )
            excluding = rehearsal.train(batch, changes={name: 1.0 - beyond})
            case = f"with {name} {1 - beyond:g} and {key} of 1"
            demand_nothing_learned(rehearsal, excluding, case)

    def test_clipping_lowers_no_loss_of_values(self, rehearsal: Rehearsal) -> None:
        """where predictions are clipped around earlier ones, a narrower clip lowers no loss"""
        names, batch = self._clips_of_values(rehearsal), rehearsal.batch
        moved = with_tensor(batch, VALUES, batch.data[VALUES] + _alternating(batch.data[VALUES]))
        for name in names:
            narrow, wide = _clipped_losses(rehearsal, moved, name)
            if narrow < wide - TOLERANCE * max(1.0, abs(wide)):
                raise Violation(
                    f"the loss is {wide:.6g} with {name}={WIDE:g}, {narrow:.6g} with {NARROW:g}",
                    "take the larger of the clipped and the unclipped loss: max, not min",
                    rehearsal.where,
                )

    def test_clipping_limits_both_directions(self, rehearsal: Rehearsal) -> None:
        """where predictions are clipped around earlier ones, those that fell count as those that
        rose"""
        for name in self._clips_of_values(rehearsal):
            rose, fell = (_rise_by_clipping(rehearsal, name, by) for by in (1.0, -1.0))
            if min(rose, fell) <= TOLERANCE < max(rose, fell):
                raise Violation(
                    f"{name}={NARROW:g} instead of {WIDE:g} raises the loss by {rose:.4g} where "
                    f"predictions have risen by 1 towards returns, by {fell:.4g} where they have "
                    "fallen",
                    f"clip to earlier ± {name}, on both sides",
                    rehearsal.where,
                )

    def _clips_of_values(self, rehearsal: Rehearsal) -> list[str]:
        """The arguments that clip predicted values. Skips the check without any."""
        skip_unless({VALUES, RETURNS} <= rehearsal.batch.keys, "predicts no values of returns")
        reason = "has no argument by which predicted values are clipped"
        return self.require_documented_as(CLIPS_VALUES, reason)

    def test_a_pair_at_its_target_is_undecided(self, rehearsal: Rehearsal) -> None:
        """the loss of a pair with the target margin is that of equal sequences without a target"""
        names = self.require_documented_as(TARGET_MARGIN, "has no argument that is a target margin")
        pair, margin = _leading_pair(rehearsal)
        equal = rehearsal.train(without_preference(pair), model=ignorant(rehearsal))
        same = _without_learning(rehearsal, _of_equal_sequences(without_preference(pair)), {})
        skip_if(
            abs(same.stats["loss"] - equal.stats["loss"]) > TOLERANCE,
            "not tried: its loss has terms that are not about the margin",
        )
        for name in names:
            loss = _without_learning(rehearsal, pair, {name: margin}).stats["loss"]
            expected = equal.stats["loss"]
            if not is_close(loss, expected, TOLERANCE):
                raise Violation(
                    f"the loss of a pair with a margin of {margin:.4g} is {loss:.6g} with "
                    f"{name}={margin:.4g}, and {expected:.6g} of equal sequences without a target",
                    "a target is subtracted from the margin as it is reported, in its units",
                    rehearsal.where,
                )

    def test_reported_rewards_have_their_factor(self, rehearsal: Rehearsal) -> None:
        """reported rewards grow with the argument that they are a multiple of"""
        stats = rehearsal.result.stats
        rewards = [name for name, unit, _ in rehearsal.declared(stats) if unit == "reward"]
        skip_unless(rewards, "reports no rewards")
        reason = "has no argument that rewards are a multiple of"
        for factor in self.require_documented_as(FACTOR_OF_REWARDS, reason):
            usual, larger = (
                _without_learning(rehearsal, rehearsal.batch, {factor: value}).stats
                for value in (1.0, FACTOR)
            )
            for name in rewards:
                expected = FACTOR * usual[name]
                if not is_close(larger[name], expected, TOLERANCE):
                    raise Violation(
                        f"{name} is {usual[name]:.6g} with {factor}=1, and {larger[name]:.6g} with "
                        f"{factor}={FACTOR:g}",
                        f"report rewards with the factor {factor}",
                        rehearsal.where,
                    )

    def test_centred_scores_come_closer_to_0(self, rehearsal: Rehearsal) -> None:
        """a weight of what keeps the mean score near 0 brings that of equal sequences closer, and
        moves both scores of a pair by as much"""
        names = self.require_documented_as(
            PULLS_TO_ZERO, "has no argument that keeps the mean score near 0"
        )
        batch = _of_equal_sequences(pairs_of_equal_length(rehearsal))
        for name in names:
            without, centred = (
                _mean_score_after(rehearsal, batch, {name: weight}) for weight in (0.0, 1.0)
            )
            if not centred < without:
                raise Violation(
                    f"after a step the mean score is {without:.8g} from 0 with {name}=0, "
                    f"{centred:.8g} with {name}=1",
                    "penalise the sum of both scores of a pair, not their difference",
                    rehearsal.where,
                )
            _demand_equal_pull(rehearsal, {name: 1.0}, {name: 0.0})

    def test_a_bias_of_rewards_is_in_their_units(self, inferring: CallTrial) -> None:
        """rewards that are all higher by what is subtracted from them change nothing"""
        names = [name for name in self.arguments_documented_as(BIAS) if "bias" in name]
        skip_if(
            not names or REWARDS not in inferring.batch.keys,
            "has no argument that is subtracted from rewards",
        )
        scaled = dict.fromkeys(self.arguments_documented_as(SCALE), FACTOR)
        higher = with_tensor(inferring.batch, REWARDS, inferring.batch.data[REWARDS] + SHIFT)
        for name in names:
            check_same(
                _estimates(inferring, inferring.batch, scaled),
                _estimates(inferring, higher, {**scaled, name: SHIFT}),
                f"with rewards higher by {SHIFT:g} and {described({**scaled, name: SHIFT})}",
                "subtract it from the rewards as they are, before anything else",
                inferring.where,
            )

    def test_a_change_in_a_score_has_no_zero(self, inferring: CallTrial, batches: Batches) -> None:
        """where the change in a score is the reward, a constant added to all scores changes
        nothing"""
        key = "dense_rewards"
        changes = dict.fromkeys(self.arguments_documented_as(CHANGE_IN_SCORE), True)
        variants = [{}, *({name: True} for name in _flags(inferring.interface))]
        reading = [
            {**flag, **changes} for flag in variants if key in _needed(inferring, flag, changes)
        ]
        skip_if(
            not changes or not reading, "has no flag by which the change in a score is the reward"
        )
        interface = inferring.make(**reading[0])
        batch = inference_batches_for(interface, batches, inferring.tokenizer)()
        scores = tensor_of(batch, key)
        usual, shifted = (
            inferring.run(with_tensor(batch, key, numbers), changes=reading[0])
            for numbers in (scores, scores + FACTOR)
        )
        check_same(
            usual,
            shifted,
            f"with scores higher by {FACTOR:g} and {described(reading[0])}",
            "an action earns the score after it minus the score before it",
            inferring.where,
        )

    def test_a_penalty_is_complete_at_the_maximum_length(
        self, inferring: CallTrial, batches: Batches
    ) -> None:
        """a response of the maximum length pays as much as longer ones"""
        needs = needs_of(type(inferring.interface))
        pairs = [
            (name, limit)
            for limit in self.arguments_documented_as(LONGEST)
            for name in self.arguments_documented_as(BEFORE_LIMIT)
            if needs.get(name) == limit
        ]
        skip_unless(pairs, "has no penalty that grows up to a maximum length")
        for name, limit in pairs:
            interface = inferring.make(**{name: 1, limit: SHORTEST})
            batch = inference_batches_for(interface, batches, inferring.tokenizer)(LONG)
            beyond, at = (
                inferring.run(batch, changes={name: 1, limit: length})
                for length in (SHORTEST - 1, SHORTEST)
            )
            check_same(
                beyond,
                at,
                f"with {name}=1 and {limit}={SHORTEST}, the length of the shortest response, "
                f"instead of {SHORTEST - 1}",
                f"{name} ends at {limit}: where it begins, nothing is paid yet",
                inferring.where,
            )


def _bounds_of_keys(
    rehearsal: Rehearsal, selecting: Collection[str]
) -> Iterator[tuple[str, str, float]]:
    """(argument, the key whose numbers it bounds, what to add to the bound so that it is wider) of
    those that are off by default."""
    tensors = rehearsal.batch.data
    for argument in arguments_of(rehearsal.make()):
        bound = BOUND_OF_KEY.fullmatch(argument.name)
        if bound is None or argument.default is not None or argument.name not in selecting:
            continue
        for key in (f"{bound[2]}s", bound[2]):
            if key in tensors and tensors[key].is_floating_point():
                yield argument.name, key, -1.0 if bound[1] == "min" else 1.0


def _rise_by_clipping(rehearsal: Rehearsal, name: str, moved: float) -> float:
    """By how much a narrow clip raises the loss where predictions have moved by so much since
    earlier ones, and have as far to go to the returns."""
    batch = rehearsal.batch
    values = batch.data[VALUES]
    of_actions = torch.cat([row[:-1] for row in values.split(batch.flat_seqlens(VALUES))])
    skip_if(
        of_actions.shape != batch.data[RETURNS].shape,
        "not tried: its returns are not those of actions",
    )
    batch = with_tensor(batch, VALUES, values - moved)
    batch = with_tensor(batch, RETURNS, (of_actions + moved).to(batch.data[RETURNS]))
    narrow, wide = _clipped_losses(rehearsal, batch, name)
    return narrow - wide


def _clipped_losses(rehearsal: Rehearsal, batch: SequenceSample, name: str) -> list[float]:
    """The loss with a narrow and with a wide clip."""
    return [
        _without_learning(rehearsal, batch, {name: clip}).stats["loss"] for clip in (NARROW, WIDE)
    ]


def _alternating(numbers: torch.Tensor) -> torch.Tensor:
    """1, -1, 1, …"""
    return 1.0 - 2.0 * (torch.arange(len(numbers)) % 2).to(numbers)


def _without_learning(
    rehearsal: Rehearsal, batch: SequenceSample, changes: Changes
) -> TrainingOutcome:
    """A step that leaves the model as it is."""
    return rehearsal.train(batch, lr=0.0, changes=changes)


def _leading_pair(rehearsal: Rehearsal) -> tuple[SequenceSample, float]:
    """A pair whose chosen sequence is ahead, and by how much, as it is reported; skips the check if
    that is not."""
    pair = preferring(pairs_of_equal_length(rehearsal), -1.0).select_indices([0])
    for candidate in (pair, with_groups_reversed(pair)):
        stats = _without_learning(rehearsal, candidate, {}).stats
        for name, _, meaning in rehearsal.declared(stats):
            if LEAD.search(meaning) and stats[name] > TOLERANCE:
                return candidate, stats[name]
    pytest.skip("reports no margin of its pairs")


def _of_equal_sequences(batch: SequenceSample) -> SequenceSample:
    """Pairs of the same length, with the tokens of the chosen sequences in the others' place."""
    rows = batch.data[SEQUENCES].split(batch.flat_seqlens(SEQUENCES))
    return with_tensor(batch, SEQUENCES, torch.cat([row for row in rows[::2] for _ in range(2)]))


def _mean_score_after(rehearsal: Rehearsal, batch: SequenceSample, changes: Changes) -> float:
    """The distance from 0 of the mean value at the end of all sequences after a small step."""
    model = rehearsal.train(batch, lr=SMALL_STEP, changes=changes).model
    values = model.module.forward(batch, post_hook=lambda output, _: output.values)
    return abs(float(values[last_rows(batch)].double().mean()))


def _demand_equal_pull(rehearsal: Rehearsal, changes: Changes, without: Changes) -> None:
    """Raise Violation if arguments add different gradients to the two scores of a pair."""
    batch = pairs_of_equal_length(rehearsal)
    tokens = sum(batch.flat_seqlens(SEQUENCES))
    pulled, usual = (
        gradients_of(_without_learning(rehearsal, batch, arguments), VALUES, tokens)
        for arguments in (changes, without)
    )
    if pulled is None or usual is None:
        return
    added = (pulled - usual)[last_rows(batch)]
    difference = float((added[::2] - added[1::2]).abs().max())
    if difference > TOLERANCE:
        raise Violation(
            f"{described(changes)} moves the scores of a pair apart by {difference:.3g} (gradient)",
            "what is to be near 0 is the mean of both scores, not each of them",
            rehearsal.where,
        )


def _estimates(trial: CallTrial, batch: SequenceSample, changes: Changes) -> SequenceSample:
    """The result without metadata, which may report rewards as they are read."""
    output = trial.run(batch, changes=changes)
    output.metadata = {}
    return output


def _flags(interface: ModelInterface) -> list[str]:
    """Its arguments that are False."""
    return [argument.name for argument in arguments_of(interface) if argument.default is False]


def _needed(trial: CallTrial, *changes: Changes) -> Collection[str]:
    """The keys that the call reads with these changes; none where they are refused."""
    combined = {name: value for each in changes for name, value in each.items()}
    try:
        declared = trial.make(**combined).reads(trial.call)
    except (RlcliError, ValueError):
        return ()
    return () if declared is None else declared.needed
