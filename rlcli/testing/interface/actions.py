"""Which actions of a batch count, and copies of a batch that differ only where nothing counts.

Written without `rlcli.ops`, whose functions components use: a mistake there must not hide here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import CHOSEN, MEANINGS, PROMPT_MASK, SEQUENCES
from rlcli.testing.contract import skip_if

LOSS_MASK = "loss_mask"
LOSS_WEIGHTS = "loss_weights"


def trained_actions(batch: SequenceSample) -> torch.Tensor | None:
    """[T - N] bool: the actions that `loss_mask` keeps or, without it, those that chose a token of
    a response; none of a sequence that `chosen` excludes. None if the batch has neither mask."""
    tensors = batch.data or {}
    actions = tensors.get(LOSS_MASK)
    if actions is None and PROMPT_MASK in tensors:
        actions = _without_first(~tensors[PROMPT_MASK], batch.flat_seqlens(SEQUENCES))
    if actions is not None and CHOSEN in tensors:
        actions = actions & per_action(batch, tensors[CHOSEN])
    return actions


def per_action(batch: SequenceSample, numbers: torch.Tensor) -> torch.Tensor:
    """[T - N]: for each action the number, of [N], of its sequence."""
    counts = torch.tensor(action_counts(batch), dtype=torch.int64)
    return torch.repeat_interleave(numbers, counts)


def action_seqlens(batch: SequenceSample) -> list[list[int]]:
    """The number of actions of each sequence: all of its tokens but the first were chosen."""
    return [[length - 1 for length in group] for group in batch.seqlens[SEQUENCES]]


def action_counts(batch: SequenceSample) -> list[int]:
    """[N] the same for all sequences in a row."""
    return list(chain(*action_seqlens(batch)))


def last_rows(batch: SequenceSample, key: str = SEQUENCES) -> torch.Tensor:
    """[N] the last row of each sequence."""
    return torch.tensor(batch.flat_seqlens(key)).cumsum(0) - 1


def with_tensor(batch: SequenceSample, key: str, tensor: torch.Tensor) -> SequenceSample:
    """A copy of the batch with another tensor for one key."""
    copy = batch.select(batch.keys)
    copy.data[key] = tensor
    return copy


def with_narrower_loss_mask(batch: SequenceSample) -> SequenceSample:
    """The batch or, if it has a `loss_mask`, a copy in which that leaves out every third action
    too."""
    if LOSS_MASK not in batch.keys:
        return batch
    mask = batch.data[LOSS_MASK]
    return with_tensor(batch, LOSS_MASK, mask & (torch.arange(len(mask)) % 3 > 0))


def without_trained_actions(batch: SequenceSample) -> SequenceSample | None:
    """A copy that has nothing to train on; None if the batch does not say what is trained on."""
    if trained_actions(batch) is None:
        return None
    for key, masked in ((LOSS_MASK, False), (PROMPT_MASK, True)):
        if key in batch.keys:
            batch = with_tensor(batch, key, torch.full_like(batch.data[key], masked))
    return batch


def with_noise_elsewhere(
    batch: SequenceSample, actions: torch.Tensor
) -> Iterator[tuple[str, SequenceSample]]:
    """(key, a copy of the batch in which its numbers differ except at these actions [T - N]), for
    each key with floating-point numbers per token."""
    lengths, of_actions = batch.seqlens[SEQUENCES], action_seqlens(batch)
    per_sequence = actions.split(action_counts(batch))
    at_tokens = [torch.cat([counted, counted.new_ones(1)]) for counted in per_sequence]
    for key, tensor in batch.data.items():
        if (
            not tensor.is_floating_point()
            or batch.seqlens[key] not in (lengths, of_actions)
            or not len(tensor)
        ):
            continue
        counted = actions if batch.seqlens[key] == of_actions else torch.cat(at_tokens)
        rows = counted.view(-1, *[1] * (tensor.dim() - 1))
        yield key, with_tensor(batch, key, torch.where(rows, tensor, tensor - 1.0))


def with_groups_reversed(batch: SequenceSample) -> SequenceSample:
    """The batch with the sequences of each sample in reverse order."""
    copy = batch.select(batch.keys)
    copy.data = {
        key: torch.cat([rows[:0], *_groups_reversed(rows, batch.seqlens[key])])
        for key, rows in copy.data.items()
    }
    copy.seqlens = {key: [group[::-1] for group in batch.seqlens[key]] for key in batch.keys}
    return copy


def _groups_reversed(rows: torch.Tensor, lengths: list[list[int]]) -> Iterator[torch.Tensor]:
    """The rows of each sequence, the last one of a sample first."""
    for group, of_sample in zip(lengths, rows.split(list(map(sum, lengths))), strict=True):
        yield from reversed(of_sample.split(group))


def padded(batch: SequenceSample, in_front: bool = False) -> SequenceSample:
    """Each sequence with some extra tokens behind it, or in front, that belong to no response;
    other keys have noise there. Keys with sequences of their own stay as they are."""
    copy = batch.select(batch.keys)
    tokens = batch.seqlens[SEQUENCES]
    per_token = (tokens, action_seqlens(batch))
    for key, lengths in batch.seqlens.items():
        if key in MEANINGS and MEANINGS[key].has_own_sequences:
            continue
        if lengths not in per_token:
            skip_if(
                lengths != [[1] * len(group) for group in tokens],
                f"not tried: the length of {key} in a longer sequence is unknown",
            )
            continue
        rows = copy.data[key]
        padding = _noise(key, rows)
        pieces = [
            [padding, piece] if in_front else [piece, padding]
            for piece in rows.split(batch.flat_seqlens(key))
        ]
        copy.data[key] = torch.cat([row for piece in pieces for row in piece])
        copy.seqlens[key] = [[length + len(padding) for length in group] for group in lengths]
    return copy


def _noise(key: str, rows: torch.Tensor) -> torch.Tensor:
    """[3, …] rows of padding: token 0, masked, or numbers that would be noticed if they were
    read."""
    padding = rows.new_zeros(3, *rows.shape[1:])
    if key == PROMPT_MASK:
        return ~padding
    return padding - 1.0 if rows.is_floating_point() else padding


def at_actions(output: SequenceSample, actions: torch.Tensor) -> SequenceSample:
    """The output with the rows of these actions [T - N] only, in its keys that have a row per
    action; without metadata, which may be about whole sequences."""
    copy = output.select(output.keys)
    copy.metadata = {}
    for key, rows in output.data.items():
        if rows.shape == actions.shape:
            copy.data[key] = rows[actions]
            counts = iter([int(chosen.sum()) for chosen in actions.split(output.flat_seqlens(key))])
            copy.seqlens[key] = [[next(counts) for _ in group] for group in output.seqlens[key]]
    return copy


def _without_first(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The rows of all tokens but the first of each sequence."""
    return torch.cat([sequence[1:] for sequence in rows.split(lengths)] or [rows])
