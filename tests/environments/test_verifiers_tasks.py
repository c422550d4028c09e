"""The dataset and the environment `verifiers` with the library and tasksets of tests. `make
test-environments` runs these tests in an environment of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.api.environment import EnvironmentFailure, Observation, ToolMistake, call_tool, tools_in
from rlcli.errors import DataError, UsageError
from rlcli.registry import make_dataset
from rlcli.testing.tokenizer import as_transformers, byte_tokenizer

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None,
        reason="make test-environments installs verifiers",
    ),
    pytest.mark.timeout(1800),
]
SUMS = {"id": "desk-tasks"}
NUMBERS = {"id": "number_games"}


@pytest.fixture
def environment(tasksets):
    return "verifiers"


@pytest.fixture
def tasks(tasksets):
    """The function that makes a dataset."""

    def tasks(**args):
        tokenizer = as_transformers(byte_tokenizer(chat=True))
        utility = DatasetUtility(1, 0, 1, tokenizer)
        return make_dataset(DatasetAbstraction("verifiers", args), utility)

    return tasks


@pytest.fixture
def begun(make, tasks):
    """The function that begins the game for a number."""

    def begun(number, **settings):
        game = make(taskset=NUMBERS, settings=settings)
        (row,) = tasks(taskset=NUMBERS, first=number - 1, rows=1)
        metadata = {name: values[0] for name, values in row.metadata.items()}
        assert game.reset(metadata, 1) == [{"role": "user", "content": "Guess my number."}]
        return game

    return begun


def test_rows_are_the_tasks_of_a_taskset(tasks):
    rows = tasks(taskset={**SUMS, "largest": 4}, first=1)
    assert len(rows) == 3
    row = rows.preview(2)
    assert row.id == "desk-tasks:3"
    assert row.messages == [
        {"role": "system", "content": "Work out sums."},
        {"role": "user", "content": "3+7?"},
    ]
    assert row.metadata["verifiers"]["answer"] == "10"


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"taskset": {}}, UsageError, "taskset has no id"),
        ({"taskset": {"id": "nothing"}}, UsageError, "cannot load the taskset.*nothing"),
        ({"taskset": {**SUMS, "largest": "many"}}, UsageError, "largest"),
        ({"taskset": {**SUMS, "smallest": 1}}, UsageError, "smallest"),
        ({"taskset": SUMS, "first": 3}, DataError, "has no task from number 3 on"),
        ({"taskset": NUMBERS}, UsageError, "the taskset has no end; set rows"),
    ],
)
def test_a_taskset_that_has_no_such_tasks_is_refused(tasks, args, error, message):
    with pytest.raises(error, match=message):
        tasks(**args)


def test_a_turn_that_calls_no_tool_reads_what_the_environment_says(begun):
    game = begun(4)
    assert tools_in(game) == {}
    assert game.step("3") == Observation("higher")
    assert game.step("9") == Observation("lower")
    assert game.step("4") == Observation(done=True)
    assert game.score("4") == 1.0
    assert game.step("again") == Observation(done=True)


def test_an_episode_that_is_cut_off_is_scored_as_far_as_it_got(begun):
    game = begun(4)
    game.step("3")
    assert game.score("3") == 0.0


def test_settings_are_those_of_verifiers(begun):
    game = begun(4, player={"max_turns": 2})
    assert game.step("3") == Observation("higher")
    assert game.step("9") == Observation(done=True)
    with pytest.raises(ValueError, match="turns"):
        begun(4, player={"turns": 2})


def test_an_error_that_verifiers_records_is_not_the_mistake_of_the_policy(begun):
    game = begun(4)
    game.step("leave")
    with pytest.raises(EnvironmentFailure, match=r"TaskError: .*nobody may leave"):
        game.score("leave")


def test_the_policy_has_one_conversation(make):
    game = make(taskset={"id": "two_players"})
    game.reset({"verifiers": None}, 1)
    with pytest.raises(ValueError, match="several of its agents are the policy"):
        game.step("1")


def test_rows_of_another_dataset_are_refused(make):
    with pytest.raises(ValueError, match="use a dataset of type verifiers"):
        make(taskset=NUMBERS).reset({"prompt": "12+7?"}, 1)


def test_tools_are_those_of_the_task(make, tasks):
    desk = make(taskset=SUMS)
    desk.reset(tasks(taskset=SUMS).preview(1).metadata, 1)
    schemas = tools_in(desk)
    assert schemas.keys() == {"calculate", "leave"}
    assert schemas["calculate"]["function"]["parameters"]["required"] == ["first", "second"]
    with pytest.raises(ToolMistake, match='first is "1"; it must be integer'):
        call_tool(desk, "calculate", {"first": "1", "second": 7})
    assert "no negative numbers" in call_tool(desk, "calculate", {"first": -1, "second": 7})
    assert call_tool(desk, "calculate", {"first": 1, "second": 7}) == "8"
    assert desk.step("8") == Observation(done=True)
    assert desk.score("8") == 1.5


def test_episodes_are_played_in_processes_of_their_own(pool, tasks, asked):
    row = tasks(taskset=NUMBERS, rows=4).preview(3).metadata
    with pool(("PYTHONPATH",), taskset=NUMBERS).calls() as calls:
        begun, missed, hit, score = asked(
            calls,
            {"call": "reset", "row": row, "seed": 1},
            {"call": "step", "action": "3"},
            {"call": "step", "action": "4"},
            {"call": "score", "answer": "4"},
        )
    assert begun == {"value": [{"role": "user", "content": "Guess my number."}]}
    assert missed == {"value": ["higher", 0.0, False]}
    assert hit == {"value": ["", 0.0, True]}
    assert score == {"value": 1.0}


@pytest.mark.parametrize(
    ("kind", "args"),
    [("environment", "taskset={id: number_games}"), ("dataset", "taskset={id: desk_tasks}")],
)
def test_the_contract_holds(tasksets, kind, args):
    command = [sys.executable, "-m", "rlcli", "test", kind, "verifiers", args]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1000, env=os.environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
