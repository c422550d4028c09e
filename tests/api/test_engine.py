"""The batch logic that all engines share: how a batch is cut,
and which results every rank receives."""

import threading

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.engine import TrainEngine
from rlcli.api.loss_stats import read_loss, reduce_stats
from rlcli.api.micro_batches import one_per_sequence, split_batch
from rlcli.errors import DataError
from rlcli.testing.batches import make_batch
from rlcli.testing.tiny_engine import TinyEngine, TinyLM, TinyRanks

GROUPS = [[(2, 3), (2, 5), (2, 1)], [(3, 4), (3, 2)], [(1, 6)]]
"""(prompt, response) of each sequence of each of three samples, in tokens."""


def grouped_batch():
    return make_batch(("packed_input_ids", "prompt_mask"), GROUPS, 0, vocabulary=11, end=2)


def loss(output, sample):
    mask = ~sample.data["prompt_mask"]
    rows = torch.cat([part[1:] for part in mask.split(sample.flat_seqlens("prompt_mask"))])
    return -(output.logprobs * rows).sum(), {
        "entropy": (output.entropy.sum(), torch.tensor(len(rows)))
    }


def weight(sample):
    return (~sample.data["prompt_mask"]).sum()


@pytest.mark.parametrize(
    "spec", [MicroBatchSpec(), MicroBatchSpec(n_mbs=4), MicroBatchSpec(max_tokens_per_mb=8)]
)
def test_cutting_groups_into_micro_batches_keeps_stats_and_gradients(spec):
    uncut, cut = TinyEngine(TinyLM()), TinyEngine(TinyLM())
    expected = uncut.train_batch(grouped_batch(), loss, weight)
    stats = cut.train_batch(grouped_batch(), loss, weight, mb_spec=spec, cut="sequence")
    assert stats == pytest.approx(expected, rel=1e-12)
    assert cut.micro_batches >= min(spec.n_mbs, 6)
    for name, gradient in uncut.gradient.items():
        torch.testing.assert_close(cut.gradient[name], gradient, rtol=1e-12, atol=1e-14)


def test_a_sample_above_the_cap_fits_when_cut_by_sequence():
    # the first sample has 15 tokens, no sequence has more than 7
    spec = MicroBatchSpec(max_tokens_per_mb=8)
    with pytest.raises(DataError, match="15 tokens"):
        split_batch(grouped_batch(), spec)
    cut = split_batch(grouped_batch(), spec, "sequence")
    assert max(sum(one.sample.flat_seqlens("packed_input_ids")) for one in cut) <= 8


def distinct_tokens(group):
    """As an engine counts that computes the prompt of a group once."""
    lengths = tuple(group.flat_seqlens("packed_input_ids"))
    return {(5, 7, 3): 11, (7, 3): 8, (7, 5): 9}.get(lengths, sum(lengths))


@pytest.mark.parametrize(
    ("cap", "places"),
    [
        (11, [(0, 1, 2), (3, 4), (5,)]),  # 11, 9 and 7 tokens
        (9, [(0,), (1, 2), (3, 4), (5,)]),  # 5, 8, 9 and 7
        (16, [(0, 1, 2), (3, 4, 5)]),
    ],
)
def test_sequences_that_share_tokens_stay_together_as_far_as_the_cap_allows(cap, places):
    spec = MicroBatchSpec(max_tokens_per_mb=cap)
    cut = split_batch(grouped_batch(), spec, "sequence", distinct_tokens)
    assert [one.places for one in cut] == places
    sequences = ["s0/0", "s0/1", "s0/2", "s1/0", "s1/1", "s2/0"]
    for micro_batch in cut:
        assert micro_batch.sample.ids == [sequences[place] for place in micro_batch.places]


def test_a_sample_is_cut_by_the_tokens_that_it_counts():
    spec = MicroBatchSpec(max_tokens_per_mb=11)
    cut = split_batch(grouped_batch(), spec, "sample", distinct_tokens)
    assert [one.places for one in cut] == [(0,), (1,), (2,)]
    with pytest.raises(DataError, match="11 tokens"):
        split_batch(
            grouped_batch(), MicroBatchSpec(max_tokens_per_mb=10), "sample", distinct_tokens
        )


def test_groups_are_parted_where_more_micro_batches_are_asked_for():
    spec = MicroBatchSpec(n_mbs=5)
    assert len(split_batch(grouped_batch(), spec, "sequence", distinct_tokens)) == 5


def test_outputs_of_a_cut_batch_are_in_the_original_order():
    engine = TinyEngine(TinyLM())
    rows = [
        [length - 1 for length in group] for group in grouped_batch().seqlens["packed_input_ids"]
    ]
    expected = engine.forward(grouped_batch(), None, lambda output, _: output.logprobs, rows)
    spec = MicroBatchSpec(n_mbs=4)
    outputs = engine.forward(
        grouped_batch(), spec, lambda output, _: output.logprobs, rows, cut="sequence"
    )
    torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=0)


def test_keys_with_one_entry_per_group_cannot_be_cut():
    batch = grouped_batch()
    batch.update_(
        SequenceSample(
            ids=list(batch.ids),
            seqlens={"baseline": [[1], [1], [1]]},
            data={"baseline": torch.zeros(3)},
        )
    )
    with pytest.raises(ValueError, match="baseline does not have one entry for each sequence"):
        one_per_sequence(batch)


def test_an_unknown_cut_is_refused():
    with pytest.raises(ValueError, match=r"'group'.*'sample' or 'sequence'"):
        split_batch(grouped_batch(), None, "group")


class PipelineStage(TinyEngine):
    """Stage 0 of 2 learns everything from stage 1: it runs no loss and makes no rows."""

    def __init__(self, stage, wire):
        super().__init__(TinyLM())
        self.stage, self.wire = stage, wire
        self.losses = 0

    @property
    def is_last_stage(self):
        return self.stage == 1

    def from_last_stage(self, value):
        if self.is_last_stage:
            self.wire["value"] = value
        self.wire["barrier"].wait()
        received = self.wire["value"]
        self.wire["barrier"].wait()
        return received

    def forward_batch(self, micro_batches, hook):
        return super().forward_batch(micro_batches, hook) if self.is_last_stage else []

    def forward_backward_batch(self, micro_batches, loss_fn, divisor):
        sums = super().forward_backward_batch(micro_batches, loss_fn, divisor)
        return sums if self.is_last_stage else []


def test_every_pipeline_stage_receives_the_results_of_the_last():
    wire = {"barrier": threading.Barrier(2, timeout=20)}

    def run_stage(stage):
        engine = PipelineStage(stage, wire)
        rows = [
            [length - 1 for length in group]
            for group in grouped_batch().seqlens["packed_input_ids"]
        ]
        scores = engine.forward(
            grouped_batch(), MicroBatchSpec(n_mbs=2), lambda output, _: output.logprobs, rows
        )
        seen = []
        stats = engine.train_batch(
            grouped_batch(), loss, weight, step_if=lambda stats: not seen.append(dict(stats))
        )
        return scores, engine.eval_batch(grouped_batch(), loss, weight), stats, seen

    first, last = TinyRanks(2).run(run_stage)
    assert torch.equal(first[0], last[0])
    assert first[1:] == last[1:]
    assert first[2]["entropy"] > 0


def test_ranks_without_micro_batches_receive_the_stats_of_others():
    ranks = TinyRanks(2)

    def run_rank(rank):
        stats = (
            [read_loss((torch.tensor(3.0), {"kl": (torch.tensor(4.0), torch.tensor(2.0))}))[1]]
            if rank
            else []
        )
        return reduce_stats(
            stats, torch.tensor(6.0 * rank), lambda value, op: ranks.all_reduce(rank, value, op)
        )

    assert ranks.run(run_rank) == [{"kl": 2.0, "loss": 0.5}] * 2


def test_too_many_or_too_long_names_of_stats_are_refused():
    for stats in (
        {f"stat {number}": torch.tensor(1.0) for number in range(64)},
        {"x" * 65: torch.tensor(1.0)},
    ):
        with pytest.raises(ValueError, match="63 stats with names of 64 bytes"):
            reduce_stats([stats], torch.tensor(1.0), lambda value, op: value)


def test_an_engine_without_the_abstract_methods_cannot_be_built():
    with pytest.raises(TypeError, match="forward_backward_batch"):
        type("Half", (TrainEngine,), {})()
