"""Index arithmetic of packed sequences: [T] tokens of N sequences, concatenated;
`lengths` has N entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def cumulative(lengths: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """[N + 1] int32: where each sequence starts, and the end of the last."""
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    return starts.to(device) if device is not None else starts


@dataclass(frozen=True)
class Bounds:
    """Where sequences are in a pack, as kernels for sequences of any length take it."""

    starts: torch.Tensor
    """[N + 1] int32: where each sequence starts, and the end of the last."""
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | None = None) -> Bounds:
        return cls(cumulative(lengths, device), max(lengths, default=0))


def positions(lengths: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """[T] int64: the position of each token within its own sequence, counted from 0."""
    if not lengths:
        return torch.zeros(0, dtype=torch.int64, device=device)
    return torch.cat([torch.arange(length) for length in lengths]).to(device)


def all_but_last(lengths: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """[T − N] int64: indices of the tokens that have a successor in their sequence."""
    keep = torch.ones(sum(lengths), dtype=torch.bool)
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    keep[ends[torch.tensor(lengths, dtype=torch.int64) > 0] - 1] = False
    return keep.nonzero()[:, 0].to(device)


def marked(places: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """[count] bool: the `places` [n] that are `chosen`, [n] bool."""
    marks = torch.zeros(count, dtype=torch.bool, device=places.device)
    marks[places[chosen]] = True
    return marks


def action_owner(lengths: Sequence[int], device: torch.device | None = None) -> torch.Tensor:
    """[T − N] int64: the sequence that each action belongs to.
    Action t of a sequence chose its token t + 1."""
    actions = torch.tensor(list(lengths), dtype=torch.int64) - 1
    return torch.repeat_interleave(torch.arange(len(actions)), actions).to(device)


def action_mask(prompt_mask: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """[T - N] bool: the actions that chose a response token,
    from prompt_mask [T] (True on prompt tokens).

    Action t of a sequence chose its token t + 1.
    """
    return ~drop_first(prompt_mask, seqlens)


def drop_first(x: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """[T, …] → [T - N, …]: each sequence without its first entry."""
    return x[_all_but(x, seqlens, first=True)]


def drop_last(x: torch.Tensor, seqlens: Sequence[int]) -> torch.Tensor:
    """[T, …] → [T - N, …]: each sequence without its last entry."""
    return x[_all_but(x, seqlens, first=False)]


def _all_but(x: torch.Tensor, seqlens: Sequence[int], *, first: bool) -> torch.Tensor:
    lengths = torch.as_tensor(list(seqlens), dtype=torch.long, device=x.device)
    if int(lengths.sum()) != x.shape[0]:
        raise ValueError(
            f"sequences of {int(lengths.sum())} tokens in all cannot describe {x.shape[0]} entries"
        )
    ends = lengths.cumsum(0)
    keep = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    keep[ends - lengths if first else ends - 1] = False
    return keep


def summed(numbers: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
    """[count] float64: the sum of the numbers [n] of each owner, of `owner` [n] int64 below
    `count`."""
    zeros = torch.zeros(count, dtype=torch.float64, device=numbers.device)
    return zeros.index_add(0, owner, numbers.to(torch.float64))
