"""Responses of several rows, as chat templates that rewrite earlier turns make them.

Everything that counts responses sees one sequence for each, in which its rows follow each other:
what it earned, its group, its length. An engine sees the rows, each of which is a text that the
policy has read from its beginning. The token that begins a row follows from nothing: it has no
log-prob.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import FORKS, SEQUENCES
from rlcli.api.lengths import Lengths

if TYPE_CHECKING:
    from rlcli.api.engine import ModelOutput

T = TypeVar("T")


def in_rows(batch: SequenceSample) -> SequenceSample:
    """The batch as an engine computes it, with each row as a sequence of its own; the batch itself
    if no response has several."""
    if FORKS not in batch.keys or not batch.data[FORKS].any():
        return batch
    flags = batch.data[FORKS].cpu().split(batch.flat_seqlens(FORKS))
    rows = iter([_row_lengths(of_response) for of_response in flags])
    lengths = [[n for _ in group for n in next(rows)] for group in batch.seqlens[FORKS]]
    return _with_lengths(batch, lengths)


def _row_lengths(forks: torch.Tensor) -> list[int]:
    """The lengths of a response's rows, given which of its tokens begin another one, [L] bool."""
    begins = [begin + 1 for begin in forks[1:].nonzero()[:, 0].tolist()]
    return [end - begin for begin, end in pairwise([0, *begins, len(forks)])]


def _with_lengths(batch: SequenceSample, lengths: Lengths) -> SequenceSample:
    """The batch with the same tokens as sequences of other lengths."""
    cut = batch.select(batch.keys)
    cut.seqlens[SEQUENCES] = lengths
    return cut


def for_responses(
    hook: Callable[[ModelOutput, SequenceSample], T],
) -> Callable[[ModelOutput, SequenceSample], T]:
    """A hook for batches `in_rows`: it calls `hook` with the output for the batch as it was."""

    def of_rows(output: ModelOutput, rows: SequenceSample) -> T:
        if FORKS not in rows.keys or rows.seqlens[SEQUENCES] == rows.seqlens[FORKS]:
            return hook(output, rows)
        responses = _with_lengths(rows, rows.seqlens[FORKS])
        return hook(OutputOfResponses(output, responses), responses)

    return of_rows


class OutputOfResponses:
    """A `ModelOutput` of N responses of T tokens, from one of their rows."""

    def __init__(self, of_rows: Any, batch: SequenceSample):
        self._of_rows = of_rows
        flags = batch.data[FORKS].split(batch.flat_seqlens(FORKS))
        self._within_rows = torch.cat([~of_response[1:] for of_response in flags])
        """[T - N] bool: the actions that chose a token from those before it."""

    @property
    def temperature(self) -> float:
        return float(self._of_rows.temperature)

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        self._of_rows.temperature = temperature

    @property
    def actions(self) -> torch.Tensor | None:
        """[T - N] bool: those that were requested; None: all."""
        requested: torch.Tensor | None = self._of_rows.actions
        return None if requested is None else self._of_responses(requested)

    @actions.setter
    def actions(self, requested: torch.Tensor | None) -> None:
        self._of_rows.actions = None if requested is None else requested[self._within_rows]

    @property
    def logprobs(self) -> torch.Tensor:
        return self._of_responses(self._of_rows.logprobs)

    @property
    def entropy(self) -> torch.Tensor:
        return self._of_responses(self._of_rows.entropy)

    @property
    def values(self) -> torch.Tensor:
        values: torch.Tensor = self._of_rows.values
        return values

    @property
    def logits(self) -> torch.Tensor:
        logits: torch.Tensor = self._of_rows.logits
        return logits

    @property
    def zero(self) -> torch.Tensor:
        zero: torch.Tensor = self._of_rows.zero
        return zero

    def _of_responses(self, of_rows: torch.Tensor) -> torch.Tensor:
        """[T - N] from the numbers of the actions within rows; 0 between two rows."""
        within = self._within_rows.to(of_rows.device)
        return of_rows.new_zeros(len(within)).masked_scatter(within, of_rows)
