"""A reward is tried on rows of a file: `rlcli test reward NAME --data FILE`."""

import json

import pytest

from rlcli.cli.main import main

ROWS = [
    {"prompt": "1+1?", "response": "so \\boxed{2}", "answer": "2"},
    {"prompt": "\x1b[2J", "response": "four", "answer": "3"},
    {"answer": "4"},
]


@pytest.fixture
def trial(tmp_path, monkeypatch, capsys):
    """Try a reward on rows; returns the exit code and both outputs."""
    monkeypatch.chdir(tmp_path)

    def run(*words, rows=ROWS):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(["test", *words, "--data", "rows.jsonl"])
        return ended.value.code, *capsys.readouterr()

    return run


def test_rewards_reasons_statistics_and_speed_are_shown(trial):
    code, out, err = trial("reward", "math_reward")
    assert (code, err) == (0, "")
    first, second, third = (line for line in out.splitlines() if line[1:4] == "   ")
    assert first.split()[:2] == ["1", "1.00"]
    assert second.split()[:2] == ["2", "0"]
    assert "wrong answer: four" in second
    assert third.split()[:2] == ["3", "1.00"], "an answer stands for a missing response"
    assert "math_reward: 3 rows, mean 0.667, from 0 to 1\n0: 1x  1: 2x\n" in out
    assert "rewards per second" in out


def test_arguments_and_json(trial):
    _, out, _ = trial("reward", "math_reward", "correct_reward=5", "wrong_reward=-1", "--json")
    document = json.loads(out)
    assert [row["reward"] for row in document["rows"]] == [5.0, -1.0, 5.0]
    assert document["mean"] == 3.0
    assert document["rewards_per_second"] > 0


def test_a_function_of_ones_own_is_tried_with_all_fields_of_the_rows(trial, tmp_path):
    body = "def score(response, level):\n    return level + len(response)\n"
    (tmp_path / "own.py").write_text(body)
    rows = [{"response": "abc", "level": 2}, {"response": "", "level": 1.5}]
    words = ("reward", "function_reward", "path=own.py", "--json")
    code, out, err = trial(*words, rows=rows)
    assert code == 0, err
    assert [row["reward"] for row in json.loads(out)["rows"]] == [5.0, 1.5]


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("answer in response", "line 1 (its response: that of the next)"),
        ("response", "line 1 (its response: none)"),
    ],
)
def test_a_function_without_a_number_for_some_responses_is_reported(
    trial, tmp_path, condition, says
):
    body = f"def score(response, answer):\n    if {condition}:\n        return 1.0\n"
    (tmp_path / "own.py").write_text(body)
    rows = [{"answer": "4"}, {"answer": "5"}]
    code, _, err = trial("reward", "function_reward", "path=own.py", rows=rows)
    assert code == 2
    assert f"{tmp_path / 'own.py'}:1" in err
    assert says in err
    assert "it returned None, which is not a number" in err


@pytest.mark.parametrize(
    ("words", "rows", "code", "says"),
    [
        (("reward", "math_reward"), [], 4, "rows.jsonl has no rows"),
        (("reward", "math_reward"), [{"a": 1}], 4, "rows.jsonl:1: this row has neither"),
        (("reward", "math_reward"), [{"response": "1"}], 4, "has no answer to compare with"),
        (("reward", "sft"), ROWS, 2, "sft does not score plain texts"),
        (("reward", "math_rewrad"), ROWS, 2, "did you mean 'math_reward'?"),
        (("reward", "math_reward", "corect_reward=1"), ROWS, 2, "did you mean 'correct_reward'?"),
        (("dataset", "arithmetic"), ROWS, 2, "--data is for a reward"),
    ],
    ids=str,
)
def test_mistakes(trial, words, rows, code, says):
    outcome, out, err = trial(*words, rows=rows)
    assert (outcome, out) == (code, "")
    assert says in err
