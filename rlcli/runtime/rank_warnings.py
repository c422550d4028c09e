"""Warnings that are logged where no user looks, in a rank or a process of a pool, reach the terminal, each once.

Each stays in its process's log too, where its repetitions are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rlcli.observe.display import Display
from rlcli.runtime.messages import Report, Tell

WARNED = "warned"
"""Name of the report of a warning: its `logger`, its `template` before any values are filled in, its `text`."""
LONGEST = 2000
"""Characters of a warning that are shown."""
LOGGER = "rlcli"
"""The logger above those of rlcli and of components; those of other libraries warn of what users cannot change."""


class WarningsToMaster(logging.StreamHandler):
    """Writes warnings to stderr, as Python does where there is no handler, and reports the first of each kind."""

    def __init__(self, report: Tell):
        super().__init__()
        self.setLevel(logging.WARNING)
        self._report = report
        self._reported: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        template = str(getattr(record, "template", record.msg))
        if (record.name, template) in self._reported:
            return
        self._reported.add((record.name, template))
        value = {"logger": record.name, "template": template, "text": record.getMessage()[:LONGEST]}
        try:
            self._report(WARNED, value, None)
        except Exception:
            self.handleError(record)


def report_warnings(report: Tell) -> None:
    """Report the warnings of this process from now on."""
    logging.getLogger(LOGGER).addHandler(WarningsToMaster(report))


def log_again(report: Report) -> None:
    """Log a warning that another process has reported, as one of this process."""
    logger, template, text = (str(report.value[key]) for key in ("logger", "template", "text"))
    logging.getLogger(logger).warning("%s", text, extra={"template": template})


class RankWarnings:
    """Shows each warning of the ranks once, whichever of them has it."""

    def __init__(self, listen: Callable[[str, Callable[[Report], None]], None], display: Display):
        self._display = display
        self._shown: set[tuple[str, str]] = set()
        listen(WARNED, self._show)

    def _show(self, report: Report) -> None:
        kind = str(report.value["logger"]), str(report.value["template"])
        if kind not in self._shown:
            self._shown.add(kind)
            self._display.warning(
                f"rank {report.rank}: {report.value['text']} (repetitions: logs/rank{report.rank}.log)"
            )
