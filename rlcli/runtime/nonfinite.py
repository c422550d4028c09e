"""Updates that were not finite: engines skip them on all ranks, and too many in a row end the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from rlcli.errors import NumericError
from rlcli.observe.display import Display
from rlcli.observe.run_directory import RunDirectory

MEASURES = ("/grad_norm", "/loss")
"""Name endings of the numbers that show whether an update was finite."""


class NonfiniteSteps:
    """Consecutive non-finite steps, with their samples."""

    def __init__(self, directory: RunDirectory, display: Display, limit: int):
        self.streak: list[tuple[int, list[str]]] = []
        """(step, samples)."""
        self._directory = directory
        self._display = display
        self._limit = limit

    def restore(self, streak: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Continue with the streak of a checkpoint."""
        self.streak = [(step, list(samples)) for step, samples in streak]

    def watch(self, step: int, record: Mapping[str, float], ids: Sequence[str]) -> None:
        """Record a finished step. Raises NumericError F37, before anything is saved, if too many in a row failed."""
        bad = [key for key, value in record.items() if key.endswith(MEASURES) and not math.isfinite(value)]
        if not bad:
            self.streak.clear()
            return
        self.streak.append((step, list(ids)))
        what = f"step {step}: {bad[0]} is not finite"
        self._display.warning(f"[F33] {what}, update skipped ({len(self.streak)} of {self._limit})")
        if len(self.streak) >= self._limit:
            steps = [{"step": number, "samples": samples} for number, samples in self.streak]
            file = self._directory.write_text("crash/nonfinite.json", json.dumps(steps, indent=2) + "\n")
            raise NumericError(
                f"{what}, for {self._limit} steps in a row; no model was saved",
                hint=f"lower the learning rate, or look at the samples named in {file}",
                code="F37",
            )
