"""Tracks who holds what: for every sample its sequence lengths, its metadata and the ranks that
hold each key.

Metadata only; tensors stay with the workers.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rlcli.api.data import SequenceSample
from rlcli.messaging.messages import Fields

if TYPE_CHECKING:
    import torch

T = TypeVar("T", bound=Hashable)

KeysByRank = dict[int, dict[str, list[str]]]
"""Rank → sample → keys."""
Traits = tuple["torch.dtype | None", tuple[int, ...] | None]
"""The dtype and the trailing shape of a key."""


MOST_SHARED = 2**16
"""Values cached for sharing; the cache is cleared when more accumulate,
as with many ranks in a long run."""


@dataclass(slots=True)
class KeyOfSample:
    """One key of one sample. There may be a million of these,
    so equal values are stored once and shared."""

    lengths: array[int]
    """Lengths of its sequences."""
    traits: Traits
    ranks: frozenset[int]
    """Ranks that hold it."""


@dataclass(frozen=True)
class Transfer:
    """Move a key of some samples from rank `source` to rank `target`."""

    source: int
    target: int
    description: SequenceSample
    """Describes these samples and this key only: what the receiver needs to allocate memory.
    Includes the samples' metadata if it has none of it yet."""

    @property
    def key(self) -> str:
        (key,) = self.description.keys
        return str(key)

    @property
    def ids(self) -> list[str]:
        return [str(id_) for id_ in self.description.ids]

    def as_json(self) -> Fields:
        return {
            "source": self.source,
            "target": self.target,
            "description": self.description.as_json(),
        }

    @staticmethod
    def from_json(fields: Fields) -> Transfer:
        return Transfer(**fields | {"description": SequenceSample.from_json(fields["description"])})


class Buffer:
    """The samples in use."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, KeyOfSample]] = {}
        """Sample → key → what is known of it."""
        self._metadata: dict[str, dict[str, Any]] = {}
        self._shared: dict[Hashable, Any] = {}
        self._sent: Counter[int] = Counter()
        """Rank → tokens it was assigned to send so far."""

    def __len__(self) -> int:
        return len(self._entries)

    def expect(self, ids: Sequence[str]) -> None:
        """Make room for samples. Raises ValueError for one that is already in use."""
        twice = [id_ for id_ in ids if id_ in self._entries]
        if twice or len(set(ids)) != len(ids):
            raise ValueError(f"samples that are already in use: {twice[:5]}")
        for id_ in ids:
            self._entries[id_], self._metadata[id_] = {}, {}

    def add(self, rank: int, batch: SequenceSample) -> None:
        """Record that `rank` now holds all keys of `batch`, which is a description."""
        alone = self._once(frozenset({rank}))
        traits = {
            key: self._once((batch.dtypes[key], batch.trailing_shapes[key])) for key in batch.keys
        }
        for number, id_ in enumerate(map(str, batch.ids)):
            entries = self._entries[id_]
            self._metadata[id_] |= {name: values[number] for name, values in batch.metadata.items()}
            for key in batch.keys:
                if key in entries:
                    entries[key].ranks = self._once(entries[key].ranks | alone)
                    continue
                lengths = array("Q", batch.seqlens[key][number])
                same = (entry.lengths for entry in entries.values() if entry.lengths == lengths)
                entries[key] = KeyOfSample(next(same, lengths), traits[key], alone)

    def by_rank(self, ids: Sequence[str]) -> dict[int, list[str]]:
        """Rank → those of these samples that it holds something of."""
        by_rank: dict[int, list[str]] = {}
        for id_ in ids:
            for rank in sorted({rank for key in self._entries[id_].values() for rank in key.ranks}):
                by_rank.setdefault(rank, []).append(id_)
        return by_rank

    def forget(self, ids: Sequence[str]) -> dict[int, list[str]]:
        """Release samples; returns rank → those of them that it holds something of."""
        by_rank = self.by_rank(ids)
        for id_ in ids:
            del self._entries[id_], self._metadata[id_]
        return by_rank

    def holders(self, id_: str, keys: Sequence[str]) -> set[int]:
        """The ranks that hold all of these keys of a sample."""
        entries = self._entries[id_]
        return set.intersection(
            *(set(entries[key].ranks) if key in entries else set() for key in keys)
        )

    def shared_out(self, ids: Sequence[str]) -> KeysByRank:
        """Rank → sample → keys: each key of these samples once,
        assigned to a rank that holds it."""
        assigned: KeysByRank = {}
        for id_ in ids:
            for key, entry in self._entries[id_].items():
                rank = min(entry.ranks, key=lambda rank: (len(assigned.get(rank, ())), rank))
                assigned.setdefault(rank, {}).setdefault(id_, []).append(key)
        return assigned

    def sequence_lengths(self, ids: Sequence[str], key: str) -> list[int]:
        """Lengths of all sequences of a key; empty if the key does not exist."""
        return [n for i in ids if key in self._entries[i] for n in self._entries[i][key].lengths]

    def loads(self, ids: Sequence[str], key: str) -> list[int]:
        """Tokens of a key of each sample; 1 while it has not been produced."""
        return [sum(self.sequence_lengths([id_], key)) or 1 for id_ in ids]

    def description(self, ids: Sequence[str], keys: Sequence[str]) -> SequenceSample:
        """These keys of these samples, at least one, without metadata. Raises ValueError if dtypes
        or shapes differ between the samples."""
        seqlens: dict[str, list[list[int]]] = {}
        dtypes: dict[str, torch.dtype | None] = {}
        shapes: dict[str, tuple[int, ...] | None] = {}
        for key in keys:
            entries = [self._entries[id_][key] for id_ in ids]
            traits = {entry.traits for entry in entries}
            if len(traits) > 1:
                kinds = sorted(map(str, traits))
                raise ValueError(f"samples that were made with different settings: {key}: {kinds}")
            seqlens[key] = [entry.lengths.tolist() for entry in entries]
            ((dtypes[key], shapes[key]),) = traits
        return SequenceSample(ids=list(ids), seqlens=seqlens, dtypes=dtypes, trailing_shapes=shapes)

    def empty(self, id_: str, keys: Sequence[str]) -> SequenceSample:
        """A batch of no samples, with these keys and the metadata of a sample that has them."""
        empty = self.description([id_], keys).select_indices([])
        empty.metadata = {name: [] for name in sorted(self._metadata[id_])}
        return empty

    def metadata(self, ids: Sequence[str], name: str) -> list[Any]:
        """Values of a metadata field, from those of these samples that have it."""
        return [self._metadata[id_][name] for id_ in ids if name in self._metadata[id_]]

    def transfers(self, shares: dict[int, list[str]], keys: Sequence[str]) -> list[Transfer]:
        """The transfers after which every rank holds `keys` of its share;
        none where it already does.

        The order is the same for all ranks, and each rank works through it in that order, so no two
        can wait for each other. Among several holders, the one that has sent least sends.
        """
        plan: list[Transfer] = []
        for target, ids in sorted(shares.items()):
            strangers = {
                id_
                for id_ in ids
                if all(target not in entry.ranks for entry in self._entries[id_].values())
            }
            for key in keys:
                for holders, moved in self._holders_elsewhere(target, ids, key):
                    source = min(holders, key=lambda rank: (self._sent[rank], rank))
                    self._sent[source] += sum(self.sequence_lengths(moved, key))
                    description = self.description(moved, [key])
                    if strangers & set(moved):
                        description.metadata = self._common_metadata(moved)
                    strangers -= set(moved)
                    plan.append(Transfer(source, target, description))
        return plan

    def _holders_elsewhere(
        self, target: int, ids: Sequence[str], key: str
    ) -> list[tuple[tuple[int, ...], list[str]]]:
        """The samples whose key a rank lacks, by the ranks that hold it."""
        by_holders: dict[tuple[int, ...], list[str]] = {}
        for id_ in ids:
            ranks = self._entries[id_][key].ranks
            if target not in ranks:
                by_holders.setdefault(tuple(sorted(ranks)), []).append(id_)
        return sorted(by_holders.items())

    def count_transfers(self, plan: Sequence[Transfer]) -> None:
        """Record that the plan was executed: the targets hold copies now."""
        for transfer in plan:
            for id_ in transfer.ids:
                entry = self._entries[id_][transfer.key]
                entry.ranks = self._once(entry.ranks | {transfer.target})

    def _common_metadata(self, ids: Sequence[str]) -> dict[str, list[Any]]:
        """The metadata that all of these samples have."""
        names = set.intersection(*(set(self._metadata[id_]) for id_ in ids))
        return {name: [self._metadata[id_][name] for id_ in ids] for name in sorted(names)}

    def _once(self, value: T) -> T:
        """The cached value that equals this one; the value itself if none is cached."""
        if len(self._shared) >= MOST_SHARED:
            self._shared.clear()
        return self._shared.setdefault(value, value)
