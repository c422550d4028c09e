"""The `checkpoint` section of a recipe: what is saved, and when."""

from __future__ import annotations

from typing import Literal

from rlcli.recipe.sections.base import NotNegative, Positive, Seconds, Section


class Checkpoint(Section):
    """What to save from the run, and when."""

    save: bool = True
    """Write the trained models at the end, as folders that transformers can load."""
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type in those folders; auto: that of the weights the role started with. Checkpoints are
    always exact, whatever this is set to."""
    roles: list[str] | None = None
    """Roles to save; null: all trained ones."""
    every_steps: Positive | None = None
    """Take a checkpoint every this many steps."""
    every_epochs: Positive | None = None
    """Take a checkpoint every this many passes over the training dataset."""
    every_seconds: Seconds | None = 1800.0
    """Take a checkpoint at the end of a step if this many seconds have passed since the last."""
    at_end: bool = True
    """Take a checkpoint after the last step, so that training can be extended."""
    on_stop: bool = True
    """Take a checkpoint when the run is asked to stop."""
    keep_last: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_best: NotNegative = 0
    """Number of additional checkpoints to keep: those with the best `best_metric`. Only those of
    evaluated steps have a metric of the evaluation."""
    best_metric: str = "eval/accuracy"
    """Metric that ranks checkpoints, named as in the run's metrics: `eval/loss`, `actor/loss`."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Whether the highest or the lowest value of it is the best."""
    asynchronous: bool = True
    """Continue training while files are written, waiting only for the copy to host memory."""
    max_failed_saves: NotNegative = 2
    """How many consecutive checkpoints may fail to be written; the next failure ends the run."""

    @property
    def is_written(self) -> bool:
        """Whether the run writes any checkpoints."""
        return bool(
            self.every_steps
            or self.every_epochs
            or self.every_seconds
            or self.at_end
            or self.on_stop
        )
