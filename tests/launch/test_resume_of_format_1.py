"""Runs that an rlcli with recipes of format 1 began: resumed exactly,
or refused before anything is touched."""

import json

import pytest
import yaml
from run_files import checkpoints, files, ledger, numbers

from rlcli.cli.main import main
from rlcli.errors import UsageError

pytestmark = pytest.mark.timeout(420)


@pytest.fixture
def older(project):
    """Make the record of a run's recipe one of format 1; `calls`: what its graph has besides,
    or instead."""

    def rewrite(calls=None, name="run"):
        file = project / name / "recipe.resolved.yaml"
        record = yaml.safe_load(file.read_text())
        del record["format"]
        record["graph"].update(calls or {})
        file.write_text(json.dumps(record))

    return rewrite


def test_a_run_whose_calls_are_the_same_is_resumed_exactly(train, resume, older):
    _, uninterrupted = train("train.steps=4", name="uninterrupted")
    train("train.steps=2")
    older()
    resumed = resume("train.steps=4")
    folder = uninterrupted.parent / "run"
    assert (resumed.finished.exit_code, resumed.finished.began_after) == (0, 2)
    assert numbers(folder) == numbers(uninterrupted)
    assert ledger(folder) == ledger(uninterrupted)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"kl_ctl": 0.1}, "graph.gae is new: it computes once what train_actor learns from"),
        ({"generation_size": 8}, "generation_size of graph.train_actor has another meaning now"),
    ],
)
def test_a_run_whose_calls_are_others_is_refused_untouched(
    train, resume, older, project, args, message
):
    _, folder = train("train.steps=2")
    older(
        {
            "train_actor": {
                "model": "actor",
                "call": "train_step",
                "interface": {"type": "ppo_actor", "args": args},
            }
        }
    )
    before = files(folder)
    with pytest.raises(
        UsageError, match="begun by an older rlcli, whose recipes had format 1"
    ) as caught:
        resume("train.steps=4")
    assert (caught.value.code, caught.value.exit_code) == ("F85", 2)
    assert message in caught.value.what
    assert caught.value.hint.startswith("finish it with that version, or migrate its recipe")
    assert files(folder) == before
    assert checkpoints(folder) == [2]


def test_the_verb_refuses_such_a_run_in_one_error(train, older, project, capsys):
    train("train.steps=1")
    older(
        {
            "train_actor": {
                "model": "actor",
                "call": "train_step",
                "interface": {"type": "grpo", "args": {}},
            }
        }
    )
    before = files(project / "run")
    with pytest.raises(SystemExit) as ended:
        main(["resume", "run"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("error[") == error.count("error[F85]") == 1
    assert files(project / "run") == before
