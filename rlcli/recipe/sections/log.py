"""The `log` section of a recipe: what a run writes about itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from rlcli.recipe.sections.base import Name, NotNegative, Positive, Section

STEPS_PATTERN = r"^[1-9][0-9]{0,8}(-[1-9][0-9]{0,8})?$"
MOST_PROFILED = 10
"""Steps with a profile; a trace has up to 64 MiB."""
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Log(Section):
    """What is written during a run."""

    dir: str = "runs"
    """Folder of the run directories."""
    trackers: list[Tracker] = Field(default=["tensorboard"])
    """Tools that show the run, each written to by a process of its own during the run:
    `tensorboard`, `wandb`, `mlflow`, `trackio`."""
    project: Name | None = None
    """Name under which trackers keep runs together, as a project or an experiment; null: the
    recipe's name."""
    samples_per_step: NotNegative = 4
    """Prompts per step whose responses are written to samples.jsonl."""
    plot: bool = True
    """Plot the learning curve at the end (curve.png)."""
    profile: Positive | Annotated[str, StringConstraints(pattern=STEPS_PATTERN)] | None = None
    """A step, or up to ten, such as `2-3`, whose calls are traced by torch's profiler: one trace
    for each rank and step in the run's folder `profile`. The rate of matrix products is measured
    then, unless `peak_tflops` says it."""
    trace_steps: NotNegative = 20
    """The number of last steps whose timeline is in trace.json, for `rlcli profile`, `rlcli report`
    and https://ui.perfetto.dev; 0: there is no such file."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """TFLOP/s that a device reaches with matrix products in the dtype of the models, for
    `perf/<role>/mfu`. null: there is no such metric before profiled steps have measured it."""

    @property
    def profiled_steps(self) -> range:
        """Counted from 1."""
        if self.profile is None:
            return range(0)
        first, _, last = str(self.profile).partition("-")
        return range(int(first), int(last or first) + 1)

    @model_validator(mode="after")
    def _profiles_few_steps(self) -> Log:
        if self.profile is not None and not 1 <= len(self.profiled_steps) <= MOST_PROFILED:
            raise ValueError(
                f"profile is {self.profile}; it must be a step such as 2, or up to "
                f"{MOST_PROFILED} steps such as 2-3"
            )
        return self
