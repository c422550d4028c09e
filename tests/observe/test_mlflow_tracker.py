"""What a run does in MLflow, with a client in its place: `tests/trackers` has the real one."""

import sys
from types import SimpleNamespace

import pytest
from tracked_runs import make_run

from rlcli.observe.trackers.contract import make_tracker
from rlcli.observe.trackers.description import describe_run
from rlcli.observe.trackers.redaction import Redactor


class MlflowException(Exception):
    """MLflow's."""

    def __init__(self, error_code):
        super().__init__(error_code)
        self.error_code = error_code


class BusyStore:
    """A store in which another run creates the same experiment at the same time."""

    def __init__(self, error_code="RESOURCE_ALREADY_EXISTS"):
        self.error_code = error_code
        self.experiments = {}
        self.runs = []

    def get_experiment_by_name(self, name):
        return self.experiments.get(name)

    def create_experiment(self, name):
        self.experiments[name] = SimpleNamespace(experiment_id="7")
        raise MlflowException(self.error_code)

    def create_run(self, experiment_id, run_name, tags):
        self.runs.append(experiment_id)
        return SimpleNamespace(info=SimpleNamespace(run_id="run"))

    def log_batch(self, run_id, **_):
        pass

    def log_dict(self, run_id, dictionary, file):
        pass


@pytest.fixture
def open_run(tmp_path, monkeypatch):
    """Begins a run in a store."""

    def begin(store):
        mlflow = SimpleNamespace(
            MlflowClient=lambda: store,
            exceptions=SimpleNamespace(MlflowException=MlflowException),
            get_tracking_uri=lambda: "sqlite:///mlflow.db",
        )
        entities = SimpleNamespace(Param=lambda key, value: (key, value))
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
        run = describe_run(make_run(tmp_path / "run").path, Redactor({}))
        return make_tracker("mlflow").open(run, None)

    return begin


def test_runs_that_begin_together_share_the_experiment_that_one_of_them_creates(open_run):
    store = BusyStore()
    assert open_run(store) == "sqlite:///mlflow.db run"
    assert store.runs == ["7"]


def test_an_experiment_that_is_refused_is_an_error(open_run):
    with pytest.raises(MlflowException, match="PERMISSION_DENIED"):
        open_run(BusyStore("PERMISSION_DENIED"))
