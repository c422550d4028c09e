"""Stats of losses: summed and divided, with one wait for the device."""

import pytest
import torch
from pretend_cuda import needs_pretend_device, pretend_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.loss_stats import on_host, reduce_stats
from rlcli.api.micro_batches import split_batch


class Transfers(TorchDispatchMode):
    """Counts the copies from the device to the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            self.count += any(tensor.device.type != "cpu" for tensor in tensors)
        return result


def alone(value, op):
    return value


def test_stats_are_sums_divided_by_their_own_counts_or_the_weight_of_the_loss():
    collected = [
        {"loss": torch.tensor(2.0), "entropy": (torch.tensor(3.0), 4)},
        {"loss": 1.5, "entropy": (torch.tensor([1.0], requires_grad=True), torch.tensor(4))},
    ]
    assert reduce_stats(collected, torch.tensor(7.0), alone) == {"loss": 0.5, "entropy": 0.5}
    assert reduce_stats([], torch.tensor(0.0), alone) == {}


def with_another_rank(tables):
    """The reduction of two ranks, of which the other one has this table for each operation."""

    def reduce(value, op):
        return torch.maximum(value, tables["max"]) if op == "max" else value + tables["sum"]

    return reduce


def tables_of(collected, weight):
    """What a rank hands to each reduction."""
    tables = {}

    def keep(value, op):
        tables[op] = value.clone()
        return value

    reduce_stats(collected, weight, keep)
    return tables


def test_a_mean_over_nothing_counts_where_another_rank_has_something():
    weight = torch.tensor(1.0)
    tables = tables_of([{"gap": (0.0, 0), "drift": (6.0, 3)}], weight)
    stats = reduce_stats([{"gap": (1.0, 2), "drift": (0.0, 0)}], weight, with_another_rank(tables))
    assert stats == {"gap": 0.5, "drift": 2.0}


def test_a_mean_over_nothing_on_all_ranks_is_left_out():
    stats = reduce_stats([{"loss": 1.0, "gap": (0.0, 0)}], torch.tensor(2.0), alone)
    assert stats == {"loss": 0.5}


def test_ranks_that_report_different_stats_are_refused():
    weight = torch.tensor(1.0)
    tables = tables_of([{"drift": (6.0, 3)}], weight)
    with pytest.raises(ValueError, match="the ranks report different stats"):
        reduce_stats([{"gap": (1.0, 2)}], weight, with_another_rank(tables))


def test_numbers_on_the_host_keep_their_order_and_lose_nothing():
    numbers = on_host([1, torch.tensor(2**40 + 1), torch.tensor(0.1)])
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [1.0, 2.0**40 + 1, torch.tensor(0.1).double().item()]
    assert on_host([]).shape == (0,)


@needs_pretend_device
@pytest.mark.parametrize("micro_batches", [1, 5])
def test_the_stats_of_an_update_wait_for_the_device_once(micro_batches):
    with pretend_cuda() as device:
        number = torch.ones((), device=device)
        collected = [
            {"loss": number, "kl": (number * 3, number), "entropy": number}
        ] * micro_batches
        with Transfers() as transfers:
            stats = reduce_stats(collected, torch.tensor(float(micro_batches)), alone)
    assert transfers.count == 1
    assert stats == {"loss": 1.0, "kl": 3.0, "entropy": 1.0}


@needs_pretend_device
def test_the_tokens_of_groups_are_copied_to_the_host_at_once():
    with pretend_cuda() as device:
        batch = SequenceSample(
            ids=list("abc"),
            seqlens={"packed_input_ids": [[3, 3]] * 3},
            data={"packed_input_ids": torch.arange(18, device=device)},
        )
        with Transfers() as transfers:
            parts = split_batch(
                batch, MicroBatchSpec(max_tokens_per_mb=6), "sequence",
                lambda group: group.data["packed_input_ids"].cpu().unique().numel(),
            )  # fmt: skip
    assert transfers.count == 1
    assert len(parts) == 3
