"""The tensors that a worker holds, by sample. Its calls and its data lane use them at the same time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rlcli.api.data import SequenceSample


class SampleStore:
    """Samples of batch size 1. Tensors are never written to once they are in here, so they may be read without a lock;
    the lock guards which keys a sample has."""

    def __init__(self) -> None:
        self._samples: dict[str, SequenceSample] = {}
        self._lock = threading.Lock()

    def add(self, batch: SequenceSample) -> None:
        """Store the samples of a batch; existing ones get its keys in addition."""
        samples = batch.unpack()
        with self._lock:
            for sample in samples:
                id_ = str(sample.ids[0])
                if id_ in self._samples:
                    self._samples[id_].update_(sample)
                else:
                    self._samples[id_] = sample

    def gather(self, ids: Sequence[str], keys: Sequence[str]) -> SequenceSample:
        """These keys of these samples, as one batch."""
        with self._lock:
            selected = [self._samples[id_].select(keys) for id_ in ids]
        return SequenceSample.gather(selected)

    def sample(self, id_: str) -> SequenceSample:
        """A sample as it is now."""
        with self._lock:
            sample = self._samples[id_]
            return sample.select(list(sample.keys))

    def forget(self, ids: Sequence[str]) -> None:
        """Drop samples; unknown ids are ignored."""
        with self._lock:
            for id_ in ids:
                self._samples.pop(id_, None)
