"""MLflow: its server or database (`MLFLOW_TRACKING_URI`). Without one, MLflow's own default in the
folder that the run works in."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rlcli.observe.run_overview import UNDER_WAY
from rlcli.observe.trackers.contract import SAMPLE_COLUMNS, TrackedRun, Update, sample_row
from rlcli.observe.trackers.redaction import bare_address

NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")
LONGEST_VALUE = 6000
"""Characters of a parameter."""
MOST_PARAMETERS, MOST_METRICS = 100, 1000
"""Of one request."""
ENDED = {"done": "FINISHED", "stopped": "KILLED"}
"""State of the run → MLflow's; FAILED for any other."""


class MlflowTracker:
    """Metrics of MLflow cannot be removed: a run whose steps are repeated gets a new one there, and
    the former is deleted, as MLflow deletes: it can be restored."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run_id = ""

    def continues(self, run: TrackedRun, entry: str) -> bool:
        return entry.startswith(f"{_store()} ")

    def open(self, run: TrackedRun, entry: str | None) -> str:
        self._connect()
        if entry is not None:
            self._run_id = entry.rpartition(" ")[2]
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = self._begin(run)
        return f"{_store()} {self._run_id}"

    def discard(self, run: TrackedRun, entry: str) -> None:
        self._connect()
        run_id = entry.rpartition(" ")[2]
        if self.continues(run, entry) and self._is_active(run_id):
            self._client.delete_run(run_id)

    def write(self, updates: Sequence[Update]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = (
            Metric(_name(key), number, now, update.step)
            for update in updates
            for key, number in update.numbers.items()
        )
        for request in _requests(metrics, MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=request, synchronous=True)
        for update in updates:
            for phase, samples in update.samples_by_phase().items():
                columns = zip(*map(sample_row, samples), strict=True)
                table = dict(zip(SAMPLE_COLUMNS, map(list, columns), strict=True))
                file = f"samples/{phase}-{update.step:06}.json"
                self._client.log_table(self._run_id, table, file)

    def close(self, state: str, curve: Path | None) -> None:
        if curve is not None:
            self._client.log_artifact(self._run_id, str(curve))
        if state not in UNDER_WAY:
            self._client.set_terminated(self._run_id, ENDED.get(state, "FAILED"))

    def _connect(self) -> None:
        self._client = self._client or _mlflow().MlflowClient()

    def _is_active(self, run_id: str) -> bool:
        """Whether it is there and not deleted."""
        try:
            return str(self._client.get_run(run_id).info.lifecycle_stage) == "active"
        except _mlflow().exceptions.MlflowException:
            return False

    def _begin(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.project)
        tags = {"rlcli.run": run.id, "rlcli.group": run.group, "rlcli.tags": " ".join(run.tags)}
        begun = self._client.create_run(experiment, run_name=run.name, tags=tags)
        run_id = str(begun.info.run_id)
        parameters = (
            Param(_name(key), str(value)[:LONGEST_VALUE]) for key, value in run.settings.items()
        )
        for request in _requests(parameters, MOST_PARAMETERS):
            self._client.log_batch(run_id, params=request, synchronous=True)
        self._client.log_dict(run_id, dict(run.origins), "origins.json")
        return run_id

    def _experiment(self, name: str) -> str:
        """The id of the experiment of that name, which is created if there is none."""
        if (experiment := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except _mlflow().exceptions.MlflowException as error:
                # the runs of a sweep begin at the same time: another one has created it
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id)


def _mlflow() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow

    return mlflow


def _store() -> str:
    return bare_address(str(_mlflow().get_tracking_uri()))


def _name(key: str) -> str:
    return NOT_IN_NAMES.sub("_", key)


def _requests(entities: Iterator[Any], most: int) -> Iterator[list[Any]]:
    while request := list(islice(entities, most)):
        yield request
