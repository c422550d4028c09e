"""Invariants of any algorithm that learns from rewards, advantages or returns,
or stays near a reference.

One response's number is changed, a small step is taken, and the checks look at which responses
became more likely (or, for a critic, more valuable). To first order the effects form the matrix of
a scalar product, so the changed response gains, and no other gains more under any fixed
displacement: this reveals mixed-up rows, and wrong signs too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import PROMPT_MASK, REFERENCE, SEQUENCES
from rlcli.api.model import Model
from rlcli.testing.arguments import Changes
from rlcli.testing.batches import PAIRS
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import (
    action_counts,
    per_action,
    trained_actions,
    with_groups_reversed,
    with_tensor,
)
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Rehearsal,
    group_size,
    is_close,
    outputs_of_actions,
)

SIGNALS = ("rewards", "advantages", "returns")
"""Keys that say how good a response is."""
MARGINS = "margins"
"""Key with the score of each sequence: that of the chosen one is higher by the pair's margin."""
ROUNDING = 1e-9
SMALL_STEP = 1e-3
"""A learning rate at which the effects of a step add up."""
LEAD = re.compile(r"\bchosen\b.*\b(less|minus)\b.*\brejected\b")
"""The meaning of a number that says how far the chosen sequence is ahead."""
IN_ORDER = re.compile(r"\bpairs\b.*\bchosen\b.*\b(higher|greater|more|above|preferred|ahead)\b")
"""The meaning of a share of pairs of which the chosen sequence is ahead."""

OF_ONE_SIDE = re.compile(
    r"\A(?!.*\bchosen\b.*\brejected\b)(?!.*\brejected\b.*\bchosen\b)"
    r".*\b(reward|score|value|likelihood|log-prob)s?\s+of\s+the\s+(chosen|rejected)\b",
    re.S,
)
"""The meaning of a number that says something of the chosen sequences alone, or of the others."""


class LawChecks(InterfaceSubject):
    def test_a_reward_raises_its_own_response(self, rehearsal: Rehearsal) -> None:
        """a higher reward, advantage or return raises its own response, most of all"""
        keys = [key for key in SIGNALS if key in rehearsal.batch.keys]
        skip_unless(keys, "reads no rewards, advantages or returns")
        for key in keys:
            batch = _batch(rehearsal, key)
            _demand_own_gain(
                rehearsal,
                with_tensor(batch, key, torch.zeros_like(batch.data[key])),
                key,
                f"a higher {key.removesuffix('s')}",
                "numbers and sequences are paired by position: check what was rolled, sorted, "
                "masked or expanded",
            )

    def test_a_step_moves_a_pair_apart(self, rehearsal: Rehearsal) -> None:
        """a step on a pair raises the lead of the chosen sequence, and no less where the reference
        prefers it more"""
        batch = pairs_of_equal_length(rehearsal)
        references = (0.0, -1.0, 1.0) if REFERENCE in batch.keys else (0.0,)
        growth = [_growths(rehearsal, preferring(batch, by)) for by in references]
        least = float(growth[0].min())
        if least < -ROUNDING or float(growth[0].sum()) <= 0:
            raise Violation(
                f"after a small step a pair's lead has grown by {least:.3g}",
                "a sign, or chosen and rejected exchanged: sequences alternate, chosen first",
                rehearsal.where,
            )
        opposed, preferred = growth[1:] or (growth[0], growth[0])
        if float((preferred - opposed).sum()) < -ROUNDING:
            raise Violation(
                "leads grow less where the reference prefers the chosen sequence",
                "the sign of the reference: what counts is policy minus reference",
                rehearsal.where,
            )

    def test_a_larger_margin_teaches_no_less(self, rehearsal: Rehearsal) -> None:
        """a step on a pair raises its lead no less where its margin is larger"""
        batch = pairs_of_equal_length(rehearsal)
        skip_if(MARGINS not in batch.keys, f"reads no {MARGINS}")
        margins = batch.data[MARGINS]
        ahead = 1.0 - torch.arange(len(margins)) % 2
        small, large = (
            _growths(rehearsal, with_tensor(batch, MARGINS, margins + further * ahead))
            for further in (0.0, 1.0)
        )
        least = float((large - small).min())
        if least < -ROUNDING:
            raise Violation(
                f"a pair's lead grows by {-least:.3g} less after a step with a margin larger by 1",
                "subtract the margin from the lead: what is clearly better must be further ahead",
                rehearsal.where,
            )

    def test_exchanged_pairs_exchange_what_is_reported(self, rehearsal: Rehearsal) -> None:
        """with chosen and rejected sequences exchanged, so is what is reported of them, and a share
        of pairs in the right order is the rest of 1"""
        batch = pairs_of_equal_length(rehearsal)
        stats, exchanged = (
            rehearsal.train(pairs, lr=0.0).stats for pairs in (batch, with_groups_reversed(batch))
        )
        for name, expected in _exchanged(rehearsal, stats).items():
            if not is_close(exchanged[name], expected):
                raise Violation(
                    f"{name} is {stats[name]:.6g}, and with chosen and rejected sequences "
                    f"exchanged {exchanged[name]:.6g}, not {expected:.6g}",
                    "sequences alternate, chosen first; look for a sign, or the name of the other",
                    rehearsal.where,
                )

    def test_one_side_of_pairs_is_reported_by_itself(self, rehearsal: Rehearsal) -> None:
        """what METRICS says of the chosen sequences alone does not depend on the rejected ones,
        nor the other way round"""
        batch = pairs_of_equal_length(rehearsal)
        changed = [_with_other_responses(batch, first) for first in (0, 1)]
        usual, *others = (rehearsal.train(pairs, lr=0.0).stats for pairs in (batch, *changed))
        for name, _, meaning in rehearsal.declared(usual):
            side = OF_ONE_SIDE.search(meaning)
            if side is None:
                continue
            with_others = others[1 if side[2] == "chosen" else 0][name]
            if not is_close(with_others, usual[name]):
                raise Violation(
                    f"{name} is {usual[name]:.6g}, and {with_others:.6g} where the sequences that "
                    f"are not {side[2]} are others",
                    f"neither its sum nor its divisor has sequences that are not {side[2]}",
                    rehearsal.where,
                )

    def test_equal_sequences_are_not_in_the_right_order(self, rehearsal: Rehearsal) -> None:
        """a reported share of pairs in the right order is at most a half where all are equal"""
        batch = without_preference(pairs_of_equal_length(rehearsal))
        stats = rehearsal.train(batch, model=ignorant(rehearsal)).stats
        for name, _, meaning in rehearsal.declared(stats):
            if IN_ORDER.search(meaning) and stats[name] > 0.5 + ROUNDING:
                raise Violation(
                    f"{name} is {stats[name]:.6g} where chosen and rejected sequences are equal",
                    "compare with >, or let a tie count half",
                    rehearsal.where,
                )

    def test_a_reference_pulls_towards_itself(self, rehearsal: Rehearsal) -> None:
        """a response like the reference beats one that strayed"""
        batch = _batch(rehearsal, REFERENCE)
        sampled = [key for key in ("packed_logprobs", "old_logprobs") if key in batch.keys]
        skip_unless(sampled, "does not compare with the policy's log-probs")
        _demand_own_gain(
            rehearsal,
            with_tensor(batch, REFERENCE, batch.data[sampled[0]] - 1.0),
            REFERENCE,
            "a reference that is equal rather than less likely",
            "check the sign of the KL: a penalty is subtracted from rewards, added to a loss, and "
            "is policy minus reference",
        )

    def test_a_bonus_for_entropy_raises_it(self, rehearsal: Rehearsal) -> None:
        """a policy has more entropy after a step with a larger bonus for it"""
        texts = {
            each.name: f"{each.name} {each.doc}".lower() for each in self.described_arguments()
        }
        bonuses = [name for name, text in texts.items() if "entropy" in text and "bonus" in text]
        skip_if(
            not bonuses or rehearsal.heads != {"lm"},
            "has no argument that is a bonus for entropy",
        )
        for name in bonuses:
            demand_entropy(rehearsal, name)


def demand_entropy(rehearsal: Rehearsal, bonus: str) -> None:
    """Raises Violation unless a larger value of an argument leaves more entropy after a step."""
    small, large = (_entropy_after(rehearsal, {bonus: value}) for value in (0.0, 1.0))
    if large <= small:
        raise Violation(
            f"after a step the entropy is {small:.8g} with {bonus}=0, {large:.8g} with {bonus}=1",
            "a bonus is subtracted from the loss, with its gradient",
            rehearsal.where,
        )


def _entropy_after(rehearsal: Rehearsal, changes: Changes) -> float:
    """The mean entropy of the choices of trained tokens after a small step."""
    batch = rehearsal.batch
    model = rehearsal.train(batch, lr=SMALL_STEP, changes=changes).model
    return float(outputs_of_actions(model, batch, "entropy")[trained_actions(batch)].mean())


def pairs_of_equal_length(rehearsal: Rehearsal) -> SequenceSample:
    """Pairs of equally long sequences, whose means are ordered like their sums; skips the check for
    what does not learn from pairs alone."""
    interface, batch = rehearsal.make(), rehearsal.batch
    size = group_size(interface, "train_step")
    skip_if(
        size != 2 or any(key in batch.keys for key in SIGNALS), "does not learn from pairs alone"
    )
    skip_if(len(rehearsal.heads) != 1, "not tried: uses several heads")
    lengths = [[(2, 3 + number), (2, 3 + number)] for number in range(4)]
    return rehearsal.fit(rehearsal.batches(lengths, seed=2))


def _exchanged(rehearsal: Rehearsal, stats: Mapping[str, float]) -> dict[str, float]:
    """Number → what it becomes when chosen and rejected sequences are exchanged; of those whose
    name or meaning says so."""
    expected = {}
    for name, _, meaning in rehearsal.declared(stats):
        counterpart = name.replace("chosen", "rejected")
        if IN_ORDER.search(meaning):
            expected[name] = 1.0 - stats[name]
        elif LEAD.search(meaning):
            expected[name] = -stats[name]
        elif counterpart != name and counterpart in stats:
            expected |= {name: stats[counterpart], counterpart: stats[name]}
    return expected


def _with_other_responses(batch: SequenceSample, first: int) -> SequenceSample:
    """A copy in which every second sequence, from the `first` on, has other tokens, and a prompt
    that is longer by one."""
    lengths = batch.flat_seqlens(SEQUENCES)
    rows = list(batch.data[SEQUENCES].split(lengths))
    for row in range(first, len(rows), 2):
        rows[row] = rows[row].roll(1)
    changed = with_tensor(batch, SEQUENCES, torch.cat(rows))
    if PROMPT_MASK in batch.keys:
        masks = list(batch.data[PROMPT_MASK].split(lengths))
        for row in range(first, len(masks), 2):
            masks[row] = masks[row] | masks[row].roll(1)
        changed = with_tensor(changed, PROMPT_MASK, torch.cat(masks))
    return changed


def without_preference(batch: SequenceSample) -> SequenceSample:
    """The batch with a reference to which all tokens are equally likely."""
    if REFERENCE not in batch.keys:
        return batch
    return with_tensor(batch, REFERENCE, torch.zeros_like(batch.data[REFERENCE]))


def ignorant(rehearsal: Rehearsal) -> Model:
    """A model to which all sequences of a length are equal."""
    model = rehearsal.model(lr=0.0)
    for head in (model.module.model.head, model.module.model.value_head):
        head.data.zero_()
    return model


def preferring(batch: SequenceSample, by: float) -> SequenceSample:
    """The batch with a reference that is the policy, but prefers chosen sequences by as much."""
    if REFERENCE not in batch.keys:
        return batch
    leads = torch.tensor([by, 0.0]).repeat(len(batch.flat_seqlens(SEQUENCES)) // 2)
    counts = action_counts(batch)
    policy = batch.data.get("packed_logprobs", torch.zeros(sum(counts)))
    shifts = per_action(batch, leads / torch.tensor(counts))
    return with_tensor(batch, REFERENCE, policy + shifts)


def _growths(rehearsal: Rehearsal, batch: SequenceSample) -> torch.Tensor:
    """[pairs] by how much a small step on each pair alone raises the lead of its chosen one."""
    growths = []
    for index in range(batch.bs):
        pair = batch.select_indices([index])
        rise = _after_a_step(rehearsal, pair) - _scores(rehearsal, rehearsal.model(), pair)
        growths.append(rise[0] - rise[1])
    return torch.stack(growths)


def _batch(rehearsal: Rehearsal, key: str) -> SequenceSample:
    """Six responses; skips the check if they cannot be made, or do not depend on `key`."""
    skip_if(key not in rehearsal.batch.keys, f"reads no {key}")
    if len(rehearsal.heads) != 1 or trained_actions(rehearsal.batch) is None:
        pytest.skip("trains no responses of one head")
    return rehearsal.fit(rehearsal.batches(PAIRS[:3], seed=2))


def _demand_own_gain(
    rehearsal: Rehearsal, batch: SequenceSample, key: str, change: str, cause: str
) -> None:
    """Raise Violation unless a number of response i higher by 1 raises response i after a step,
    and on average no response i + shift more."""
    plain, numbers = _after_a_step(rehearsal, batch), batch.data[key]
    gains = torch.stack(
        [
            _after_a_step(rehearsal, with_tensor(batch, key, numbers + higher)) - plain
            for higher in _higher_by_1(batch, key)
        ]
    )
    by_shift = [float(gains.roll(-shift, 1).diagonal().mean()) for shift in range(len(gains))]
    best = max(range(len(gains)), key=by_shift.__getitem__)
    if by_shift[0] <= 0:
        raise Violation(
            f"{change} lowers its own response: by {-by_shift[0]:.3g} on average",
            f"a sign. {cause}",
            rehearsal.where,
        )
    if best:
        raise Violation(
            f"{change} of response i raises response i + {best} by {by_shift[best]:.3g}, its "
            f"own by {by_shift[0]:.3g}",
            cause,
            rehearsal.where,
        )


def _higher_by_1(batch: SequenceSample, key: str) -> Iterator[torch.Tensor]:
    """For each response, what to add to the numbers of a key, which has one per sequence or per
    action, so that those of this response are higher by 1."""
    is_per_sequence = set(batch.flat_seqlens(key)) == {1}
    for one_hot in torch.eye(len(batch.flat_seqlens(key))).to(batch.data[key]):
        yield one_hot if is_per_sequence else per_action(batch, one_hot)


def _after_a_step(rehearsal: Rehearsal, batch: SequenceSample) -> torch.Tensor:
    """[N]: the likelihood, or value, of each response after a training step so small that its
    effects add up."""
    return _scores(rehearsal, rehearsal.train(batch, lr=SMALL_STEP).model, batch)


def _scores(rehearsal: Rehearsal, model: Model, batch: SequenceSample) -> torch.Tensor:
    """[N]: the likelihood, or value, of each response; of sequences without a mask, the value at
    their end."""
    trained = trained_actions(batch)
    if trained is not None and rehearsal.heads == {"lm"}:
        rows = outputs_of_actions(model, batch, "logprobs")
    else:
        values = model.module.forward(batch, post_hook=lambda output, _: output.values)
        of_states = values.split(batch.flat_seqlens(SEQUENCES))
        if trained is None:
            return torch.stack([row[-1] for row in of_states])
        rows = torch.cat([row[:-1] for row in of_states])
    return torch.stack([row.sum() for row in (rows * trained).split(action_counts(batch))])
