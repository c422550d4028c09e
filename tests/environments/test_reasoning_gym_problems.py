"""The dataset and the environment `reasoning_gym` with the library. `make test-environments` runs
these tests in an environment of their own."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.datasets.reasoning_gym import BY_HASH
from rlcli.errors import DataError, UsageError
from rlcli.interfaces.environments.reasoning_gym import FORMULAS, LISTS
from rlcli.registry import load, make_dataset

LIBRARY = importlib.util.find_spec("reasoning_gym")
pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="make test-environments installs reasoning-gym"),
    pytest.mark.timeout(1200),
]
SLOW = ("arc_agi", "futoshiki", "knight_swap")
"""Tasks whose problems take seconds to make."""
MADE_OF_OTHERS = "composite"
QUESTIONS = f"""
import json, reasoning_gym
from reasoning_gym.factory import DATASETS
names = sorted(set(DATASETS) - {{*{SLOW}, {MADE_OF_OTHERS!r}}})
tasks = {{name: reasoning_gym.create_dataset(name, seed=11, size=12) for name in names}}
asked = {{name: [tasks[name][row]["question"] for row in range(12)] for name in names}}
print()  # some tasks print dots
print(json.dumps(asked))
"""


@pytest.fixture(scope="module")
def tokenizer():
    return load("datasets", "arithmetic").make_tokenizer()


@pytest.fixture
def problems(tokenizer):
    """The function that makes a dataset."""

    def problems(**args):
        abstraction = DatasetAbstraction("reasoning_gym", {"problems": 50, **args})
        return make_dataset(abstraction, DatasetUtility(1, 0, 1, tokenizer))

    return problems


@pytest.fixture
def environment():
    return "reasoning_gym"


def names_of_tasks():
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {*BY_HASH, MADE_OF_OTHERS})


def metadata_of(row):
    return row.metadata["reasoning_gym"]


def questions(dataset):
    rows = [metadata_of(dataset.preview(number)) for number in range(len(dataset))]
    return {ast.literal_eval(row["entry"])["question"] for row in rows}


def test_every_task_is_asked_and_scored_as_by_the_library(problems, make):
    from reasoning_gym import create_dataset

    for task in names_of_tasks():
        row = problems(task=task, problems=1).preview(0)
        entry = ast.literal_eval(metadata_of(row)["entry"])
        assert entry["question"] in row.prompt
        library = create_dataset(task, size=1)
        game = make()
        game.reset(row.metadata, 1)
        if entry["answer"] is not None:
            score = library.score_answer(entry["answer"].strip(), entry)
            assert game.score(f"I say <answer>{entry['answer']}</answer>") == score, task
        assert 0 <= game.score("<answer>1</answer>") <= 1, task


def test_tasks_whose_problems_depend_on_the_hash_seed_are_refused_without_one(
    problems, monkeypatch
):
    asked = []
    for seed in "12":
        command = [sys.executable, "-c", QUESTIONS]
        variables = {**os.environ, "PYTHONHASHSEED": seed}
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        *_, questions = ended.stdout.splitlines()
        asked.append(json.loads(questions))
    first, second = asked
    differing = {task for task in first if first[task] != second[task]}
    assert "ransom_note" in differing
    assert differing <= {*BY_HASH}
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UsageError, match="PYTHONHASHSEED"):
        problems(task="ransom_note")
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert len(problems(task="ransom_note")) == 50


def test_the_splits_share_no_question_of_a_task_with_few(problems):
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train = questions(problems(task="chain_sum", config=config, problems=200))
    held_out = questions(problems(task="chain_sum", config=config, problems=200, held_out=True))
    assert len(train) > 30
    assert len(held_out) > 30
    assert not train & held_out


def test_a_task_with_a_single_question_has_one_split(problems):
    config = {"min_n": 5, "max_n": 5}
    assert len(questions(problems(task="count_bits", config=config, held_out=True))) == 1
    with pytest.raises(DataError, match="count_bits has too few questions for this config"):
        questions(problems(task="count_bits", config=config))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"task": "chain_some"}, "reasoning-gym refuses the task or its config: .*chain_some"),
        ({"config": {"terms": 2}}, "reasoning-gym refuses .*terms"),
        ({"config": {"min_terms": 0}}, "reasoning-gym refuses .*min_terms"),
        ({"config": {"seed": 2}}, "config has seed; set seed and problems"),
        ({"template": "Answer!"}, "it must contain {question}"),
    ],
)
def test_what_the_library_does_not_accept_is_refused(problems, args, message):
    with pytest.raises(UsageError, match=message):
        problems(**{"task": "chain_sum", **args})


def test_the_answer_is_what_the_last_tags_enclose(problems, make):
    row = problems(task="chain_sum").preview(0)
    answer = ast.literal_eval(metadata_of(row)["entry"])["answer"]
    tagged, untagged = make(), make(answer_tag=None)
    for game in (tagged, untagged):
        game.reset(row.metadata, 1)
    for response, is_right, is_right_untagged in (
        (f"<answer>1</answer> no, <answer> {answer}\n</answer>.", True, False),
        (f" {answer}\n", False, True),
        (f"<answer>{answer}", False, False),
    ):
        assert (tagged.score(response) == 1) == is_right
        assert (untagged.score(response) == 1) == is_right_untagged


def test_all_modules_that_evaluate_answers_are_known():
    (folder,) = LIBRARY.submodule_search_locations
    evaluating = {
        file.stem
        for file in Path(folder).rglob("*.py")
        if re.search(r"(eval|exec|parse_expr|sympify)\((answer|user)", file.read_text())
    }
    assert evaluating == {*LISTS, *FORMULAS}


@pytest.mark.parametrize("task", sorted({*LISTS, *FORMULAS} - {*BY_HASH}))
def test_an_answer_runs_no_code(problems, make, tmp_path, task):
    row = problems(task=task, problems=1).preview(0)
    game = make()
    game.reset(row.metadata, 1)
    mark = tmp_path / "mark"
    for code in (
        f"open('{mark}', 'w')",
        f"[open('{mark}', 'w')]",
        f"[*map(open, ['{mark}'], 'w')]",
    ):
        assert game.score(f"<answer>{code}</answer>") < 0.5
    assert not mark.exists()


def test_an_answer_that_takes_too_long_ends_the_episode(problems, pool, asked):
    row = problems(task="countdown", problems=1).preview(0).metadata
    with pool(seconds=5.0).calls() as calls:
        _, late = asked(
            calls,
            {"call": "reset", "row": row, "seed": 1},
            {"call": "score", "answer": "<answer>9**9**9**9</answer>"},
        )
    assert "limit" in late


def test_rows_of_another_dataset_are_refused(make):
    with pytest.raises(ValueError, match="use a dataset of type reasoning_gym"):
        make().reset({"prompt": "12+7?"}, 1)


@pytest.mark.parametrize("kind", ["environment", "dataset"])
def test_the_contract_holds(kind):
    command = [sys.executable, "-m", "rlcli", "test", kind, "reasoning_gym"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1000)
    assert ended.returncode == 0, ended.stdout + ended.stderr
