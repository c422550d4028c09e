"""Checks that a step is the same however its batch is cut, ordered and spread."""

from __future__ import annotations

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.interface.loss import cause_unless_no_sum
from rlcli.testing.interface.rehearsal import Difference, InterfaceSubject, Make, Rehearsal, difference, overrides

_SPANS = (
    "something is computed over a part of the batch (a mean, a count, a normalisation); compute it over the whole, "
    "before train_batch, and return sums from the loss"
)


class InvarianceChecks(InterfaceSubject):
    def test_micro_batches_change_nothing(self, rehearsal: Rehearsal) -> None:
        """the same for any number of micro-batches"""
        batch = rehearsal.batch
        longest = max(sum(lengths) for lengths in batch.seqlens["packed_input_ids"])
        whole = rehearsal.result
        for spec in (MicroBatchSpec(n_mbs=2), MicroBatchSpec(n_mbs=3), MicroBatchSpec(max_tokens_per_mb=longest)):
            cut = rehearsal.train(batch, spec=spec)
            found = difference(whole, cut)
            if found:
                n_mbs = cut.engine.micro_batches / max(1, whole.engine.micro_batches)
                raise Violation(
                    found.told("in one micro-batch", f"in {n_mbs:.3g} of them"),
                    _cause_of_cut(found, n_mbs) or cause_unless_no_sum(whole, _SPANS),
                    place_of(rehearsal.train_step),
                )

    def test_packing_changes_nothing(self, rehearsal: Rehearsal) -> None:
        """samples packed together count as each of them alone"""
        batch = rehearsal.batch
        found = difference(rehearsal.result, rehearsal.train(batch, spec=MicroBatchSpec(n_mbs=batch.bs)))
        if found:
            raise Violation(
                found.told("packed", "with each sample in a micro-batch of its own"),
                cause_unless_no_sum(
                    rehearsal.result, "rows of one sequence are mistaken for its neighbour's; split by flat_seqlens"
                ),
                place_of(rehearsal.train_step),
            )

    def test_order_changes_nothing(self, rehearsal: Rehearsal) -> None:
        """the same for any order of the batch"""
        batch = rehearsal.batch
        for order in (list(reversed(range(batch.bs))), [*range(1, batch.bs, 2), *range(0, batch.bs, 2)]):
            found = difference(rehearsal.result, rehearsal.train(batch.reorder(order)))
            if found:
                raise Violation(
                    found.told("in one order", "in another"),
                    "rows are paired by place rather than by sample, or minibatches by place rather than by "
                    'metadata["batch_index"]',
                    place_of(rehearsal.train_step),
                )

    def test_padding_changes_nothing(self, rehearsal: Rehearsal) -> None:
        """masked padding behind the sequences changes nothing"""
        batch = rehearsal.batch
        declared = rehearsal.make().reads("train_step")
        if declared is None or set(declared.all) != {"packed_input_ids", "prompt_mask"}:
            pytest.skip("reads more than tokens and their mask")
        found = difference(rehearsal.result, rehearsal.train(_padded(batch)))
        if found:
            raise Violation(
                found.told("without", "with masked padding behind the sequences"),
                "padding is counted or trained on: use the mask for the loss and for its weight",
                place_of(rehearsal.train_step),
            )

    def test_memory_layout_changes_nothing(self, rehearsal: Rehearsal) -> None:
        """tensors that are views of larger ones are read right"""
        batch = rehearsal.batch
        found = difference(rehearsal.result, rehearsal.train(_as_views(batch)), tolerance=0.0)
        if found:
            raise Violation(
                found.told("from tensors of their own", "from views"),
                "read tensors by torch's operations, not by their storage",
                place_of(rehearsal.train_step),
            )

    def test_ranks_change_nothing(self, rehearsal: Rehearsal) -> None:
        """the same on one rank and on several, one of them idle"""
        batch = rehearsal.batch
        alone, even = rehearsal.result, list(range(0, batch.bs, 2))
        odd = [i for i in range(batch.bs) if i not in even]
        for shares in ([[0, *odd], even[1:]], [list(range(batch.bs)), []]):
            for outcome in rehearsal.train_on_ranks(batch, shares):
                found = difference(alone, outcome)
                if found:
                    raise Violation(
                        found.told("on one rank", f"on {len(shares)} that have {' and '.join(map(_samples, shares))}"),
                        cause_unless_no_sum(alone, _cause_of_ranks(found)),
                        place_of(rehearsal.train_step),
                    )

    def test_evaluation_weighs_batches_by_their_tokens(self, make: Make, rehearsal: Rehearsal) -> None:
        """evaluation is the same for any cut, and trains nothing"""
        if not overrides(make(), "evaluate"):
            pytest.skip("does not evaluate")
        batch, model = rehearsal.batch, rehearsal.model()
        before = {name: parameter.clone() for name, parameter in model.module.model.named_parameters()}
        where = place_of(type(make()).evaluate)
        first, rest = batch.select_indices([0]), batch.select_indices(range(1, batch.bs))
        whole, cut = make().evaluate(model, [batch]), make().evaluate(model, [first, rest])
        for name, value in whole.items():
            if not abs(cut[name] - value) <= 1e-6 * max(1.0, abs(value)):
                raise Violation(
                    f"{name} is {value:.6g} over one batch, {cut[name]:.6g} over the same in two",
                    cause_unless_no_sum(rehearsal.result, "weigh each batch's numbers by its tokens"),
                    where,
                )
        trained = any(not torch.equal(before[n], p) for n, p in model.module.model.named_parameters())
        if trained or model.version.global_step:
            raise Violation("evaluate changed the model or its version", "use eval_batch, not train_batch", where)


def _cause_of_cut(found: Difference, n_mbs: float) -> str:
    ratio = found.other / found.one if found.one else 0.0
    if found.name == "loss" and abs(ratio - n_mbs) < 0.35 * n_mbs:
        return "the loss is a mean of the micro-batch; return a sum, the engine divides"
    return ""


def _cause_of_ranks(found: Difference) -> str:
    reduced = "masked_normalize and masked_moments take all_reduce; model.module.all_reduce(sum) does for the rest"
    if found.kind == "state":
        return f"the state follows one rank's share of the batch: {reduced}"
    return f"something is computed over one rank's share of the batch (a mean, a count, a normalisation): {reduced}"


def _samples(share: list[int]) -> str:
    return f"{len(share)} samples"


def _padded(batch: SequenceSample, padding: int = 3) -> SequenceSample:
    """Each sequence with some tokens more, which the mask leaves out."""
    assert batch.data is not None
    lengths = batch.flat_seqlens("packed_input_ids")
    tokens, mask = batch.data["packed_input_ids"], batch.data["prompt_mask"]
    assert tokens is not None
    assert mask is not None
    return SequenceSample.from_default(
        ids=batch.ids,
        seqlens=[[length + padding for length in group] for group in batch.seqlens["packed_input_ids"]],
        data={
            "packed_input_ids": torch.cat([torch.cat([t, t.new_zeros(padding)]) for t in tokens.split(lengths)]),
            "prompt_mask": torch.cat([torch.cat([m, m.new_ones(padding)]) for m in mask.split(lengths)]),
        },
        metadata=batch.metadata,
    )


def _as_views(batch: SequenceSample) -> SequenceSample:
    """The same numbers, each tensor every other row of a larger one."""
    other = batch.select(batch.keys)
    assert other.data is not None
    for key, tensor in other.data.items():
        assert tensor is not None
        wide = torch.stack([tensor, torch.ones_like(tensor)], 1).flatten(0, 1)
        other.data[key] = wide[::2]
    return other
