"""What a run resumes from: the state of its master, in a file of each checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcli.errors import DataError, ModelError, UsageError
from rlcli.recipe.schema import Recipe
from rlcli.units import count

STATE = "state.json"
FORMAT = 3


@dataclass(frozen=True)
class RunState:
    """What the master must remember between two steps. Everything else follows from the recipe and
    the step."""

    step: int
    """Completed steps."""
    samples: int
    """Samples that these steps trained on."""
    drawn: int
    """Rows of the training dataset that were drawn, including dropped ones:
    the position in its order."""
    datasets: Mapping[str, str]
    """Digest of each dataset."""
    versions: Mapping[str, Any] = field(default_factory=dict)
    """Role → its model's version."""
    interfaces: Mapping[str, Any] = field(default_factory=dict)
    """Call → the state of its interface."""
    nonfinite: list[tuple[int, list[str]]] = field(default_factory=list)
    """Consecutive steps whose update was skipped, and their samples."""
    used: Mapping[str, int] = field(default_factory=dict)
    """Dataset that the training dataset is made of → number of its samples that were trained on."""
    returned: list[tuple[int, int, int]] = field(default_factory=list)
    """(epoch, row, attempt) of the samples that were given back or were in progress:
    they are drawn next."""
    tokens: int = 0
    """Tokens of the samples trained on."""
    pass_rows: int | None = None
    """Rows of a pass over the training dataset;
    None for a stream whose end has not been reached."""
    ready: list[dict[str, Any]] = field(default_factory=list)
    """Samples generated ahead of training, and their names.
    Their tensors are in the ranks' files."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read the state of a verified checkpoint. Raises ModelError F85 if a newer rlcli wrote
        it."""
        fields = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if fields.get("format") == 1:  # from a run that could not drop samples
            fields |= {"format": 2, "drawn": fields["samples"]}
        if fields.get("format") == 2:  # from a run that did not generate ahead
            fields |= {"format": FORMAT}
        if fields.get("format") != FORMAT:
            raise ModelError(
                f"its state has format {fields.get('format')!r}; this rlcli reads {FORMAT}",
                where=str(folder),
                code="F85",
            )
        return cls(**fields)


BEGINNING = RunState(step=0, samples=0, drawn=0, datasets={})
"""The state of a run that resumes nothing."""


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run resumes from."""

    folder: Path
    state: RunState

    def check_datasets(self, digests: Mapping[str, str], recipe: Recipe) -> None:
        """Check that the training data have not changed. Raises DataError F65."""
        name = recipe.train.dataset
        before, now = self.state.datasets.get(name), digests.get(name)
        if before is not None and before != now:
            raise DataError(
                (
                    f"dataset {name} has changed since step {self.state.step} ({before[:12]} → "
                    f"{str(now)[:12]})"
                ),
                hint="put the old data back, or start a new run from models/",
                code="F65",
            )

    def changed_evaluation(self, digests: Mapping[str, str], recipe: Recipe) -> str:
        """What to know if the evaluation has other rows than when the checkpoint was taken; empty
        if it has the same. Training does not depend on them."""
        name = recipe.train.eval.dataset
        if name is None or self.state.datasets.get(name) in (None, digests.get(name)):
            return ""
        return (
            f"dataset {name} has changed since step {self.state.step}: evaluations cannot be "
            "compared with those before"
        )

    def check_end(self, steps: int, recipe: Recipe) -> None:
        """Check that the run does not end before the steps already done. Raises UsageError F84."""
        if steps >= self.state.step:
            return
        done, epochs = self.state.step, recipe.train.epochs
        planned = (
            f"train.steps is {steps}"
            if recipe.train.steps is not None
            else f"train.epochs={epochs} is {count(steps, 'step')}"
        )
        raise UsageError(
            f"{planned}, but the run has done {count(done, 'step')}",
            hint=(
                f"rlcli ckpt ls shows what it has kept; train.steps of {done} or more continues it"
            ),
            code="F84",
        )
