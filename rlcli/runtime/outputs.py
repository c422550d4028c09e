"""Where the master writes while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rlcli.observe.json_lines import JsonLines, Warn
from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleWriter


@dataclass(frozen=True)
class Outputs:
    """The files of a run that every step adds to."""

    metrics: MetricsWriter
    samples: SampleWriter
    ledger: JsonLines
    """The samples of each step, `e<epoch>r<row>`: which were trained on, and when."""


@contextmanager
def open_outputs(run: RunDirectory, tensorboard: bool, warn: Warn) -> Iterator[Outputs]:
    """Add to the files in a run's folder; a disk that fails costs a warning and no run."""
    with (
        MetricsWriter(run.metrics, run.tensorboard if tensorboard else None, warn) as metrics,
        SampleWriter(run.samples, warn) as samples,
        closing(JsonLines(run.ledger, warn)) as ledger,
    ):
        yield Outputs(metrics, samples, ledger)
