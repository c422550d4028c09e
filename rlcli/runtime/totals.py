"""What a run has trained on so far, in tokens and by dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rlcli.api.key_meaning import SEQUENCES, SOURCE
from rlcli.runtime.buffer import Buffer


class Totals:
    """Counts the samples of one step after the other."""

    def __init__(self, buffer: Buffer, sources: Sequence[str]):
        """`sources`: the datasets that the training dataset is made of; none if it is a single one."""
        self.tokens = 0
        self.used: Counter[str] = Counter()
        """Samples of each of these datasets."""
        self._buffer = buffer
        self._sources = sources

    def restore(self, tokens: int, used: Mapping[str, int]) -> None:
        """Continue with the totals of a checkpoint."""
        self.tokens, self.used = tokens, Counter(used)

    def count(self, ids: Sequence[str]) -> int:
        """Add the samples of a step; returns their tokens."""
        tokens = sum(self._buffer.sequence_lengths(ids, SEQUENCES))
        self.tokens += tokens
        if self._sources:
            self.used.update(self._buffer.metadata(ids, SOURCE))
        return tokens

    def numbers(self, samples: int) -> dict[str, float]:
        """Numbers for the metrics. `samples`: of all finished steps, each a prompt or another row of the dataset."""
        used = {f"used/{name}": float(self.used[name]) for name in self._sources}
        return {"total/prompts": float(samples), "total/tokens": float(self.tokens), **used}
