"""Checks that a step is the same however its batch is cut, ordered and distributed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from rlcli.api.config import MicroBatchSpec
from rlcli.api.interface import cut_of
from rlcli.api.model import call_interface
from rlcli.testing.contract import Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import padded, trained_actions
from rlcli.testing.interface.loss import cause_unless_no_sum
from rlcli.testing.interface.training_trial import (
    InterfaceSubject,
    Make,
    Rehearsal,
    StepDifference,
    TrainingOutcome,
    difference,
    is_close,
    overrides,
    place_of_call,
    place_of_number,
)

_SPANS = (
    "something is computed over a part of the batch (a mean, a count, a normalisation); compute it "
    "over the whole, before train_batch, and return sums from the loss; or rows of one sequence "
    "are taken for its neighbour's: split by flat_seqlens"
)


BY_POSITION = (
    "rows are paired by position rather than by sample, or minibatches by position rather than by "
    'metadata["batch_index"]'
)
PADDING = "padding is counted or trained on: use the mask for the loss and for its weight"
_BY_THEIR_ENDS = ("rewards", "dense_rewards", "values", "seq_no_eos_mask", "solved")
"""Keys that concern the last state of a sequence: a reward given there, or a value to continue
from; unless the returns that follow from them are in the batch."""


class InvarianceChecks(InterfaceSubject):
    def test_micro_batches_change_nothing(self, rehearsal: Rehearsal) -> None:
        """the same for any number of micro-batches, also with one for each sample"""
        batch = rehearsal.batch
        longest = max(sum(lengths) for lengths in batch.seqlens["packed_input_ids"])
        uncut = rehearsal.result
        for spec in (
            MicroBatchSpec(n_mbs=2),
            MicroBatchSpec(n_mbs=3),
            MicroBatchSpec(n_mbs=batch.bs),
            MicroBatchSpec(max_tokens_per_mb=longest),
        ):
            cut = rehearsal.train(batch, spec=spec)
            n_mbs = cut.engine.micro_batches / max(1, uncut.engine.micro_batches)

            def cause(mismatch: StepDifference, n_mbs: float = n_mbs) -> str:
                return _cause_of_cut(mismatch, n_mbs) or cause_unless_no_sum(uncut, _SPANS)

            how = "in one micro-batch", f"in {n_mbs:.3g} of them"
            _demand_same(rehearsal, uncut, cut, how, cause)

    def test_groups_may_be_cut_where_it_says_so(self, rehearsal: Rehearsal) -> None:
        """groups that may be cut give the same result whole and cut"""
        cuts = {call.cut for call in rehearsal.result.engine.calls}
        declared = cut_of(rehearsal.make().CUT, "train_step")
        if cuts and cuts != {declared}:
            raise Violation(
                (
                    f"CUT is {declared!r}, and train_batch is called with "
                    f"cut={' and '.join(sorted(map(repr, cuts)))}"
                ),
                "pass cut=self.CUT: the memory that rlcli plan reports depends on it",
                rehearsal.where,
            )
        skip_if(declared == "sample", "keeps groups whole")
        batch, model = rehearsal.batch, rehearsal.model()
        model.module.keeps_groups = True
        uncut = rehearsal.train(batch, model=model)
        apart = rehearsal.train(
            batch, spec=MicroBatchSpec(n_mbs=len(batch.flat_seqlens("packed_input_ids")))
        )
        compares = (
            "the loss compares sequences of a group; do that before train_batch, or leave out CUT "
            "and cut"
        )
        how = "with whole groups", "with each sequence in a micro-batch of its own"
        _demand_same(rehearsal, uncut, apart, how, lambda _: cause_unless_no_sum(uncut, compares))

    def test_order_changes_nothing(self, rehearsal: Rehearsal) -> None:
        """the same for any order of the batch"""
        batch = rehearsal.batch
        for order in (
            list(reversed(range(batch.bs))),
            [*range(1, batch.bs, 2), *range(0, batch.bs, 2)],
        ):
            _demand_same(
                rehearsal,
                rehearsal.result,
                rehearsal.train(batch.reorder(order)),
                ("in one order", "in another"),
                lambda _: BY_POSITION,
            )

    def test_padding_changes_nothing(self, rehearsal: Rehearsal) -> None:
        """masked padding behind the sequences changes nothing"""
        batch = rehearsal.batch
        if trained_actions(batch) is None:
            pytest.skip("reads no prompt_mask")
        by_ends = [key for key in _BY_THEIR_ENDS if key in batch.keys]
        if by_ends and "returns" not in batch.keys:
            pytest.skip(f"reads {by_ends[0]}, which depends on where a sequence ends")
        outcome = rehearsal.train(padded(batch))
        how = "without", "with masked padding behind the sequences"
        _demand_same(rehearsal, rehearsal.result, outcome, how, lambda _: PADDING)

    def test_ranks_change_nothing(self, rehearsal: Rehearsal) -> None:
        """the same on one rank and on several, one of them idle"""
        batch = rehearsal.batch
        alone, even = rehearsal.result, list(range(0, batch.bs, 2))
        odd = [i for i in range(batch.bs) if i not in even]
        for shares in ([[0, *odd], even[1:]], [list(range(batch.bs)), []]):
            for outcome in rehearsal.train_on_ranks(batch, shares):
                _demand_same(
                    rehearsal,
                    alone,
                    outcome,
                    (
                        "on one rank",
                        f"on {len(shares)} that have {' and '.join(map(_samples, shares))}",
                    ),
                    lambda mismatch: cause_unless_no_sum(alone, _cause_of_ranks(mismatch)),
                )

    def test_evaluation_weighs_batches_by_their_tokens(
        self, make: Make, rehearsal: Rehearsal
    ) -> None:
        """evaluation is the same for any cut, and trains nothing"""
        skip_unless(overrides(make(), "evaluate"), "does not evaluate")
        batch, model = rehearsal.batch, rehearsal.model()
        before = parameters_to_vector(model.module.model.parameters())
        where = place_of_call(make(), "evaluate")
        first, rest = batch.select_indices([0]), batch.select_indices(range(1, batch.bs))
        in_one, cut = (
            call_interface(make(), "evaluate", model, parts) for parts in ([batch], [first, rest])
        )
        for name, value in in_one.items():
            if not is_close(cut[name], value):
                raise Violation(
                    f"{name} is {value:.6g} over one batch, {cut[name]:.6g} over the same in two",
                    cause_unless_no_sum(
                        rehearsal.result, "weigh each batch's numbers by its tokens"
                    ),
                    where,
                )
        after = parameters_to_vector(model.module.model.parameters())
        if not torch.equal(before, after) or model.version.global_step:
            raise Violation(
                "evaluate changed the model or its version",
                "use eval_batch, not train_batch",
                where,
            )


def _demand_same(
    rehearsal: Rehearsal,
    first: TrainingOutcome,
    second: TrainingOutcome,
    how: tuple[str, str],
    cause: Callable[[StepDifference], str],
) -> None:
    """Raise Violation, for the source of the number, if two outcomes differ."""
    if mismatch := difference(first, second):
        location = place_of_number(rehearsal, mismatch.name, rehearsal.result, second)
        raise Violation(mismatch.describe(*how), cause(mismatch), location)


def _cause_of_cut(mismatch: StepDifference, n_mbs: float) -> str:
    ratio = mismatch.second / mismatch.first if mismatch.first else 0.0
    if mismatch.name == "loss" and abs(ratio - n_mbs) < 0.35 * n_mbs:
        return "the loss is a mean of the micro-batch; return a sum, the engine divides"
    return ""


def _cause_of_ranks(mismatch: StepDifference) -> str:
    reduced = (
        "masked_normalize and masked_moments take all_reduce; "
        "use model.all_reduce(sum) for the rest"
    )
    if mismatch.kind == "state":
        return f"the state follows one rank's share of the batch: {reduced}"
    return (
        "something is computed over one rank's share of the batch (a mean, a count, a "
        f"normalisation): {reduced}"
    )


def _samples(share: list[int]) -> str:
    return f"{len(share)} samples"
