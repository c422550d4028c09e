"""Cutting a batch into micro-batches, the inputs of single forward passes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import SEQUENCES
from rlcli.api.partition import flat2d

Cut = Literal["sample", "sequence"]
"""What stays in one micro-batch: a sample with its whole group of sequences,
or a single sequence."""
Unit = tuple[tuple[int, ...], int]
"""Samples that stay together (or sequences, if groups are cut), and the tokens that they count."""


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass."""

    sample: SequenceSample
    places: tuple[int, ...]
    """Where its samples (or sequences, if groups are cut) are in the whole batch;
    empty for an idle micro-batch."""

    @property
    def is_idle(self) -> bool:
        """Whether it is a placeholder, one token without weight, for a rank with fewer
        micro-batches. No loss function or hook gets it."""
        return not self.places


def split_batch(
    batch: SequenceSample,
    spec: MicroBatchSpec | None = None,
    cut: Cut = "sample",
    tokens_of: Callable[[SequenceSample], int] | None = None,
) -> list[MicroBatch]:
    """Micro-batches under the token cap of `spec`; none for a batch without samples.

    `tokens_of` counts the tokens of a group; default: those of its sequences. If groups are cut, a
    group that counts fewer stays together as far as the cap allows.

    Raises ValueError for an unknown `cut`, and if sequences cannot be separated.
    """
    if cut not in ("sample", "sequence"):
        raise ValueError(f"cut is {cut!r}; it must be 'sample' or 'sequence'")
    samples = one_per_sequence(batch) if cut == "sequence" else batch
    if not samples.bs:
        return []
    spec = spec or MicroBatchSpec()
    feasible = MicroBatchSpec(
        n_mbs=min(spec.n_mbs, samples.bs), max_tokens_per_mb=spec.max_tokens_per_mb
    )
    units = _units(batch, feasible, cut, tokens_of) if tokens_of is not None else None
    parts, places = samples.split_to_micro_batches(feasible, key=SEQUENCES, units=units)
    return [MicroBatch(sample, tuple(where)) for sample, where in zip(parts, places, strict=True)]


def _units(
    batch: SequenceSample,
    spec: MicroBatchSpec,
    cut: Cut,
    tokens_of: Callable[[SequenceSample], int],
) -> list[Unit] | None:
    """None: every sample, or sequence, is a unit of its own, and counts its tokens."""
    if spec.n_mbs == 1 and _fits(sum(batch.flat_seqlens(SEQUENCES)), spec):
        return None  # all are in one micro-batch
    # prefixes are searched on the host: one copy, not one for each group
    groups = batch.select([SEQUENCES]).to("cpu").unpack()
    if cut == "sample":
        return [((place,), tokens_of(group)) for place, group in enumerate(groups)]
    units, begin = [], 0
    for group in groups:
        end = begin + len(group.flat_seqlens(SEQUENCES))
        units += _fitting(one_per_sequence(group), begin, spec, tokens_of)
        begin = end
    return units if len(units) >= spec.n_mbs else None


def _fitting(
    sequences: SequenceSample,
    begin: int,
    spec: MicroBatchSpec,
    tokens_of: Callable[[SequenceSample], int],
) -> list[Unit]:
    """Neighbours among the sequences of a group, the first of which is number `begin` of the batch,
    that share tokens and fit into a micro-batch together."""
    count, lengths = tokens_of(sequences), sequences.flat_seqlens(SEQUENCES)
    if count == sum(lengths):
        return [((begin + place,), length) for place, length in enumerate(lengths)]
    if sequences.bs == 1 or _fits(count, spec):
        return [(tuple(range(begin, begin + sequences.bs)), count)]
    half = sequences.bs // 2
    first = sequences.select_indices(range(half))
    second = sequences.select_indices(range(half, sequences.bs))
    return [
        *_fitting(first, begin, spec, tokens_of),
        *_fitting(second, begin + half, spec, tokens_of),
    ]


def _fits(tokens: int, spec: MicroBatchSpec) -> bool:
    return spec.max_tokens_per_mb is None or tokens <= spec.max_tokens_per_mb


def one_per_sequence(batch: SequenceSample) -> SequenceSample:
    """The same rows with every sequence as a sample of its own, in order; metadata goes with each.

    Raises ValueError for a key without one entry per sequence, such as one per group:
    it belongs to no sequence.
    """
    counts = _sequences_of_samples(batch)
    samples = [(sample, number) for sample, count in enumerate(counts) for number in range(count)]
    seqlens = {key: [[length] for length in flat2d(rows)] for key, rows in batch.seqlens.items()}
    metadata = {
        name: [values[sample] for sample, _ in samples] for name, values in batch.metadata.items()
    }
    return SequenceSample(
        ids=[f"{batch.ids[sample]}/{number}" for sample, number in samples],
        seqlens=seqlens,
        trailing_shapes=dict(batch.trailing_shapes),
        dtypes=dict(batch.dtypes),
        data=copy.copy(batch.data),
        metadata=metadata,
    )


def _sequences_of_samples(batch: SequenceSample) -> list[int]:
    """[N] the number of sequences of each sample, which must be the same for all keys."""
    counts = [len(group) for group in batch.seqlens[SEQUENCES]]
    for key, lengths in batch.seqlens.items():
        if [len(group) for group in lengths] != counts:
            raise ValueError(
                f"groups cannot be cut: {key} does not have one entry for each sequence "
                f"of {SEQUENCES}"
            )
    return counts


def idle_micro_batch(device: torch.device) -> MicroBatch:
    """One token, 0, in a sequence of its own."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(
        SequenceSample(ids=["idle"], seqlens={SEQUENCES: [[1]]}, data={SEQUENCES: token}), ()
    )


def rows_in_order(
    rows: Sequence[torch.Tensor], micro_batches: Sequence[MicroBatch], lengths: Sequence[int]
) -> torch.Tensor:
    """Rows of micro-batches, restored to the order of the batch; `lengths` [B] counts the rows of
    each sample (or of each sequence, if groups are cut). `rows` has one tensor for each micro-batch
    that is not idle."""
    pieces: dict[int, torch.Tensor] = {}
    working = [micro_batch for micro_batch in micro_batches if not micro_batch.is_idle]
    for micro_batch, outputs in zip(working, rows, strict=True):
        counts = [lengths[index] for index in micro_batch.places]
        pieces.update(zip(micro_batch.places, outputs.split(counts), strict=True))
    return torch.cat([pieces[index] for index in range(len(lengths))])
