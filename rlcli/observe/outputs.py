"""The files of a run that every step adds to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from rlcli.disk_errors import explain_disk_errors
from rlcli.errors import ResourceError
from rlcli.files import sync_folder
from rlcli.observe.json_lines import JsonLines, Warn
from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleRecord, SampleWriter

LAST_TRIES, PAUSE = 10, 0.5
"""Attempts to write the last lines of a run, and seconds between them."""


@dataclass(frozen=True)
class Outputs:
    """The files of a run that every step adds to."""

    run: RunDirectory
    metrics: MetricsWriter
    samples: SampleWriter
    ledger: JsonLines
    """A line for each sample that was drawn, `e<epoch>r<row>`: when it was trained on,
    or why it was dropped."""

    @property
    def lines(self) -> tuple[JsonLines, ...]:
        """All files."""
        return self.metrics.lines, self.samples.lines, self.ledger

    def account(self, step: int, lines: Iterable[dict[str, Any]]) -> None:
        """Write lines of the ledger, once a step is done."""
        for line in lines:
            self.ledger.write({"step": step, **line})

    def show(self, step: int, phase: str, lines: Iterable[dict[str, Any]]) -> None:
        """Write responses for people to read."""
        for line in lines:
            self.samples.write(SampleRecord(step=step, phase=phase, **line))

    def sync(self) -> None:
        """Flush everything written so far to disk: a run that resumes keeps these lines. Raises
        ResourceError with the id of the fault."""
        for lines in self.lines:
            with explain_disk_errors(lines.path):
                lines.sync()
        with explain_disk_errors(self.run.path):
            sync_folder(self.run.path)

    def finish(self) -> None:
        """Write the last lines; retry if the disk is full for a moment.
        Raises ResourceError if some are lost."""
        for tries in range(1, LAST_TRIES + 1):
            try:
                return self.sync()
            except ResourceError as error:
                if tries == LAST_TRIES:
                    lost = ", ".join(
                        f"{lines.waiting} of {lines.path.name}"
                        for lines in self.lines
                        if lines.waiting
                    )
                    message = f"lines that are not on disk: {lost or 'unknown'}: {error.what}"
                    raise ResourceError(
                        message, where=error.where, hint=error.hint, code=error.code
                    ) from error
            time.sleep(PAUSE)


@contextmanager
def open_outputs(run: RunDirectory, warn: Warn) -> Iterator[Outputs]:
    """Add to the files in a run's folder. At the end all lines must be on disk: raises
    ResourceError if they are not, or warns if another error ends the run."""
    with (
        MetricsWriter(run.metrics, warn) as metrics,
        SampleWriter(run.samples, warn) as samples,
        closing(JsonLines(run.ledger, warn)) as ledger,
    ):
        outputs = Outputs(run, metrics, samples, ledger)
        try:
            yield outputs
        except BaseException:
            for lines in outputs.lines:
                lines.close()
                if lines.waiting:
                    warn(f"{lines.waiting} lines of {lines.path.name} could not be written")
            raise
        outputs.finish()
