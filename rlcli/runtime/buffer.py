"""Who holds what: for every sample the lengths of its sequences, its metadata and the ranks that hold each key.

Metadata only; tensors stay with the workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.api.data import SequenceSample


@dataclass
class Held:
    """One key of one sample."""

    description: SequenceSample
    """Batch size 1, this key only, no data."""
    ranks: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Transfer:
    """Move `key` of the samples `ids` from rank `source` to rank `target`."""

    source: int
    target: int
    key: str
    ids: tuple[str, ...]
    description: SequenceSample
    """Of these samples, this key only: what the receiver needs to make room. With the samples' metadata, if it has
    none of theirs yet."""

    def as_json(self) -> dict[str, Any]:
        return {
            "source": self.source, "target": self.target, "key": self.key, "ids": list(self.ids),
            "description": self.description.as_json(),
        }  # fmt: skip

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Transfer:
        description = SequenceSample.from_json(fields["description"])
        return Transfer(fields["source"], fields["target"], fields["key"], tuple(fields["ids"]), description)


class Buffer:
    """The samples that are in use."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Held]] = {}
        self._metadata: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def expect(self, ids: Sequence[str]) -> None:
        """Make room for samples. Raises ValueError for one that is in use."""
        twice = [id_ for id_ in ids if id_ in self._held]
        if twice or len(set(ids)) != len(ids):
            raise ValueError(f"samples that are already in use: {twice[:5]}")
        self._held |= {id_: {} for id_ in ids}

    def add(self, rank: int, batch: SequenceSample) -> None:
        """`rank` now holds all keys of `batch`, which is a description."""
        for sample in batch.unpack():
            id_ = str(sample.ids[0])
            self._metadata.setdefault(id_, {}).update({name: values[0] for name, values in sample.metadata.items()})
            sample.metadata = {}
            for key in sample.keys:
                self._held[id_].setdefault(key, Held(sample.select([key]))).ranks.add(rank)

    def forget(self, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._held.pop(id_)
            self._metadata.pop(id_, None)

    def holders(self, id_: str, keys: Sequence[str]) -> set[int]:
        """The ranks that hold all of these keys of a sample."""
        held = self._held[id_]
        return set.intersection(*(held[key].ranks if key in held else set() for key in keys))

    def sequence_lengths(self, ids: Sequence[str], key: str) -> list[int]:
        """Lengths of all sequences of a key; empty if the key is not there."""
        return [n for i in ids if key in self._held[i] for n in self._held[i][key].description.flat_seqlens(key)]

    def load(self, id_: str, key: str) -> int:
        """The tokens of a key of a sample; 1 while nobody has made it."""
        return sum(self.sequence_lengths([id_], key)) or 1

    def description(self, ids: Sequence[str], keys: Sequence[str]) -> SequenceSample:
        """These keys of these samples, without metadata."""
        described = SequenceSample(ids=list(ids), seqlens={})
        for key in keys:
            described.update_(SequenceSample.gather([self._held[id_][key].description for id_ in ids]))
        return described

    def metadata(self, ids: Sequence[str], name: str) -> list[Any]:
        """Of those of these samples that have it."""
        return [self._metadata[id_][name] for id_ in ids if name in self._metadata.get(id_, ())]

    def metadata_names(self, ids: Sequence[str]) -> list[str]:
        """Names of metadata that all of these samples have."""
        names = [set(self._metadata.get(id_, ())) for id_ in ids]
        return sorted(set.intersection(*names)) if names else []

    def transfers(self, shares: dict[int, list[str]], keys: Sequence[str]) -> list[Transfer]:
        """What must move so that every rank holds `keys` of its share; nothing where it already does.

        The order is the same for everybody, and each rank works through it in that order, so no two can wait for
        each other. Of several holders the one sends that has sent least.
        """
        plan: list[Transfer] = []
        sent: Counter[int] = Counter()
        for target, ids in sorted(shares.items()):
            strangers = {id_ for id_ in ids if not any(target in held.ranks for held in self._held[id_].values())}
            for key in keys:
                by_holders: dict[tuple[int, ...], list[str]] = {}
                for id_ in ids:
                    held = self._held[id_][key]
                    if target not in held.ranks:
                        by_holders.setdefault(tuple(sorted(held.ranks)), []).append(id_)
                for holders, moved in sorted(by_holders.items()):
                    source = min(holders, key=lambda rank: (sent[rank], rank))
                    sent[source] += sum(self.sequence_lengths(moved, key))
                    described = self.description(moved, [key])
                    if strangers & set(moved):
                        described.metadata = self._metadata_of(moved)
                    strangers -= set(moved)
                    plan.append(Transfer(source, target, key, tuple(moved), described))
        return plan

    def count_transfers(self, plan: Sequence[Transfer]) -> None:
        """The plan was carried out: the targets hold copies now."""
        for transfer in plan:
            for id_ in transfer.ids:
                self._held[id_][transfer.key].ranks.add(transfer.target)

    def _metadata_of(self, ids: Sequence[str]) -> dict[str, list[Any]]:
        return {name: [self._metadata[id_][name] for id_ in ids] for name in self.metadata_names(ids)}
