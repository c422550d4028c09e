"""Who holds what: for every sample the lengths of its sequences, its metadata and the ranks that hold each key.

Metadata only; tensors stay with the workers.
"""

from __future__ import annotations

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
    """Of these samples, this key only: what the receiver needs to make room."""

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
    """The samples of the open steps."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Held]] = {}
        self._steps: dict[int, list[str]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, rank: int, batch: SequenceSample) -> None:
        """`rank` now holds all keys of `batch`, which is a description."""
        for sample in batch.unpack():
            keys = self._held.setdefault(str(sample.ids[0]), {})
            for key in sample.keys:
                known = keys.get(key)
                if known is None or known.description.seqlens != sample.select([key]).seqlens:
                    keys[key] = Held(sample.select([key]))
                keys[key].ranks.add(rank)

    def open_step(self, step: int, ids: Sequence[str]) -> None:
        self._steps[step] = list(ids)

    def ids(self, step: int) -> list[str]:
        return self._steps[step]

    def close_step(self, step: int) -> list[str]:
        """Forget the samples of a step; returns their ids."""
        ids = self._steps.pop(step)
        for id_ in ids:
            self._held.pop(id_, None)
        return ids

    def holders(self, id_: str, key: str) -> set[int]:
        return self._held[id_][key].ranks

    def sequence_lengths(self, ids: Sequence[str], key: str) -> list[int]:
        """Lengths of all sequences of a key; empty if the key is not there."""
        return [n for i in ids if key in self._held[i] for n in self._held[i][key].description.flat_seqlens(key)]

    def transfers(self, shares: dict[int, list[str]], keys: Sequence[str]) -> list[Transfer]:
        """What must move so that every rank holds `keys` of its share; nothing where it already does.

        The order is the same for everybody, and each rank works through it in that order, so no two can wait for
        each other.
        """
        plan: list[Transfer] = []
        for target, ids in sorted(shares.items()):
            for key in keys:
                by_source: dict[int, list[str]] = {}
                for id_ in ids:
                    held = self._held[id_][key]
                    if target not in held.ranks:
                        by_source.setdefault(min(held.ranks), []).append(id_)
                for source, moved in sorted(by_source.items()):
                    described = [self._held[id_][key].description for id_ in moved]
                    plan.append(Transfer(source, target, key, tuple(moved), SequenceSample.gather(described)))
        return plan

    def count_transfers(self, plan: Sequence[Transfer]) -> None:
        """The plan was carried out: the targets hold copies now."""
        for transfer in plan:
            for id_ in transfer.ids:
                self._held[id_][transfer.key].ranks.add(transfer.target)
