"""Where the master writes."""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.observe.display import Display
from rlcli.observe.json_lines import JsonLines
from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleWriter


@dataclass(frozen=True)
class Outputs:
    """The run's folder, its files, and what the user sees."""

    run: RunDirectory
    metrics: MetricsWriter
    samples: SampleWriter
    ledger: JsonLines
    """The samples of each step, `e<epoch>r<row>`: which were trained on, and when."""
    display: Display
