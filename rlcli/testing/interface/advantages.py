"""Laws of advantages: a higher reward raises those of its own response, responses are compared
whatever their order, nothing comes after an end, and a penalty is paid once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import inherited
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import ADVANTAGES, DENSE_REWARDS, NOT_ENDED, REFERENCE, REWARDS
from rlcli.api.metrics import declared_metrics
from rlcli.testing.arguments import Changes, arguments_of, described
from rlcli.testing.batches import Lengths
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import (
    last_rows,
    trained_actions,
    with_groups_reversed,
    with_tensor,
)
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial, usual_batch
from rlcli.testing.interface.outputs import (
    TOLERANCE,
    check_same,
    reported_sums,
    sequences,
    tensor_of,
)
from rlcli.testing.interface.training_trial import Batches, group_size

THREES: Lengths = [[(2, 3 + i % 2), (2, 2 + i % 3), (2, 1 + i % 5)] for i in range(6)]
"""Groups of three: the mean of three equal numbers is often another number."""
LARGE = 50.0
"""A reward beyond those of the usual batch."""
NOTHING = 0.05
"""Most that the last bit of a reward may change an advantage by."""
FACTOR = re.compile("discount|gamma|lambda|decay")
"""In names of arguments by which rewards count less for actions long before them."""
VALUES, RETURNS = "values", "returns"
POLICIES = ("packed_logprobs", "proximal_logprobs", REFERENCE)


class AdvantageChecks(CallSubject):
    @pytest.fixture
    def rating(self, inferring: CallTrial) -> CallTrial:
        """Repeated inference that makes advantages."""
        skip_if(ADVANTAGES not in inferring.result.keys, "makes no advantages")
        return inferring

    def test_a_higher_reward_raises_the_advantages_of_its_response(self, rating: CallTrial) -> None:
        """a higher reward never lowers the advantages of its own response, and on average raises
        them more than those of the others"""
        rises, *_ = _rises(rating)
        lowest = float(rises.diagonal().nan_to_num(0.0).min())
        if lowest < -TOLERANCE:
            raise Violation(
                f"a reward higher by 1 lowers the advantages of its response by {-lowest:.3g}",
                (
                    "look for a wrong sign, or a baseline that subtracts a response's own reward "
                    "more than once"
                ),
                rating.where,
            )
        _demand_own_rise(rating, rises, "the advantages")

    def test_a_reward_reaches_its_last_action(self, rating: CallTrial) -> None:
        """a higher reward raises the last advantage of its response more than those of others, with
        a discount also the first, and does not only count for responses that were cut off"""
        rises, rises_of_first, rises_of_last = _rises(rating)
        _demand_own_rise(rating, rises_of_last, "the last advantage")
        if _credits_what_follows(rating.interface):
            _demand_own_rise(rating, rises_of_first, "the first advantage")
        _demand_rise_of_ended(rating, rises.diagonal())

    def test_a_reward_of_a_token_counts_for_the_action_that_chose_it(
        self, rating: CallTrial
    ) -> None:
        """a higher number of `dense_rewards` at the last token of a response raises its last
        advantage"""
        batch = rating.batch
        skip_unless(rating.needs(DENSE_REWARDS), "makes no advantages from dense_rewards")
        sizes = torch.tensor([len(group) for group in batch.seqlens[DENSE_REWARDS]])
        firsts = sizes.cumsum(0) - sizes
        higher = tensor_of(batch, DENSE_REWARDS).clone()
        higher[last_rows(batch, DENSE_REWARDS)[firsts]] += LARGE
        raised = _of_responses(rating, with_tensor(batch, DENSE_REWARDS, higher))
        rise = float((raised - _of_responses(rating, batch))[-1][firsts].nanmean())
        if rise <= TOLERANCE:
            raise Violation(
                f"dense_rewards higher by {LARGE:g} at the last token of a response raise its last "
                f"advantage by {rise:.3g} on average",
                "action t chose token t + 1, whose number is in row t + 1 of dense_rewards",
                rating.where,
            )

    def test_shifting_the_rewards_of_a_group_changes_no_advantage(
        self, rating: CallTrial, inference_batches: Batches
    ) -> None:
        """where responses to a prompt are compared, a constant added to their rewards, equal ones
        or not, changes nothing; or else advantages average 0"""
        skip_without_rewards(rating)
        skip_unless_groups_are_compared(rating)
        batch = usual_batch(inference_batches, THREES)
        _demand_no_shift(rating, batch, rating.interface)
        for changes in _comparing(rating):
            interface = rating.make(**changes)
            if abs(_mean_of_groups(rating, batch, interface)) > TOLERANCE:
                _demand_no_shift(rating, batch, interface, f" with {described(changes)}")

    def test_the_order_within_a_group_changes_nothing(self, rating: CallTrial) -> None:
        """the order of the responses to a prompt changes nothing"""
        batch = rating.batch
        if REWARDS in batch.keys:
            rewards = tensor_of(batch, REWARDS)
            batch = with_tensor(batch, REWARDS, rewards + 0.01 * torch.arange(len(rewards)))
        check_same(
            rating.run(batch),
            with_groups_reversed(rating.run(with_groups_reversed(batch))),
            "when the responses to each prompt are in reverse order",
            "compare with the whole group, not with its first response or the one before",
            rating.where,
        )

    def test_nothing_comes_after_an_end(self, rating: CallTrial) -> None:
        """the value of its last state does not matter for a response that ended"""
        batch = rating.batch
        skip_unless(
            {VALUES, NOT_ENDED} <= batch.keys, "reads no values, or not which responses ended"
        )
        last = last_rows(batch, VALUES)
        values = tensor_of(batch, VALUES).clone()
        values[last[~tensor_of(batch, NOT_ENDED)]] += 1.0
        rating.demand_same(
            rating.run(with_tensor(batch, VALUES, values)),
            "with other values after the end of responses that ended",
            "bootstrap only where seq_no_eos_mask is True",
        )

    def test_returns_are_in_the_units_of_the_rewards(self, rating: CallTrial) -> None:
        """for rewards and values half as large, returns are half as large"""
        batch = rating.batch
        skip_if(
            VALUES not in batch.keys or RETURNS not in rating.result.keys,
            "reads no values, or makes no returns",
        )
        policies = [key for key in POLICIES if key in batch.keys]
        for key in policies:  # so that no penalty is paid
            batch = with_tensor(batch, key, tensor_of(batch, policies[0]))
        smaller = batch
        for key in {VALUES, REWARDS, DENSE_REWARDS} & batch.keys:
            smaller = with_tensor(smaller, key, tensor_of(batch, key) / 2)
        returns, halves = (tensor_of(rating.run(b), RETURNS) for b in (batch, smaller))
        largest = float((returns / 2 - halves).abs().max())
        if largest > TOLERANCE:
            raise Violation(
                f"returns for rewards and values half as large are off by up to {largest:.3g}",
                "compute returns before advantages are normalised: a critic learns them",
                rating.where,
            )

    def test_a_penalty_is_paid_once(self, rating: CallTrial) -> None:
        """where the loss takes the KL penalty, advantages do not depend on the reference"""
        batch = rating.batch
        skip_if(
            "kl_weights" not in rating.result.keys or REFERENCE not in batch.keys,
            "leaves no KL penalty to the loss",
        )
        moved = with_tensor(batch, REFERENCE, tensor_of(batch, REFERENCE) - 1.0)
        estimated = {ADVANTAGES, RETURNS} & rating.result.keys
        before, after = (output.select(estimated) for output in (rating.result, rating.run(moved)))
        check_same(
            before,
            after,
            "with another reference, though kl_weights leave the penalty to the loss",
            "subtract the KL from rewards, or write kl_weights, but not both",
            rating.where,
        )

    def test_a_penalty_does_not_fall_with_the_distance(self, rating: CallTrial) -> None:
        """the weight of a penalty in reward per nat is no lower after a step that was farther from
        the reference"""
        batch = rating.batch
        metrics = declared_metrics(type(rating.interface))
        names = [name for name, (unit, _) in metrics.items() if unit == "reward per nat"]
        skip_if(
            not names or REFERENCE not in batch.keys,
            "reports no weight of a penalty, or reads no reference",
        )
        policy = tensor_of(batch, POLICIES[0])
        near, far = (_sum_of_weights_after(rating, batch, policy - by, names) for by in (0.0, 3.0))
        if far < near:
            raise Violation(
                f"the sum of {' and '.join(names)} is {near:.6g} after a step at no distance from "
                f"the reference, and {far:.6g} after one at 3 nats per token",
                "raise the weight while the distance is above its target",
                rating.where,
            )


def _sum_of_weights_after(
    rating: CallTrial, batch: SequenceSample, reference: torch.Tensor, names: list[str]
) -> float:
    """Over all samples, the weights of penalties in the second of two steps with this reference."""
    interface, moved = rating.make(), with_tensor(batch, REFERENCE, reference)
    rating.run(moved, interface=interface)
    sums = reported_sums(rating.run(moved, interface=interface))
    return sum(total for name in names for total, _ in sums.get(name, {}).values())


def _credits_what_follows(interface: ModelInterface) -> bool:
    """Whether arguments say how much rewards count for actions long before them, and they do."""
    factors = {
        argument.name: argument.default
        for argument in arguments_of(interface)
        if FACTOR.search(argument.name) and isinstance(argument.default, int | float)
    }
    return bool(factors) and all(factors.values())


def skip_without_rewards(rating: CallTrial) -> None:
    """Skip the check unless rewards are read with these arguments."""
    skip_unless(rating.needs(REWARDS), "makes no advantages from rewards")


def skip_unless_groups_are_compared(rating: CallTrial) -> None:
    """Skip the check unless it declares that it compares responses to a prompt."""
    skip_if(
        group_size(rating.interface, rating.call) < 2,
        "does not declare that it compares responses to a prompt (NEEDS_GROUP)",
    )


def _comparing(rating: CallTrial) -> list[Changes]:
    """For each value of an argument that NEEDS_GROUP names, the argument with this value: it
    compares responses, whatever others do."""
    declared = [
        vars(cls).get("NEEDS_GROUP", {}) for cls in reversed(type(rating.interface).__mro__)
    ]
    entries = inherited(declared).get(rating.call, ())
    conditions = [str(entry).partition(" if ")[2].partition("=") for entry in entries]
    return [{name: value or True} for name, _, value in conditions if name]


def _demand_no_shift(
    rating: CallTrial, batch: SequenceSample, interface: ModelInterface, settings: str = ""
) -> None:
    """Raise Violation if a constant added to the rewards of each group, or the last bit of a
    reward, changes an advantage."""
    for before, after, change, most in _without_a_difference(batch):
        rates = [
            _of_responses(rating, with_tensor(batch, REWARDS, numbers), interface)[0]
            for numbers in (before, after)
        ]
        largest = float((rates[1] - rates[0]).abs().nan_to_num().max())
        if largest > most:
            raise Violation(
                f"rewards {change} change an advantage by {largest:.3g}{settings}",
                "subtract a mean of the responses to the prompt; rounding is not a spread",
                rating.where,
            )


def _without_a_difference(
    batch: SequenceSample,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, str, float]]:
    """Rewards, others that differ from them in no way that counts within a group, the difference in
    words, and the most that it may change an advantage by."""
    rewards = batch.data[REWARDS]
    number = torch.arange(len(rewards))
    shifts = 0.7 * (torch.repeat_interleave(number[: batch.bs], len(rewards) // batch.bs) % 3 - 1.0)
    tens = torch.full_like(rewards, 10.0)
    last_bits = torch.where(number % 3 == 0, tens.nextafter(2 * tens), tens)
    yield rewards, rewards + shifts, "of a group that are all higher by 0.7", TOLERANCE
    yield 0 * rewards, shifts, "of a group that are all 0.7 instead of 0", TOLERANCE
    yield tens, last_bits, "of 10 that differ in the last bit", NOTHING


def _mean_of_groups(rating: CallTrial, batch: SequenceSample, interface: ModelInterface) -> float:
    """The largest mean, of either sign, of the advantages of the responses to a prompt."""
    means = _of_responses(rating, batch, interface)[0].view(batch.bs, -1).nanmean(1)
    return float(means.abs().nan_to_num().max())


def _demand_own_rise(rating: CallTrial, rises: torch.Tensor, raised: str) -> None:
    """`rises` [N, N]: by how much a reward of response i higher by 1 raises `raised`, a number of
    response j."""
    rise, others = rises.diagonal(), rises[~torch.eye(len(rises), dtype=torch.bool)]
    mean_rise, mean_of_others = float(rise.nanmean()), float(others.nanmean())
    if mean_rise <= max(0.0, mean_of_others) + TOLERANCE:
        raise Violation(
            (
                f"rewards higher by 1 raise {raised} of their response by "
                f"{mean_rise:.3g} on average, and those of others by {mean_of_others:.3g}"
            ),
            (
                "look for a baseline that is subtracted twice, or for rows of another "
                "response: they are paired by position"
            ),
            rating.where,
        )


def _demand_rise_of_ended(rating: CallTrial, rise: torch.Tensor) -> None:
    """`rise` [N]: by how much a reward higher by 1 raises the advantages of its response."""
    if NOT_ENDED not in rating.batch.keys:
        return
    cut_off = tensor_of(rating.batch, NOT_ENDED)
    of_ended, of_cut_off = float(rise[~cut_off].nanmean()), float(rise[cut_off].nanmean())
    if of_ended <= TOLERANCE < of_cut_off:
        raise Violation(
            (
                "rewards higher by 1 raise the advantages of responses that ended by "
                f"{of_ended:.3g} on average, and of those that were cut off by {of_cut_off:.3g}"
            ),
            "seq_no_eos_mask is True for responses that were cut off",
            rating.where,
        )


def _rises(rating: CallTrial) -> torch.Tensor:
    """[3, N, N]: by how much a higher reward of response i raises the mean, the first and the last
    of the advantages of response j. Skips the check without rewards, or anything to train on."""
    skip_without_rewards(rating)
    batch = rating.batch
    before, rewards = _of_responses(rating, batch), tensor_of(batch, REWARDS).float()
    raised = [with_tensor(batch, REWARDS, rewards + higher) for higher in torch.eye(len(rewards))]
    rises = torch.stack([_of_responses(rating, other) - before for other in raised], dim=1)
    skip_if(rises.isnan().all(), "not tried: none of its responses is trained on")
    return rises


def rated_actions(
    batch: SequenceSample, output: SequenceSample
) -> tuple[SequenceSample, Sequence[torch.Tensor]]:
    """The batch with advantages, and which of each response's actions are trained on."""
    rated = batch.select(batch.keys)
    rated.update_(output)
    trained = trained_actions(rated)
    assert trained is not None
    return rated, trained.split(rated.flat_seqlens(ADVANTAGES))


def _of_responses(
    rating: CallTrial, batch: SequenceSample, interface: ModelInterface | None = None
) -> torch.Tensor:
    """[3, N] the mean, the first of several and the last advantage of each response's actions that
    are trained on; NaN without any."""
    rated, masks = rated_actions(batch, rating.run(batch, interface=interface))
    nothing = torch.full((1,), torch.nan)
    numbers = [
        torch.cat([nothing, advantages[mask]])[-max(1, int(mask.sum())) :]
        for advantages, mask in zip(sequences(rated, ADVANTAGES), masks, strict=True)
    ]
    firsts = [row[0] if len(row) > 1 else nothing[0] for row in numbers]
    columns = zip(numbers, firsts, strict=True)
    return torch.stack([torch.stack([row.mean(), first, row[-1]]) for row, first in columns], dim=1)
