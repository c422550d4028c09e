"""The work that large batches take grows with their size, not with its square."""

import sys

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.micro_batches import split_batch

SHORT, LONG, CAP = 1, 60, 100


def batch_of(lengths):
    return SequenceSample.from_default(
        ids=list(range(len(lengths))),
        seqlens=[[length] for length in lengths],
        data={"packed_input_ids": torch.arange(sum(lengths))},
    )


def calls_of(function):
    """How many functions are called meanwhile."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "lengths",
    [[LONG // 3] * 400, [LONG, SHORT] * 200],
    ids=["all are equal", "no two long ones share a micro-batch"],
)
def test_splitting_four_times_the_samples_takes_four_times_the_work(lengths):
    small, large = batch_of(lengths), batch_of(lengths * 4)
    spec = MicroBatchSpec(max_tokens_per_mb=CAP)
    assert calls_of(lambda: split_batch(large, spec)) < 5 * calls_of(
        lambda: split_batch(small, spec)
    )
