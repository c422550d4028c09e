"""Rows chosen and ordered by rewards that an earlier run recorded."""

import json

import pytest

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.errors import DataError, RecipeError, UsageError
from rlcli.observe.samples import SampleRecord, SampleWriter
from rlcli.recipe.resolve import load_recipe
from rlcli.registry import make_dataset
from rlcli.testing.tokenizer import byte_tokenizer

REWARDS = {"rows:1": [0, 0], "rows:2": [0, 1], "rows:3": [1, 1], "rows:4": [1, 1, 0, 1]}
"""Rows 5 and 6 have no rewards."""


@pytest.fixture
def build(tmp_path):
    """Builds a dataset of six rows with these settings of `scores`."""
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"p{n}"}) for n in range(1, 7))
    )
    (tmp_path / "run").mkdir()
    with SampleWriter(tmp_path / "run" / "samples.jsonl") as writer:
        for id_, rewards in REWARDS.items():
            for reward in rewards:
                writer.write(SampleRecord(step=1, id=id_, prompt="", response="", reward=reward))
        writer.write(SampleRecord(step=1, id="rows:5", prompt="", response="", reward=None))
        writer.write(
            SampleRecord(step=1, id="rows:6", prompt="", response="", reward=1, phase="eval")
        )

    def make(name="prompt_only", **scores):
        args = {
            "path": str(tmp_path / "rows.jsonl"),
            "scores": {"path": str(tmp_path / "run"), **scores},
        }
        return make_dataset(
            DatasetAbstraction(name, args), DatasetUtility(1, 0, 1, byte_tokenizer())
        )

    return make


def rows(dataset):
    return [int(dataset.preview(row).id.rpartition(":")[2]) for row in range(len(dataset))]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"min": 0.1}, [2, 3, 4, 5, 6]),
        ({"max": 0.9}, [1, 2, 4, 5, 6]),
        ({"min": 0.5, "max": 0.75}, [2, 4, 5, 6]),
        ({"min": 0.1, "max": 0.9, "unknown": "drop"}, [2, 4]),
        ({"order": "easy_first"}, [3, 4, 2, 1, 5, 6]),
        ({"order": "hard_first"}, [1, 2, 4, 3, 5, 6]),
        ({"min": 0.1, "order": "hard_first", "unknown": "drop"}, [2, 4, 3]),
    ],
)
@pytest.mark.parametrize("name", ["prompt_only", "hf"])
def test_rows_are_selected_and_ordered_by_their_mean_reward(build, name, scores, expected):
    assert rows(build(name, **scores)) == expected


def test_notes_count_the_rows_left_out_by_scores(build):
    dataset = build(min=0.1, max=0.9)
    assert dataset.notes == ["left out by scores: 1 too hard, 1 too easy; without a score, kept: 2"]
    assert len(dataset.survey().lengths) == 4
    assert build(min=0.1).digest() != build().digest() == build().digest()


def test_unrelated_scores_and_impossible_limits_are_refused(build, tmp_path):
    unrelated = tmp_path / "other.jsonl"
    unrelated.write_text('{"id": "x:1", "reward": 1}\n')
    with pytest.raises(
        DataError, match=r"none of the 1 ids in .*other\.jsonl is that of a row of .*rows\.jsonl"
    ) as caught:
        build(path=str(unrelated))
    assert (caught.value.hint, caught.value.exit_code) == (
        "rows are called rows:1, …; scores are of x:1, …",
        4,
    )
    with pytest.raises(DataError, match="no rows remain; left out by scores: 4 too hard"):
        build(min=2, unknown="drop")
    with pytest.raises(UsageError, match=r"min is 0\.9, above max, 0\.1"):
        build(min=0.9, max=0.1)
    with pytest.raises(DataError, match="cannot read"):
        build(path=str(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        '{"id": "rows:1"}',
        '{"reward": 1}',
        '{"id": "rows:1", "reward": "much"}',
        '{"id": "rows:1", "rewards": [null]}',
    ],
)
def test_an_invalid_line_of_scores_is_reported_with_its_number(build, tmp_path, line):
    (tmp_path / "scores.jsonl").write_text('{"id": "rows:1", "rewards": [1, 0]}\n' + line)
    with pytest.raises(DataError, match=r"scores\.jsonl:2: a score needs an id and a reward"):
        build(path=str(tmp_path / "scores.jsonl"))


RECIPE = """\
extends: base/sft
models: {actor: {scratch: {model_type: llama}, tokenizer: builtin:arithmetic}}
datasets: {train: {type: prompt_answer, args: {path: rows.jsonl, scores: {path: run, min: 0.5}}}}
train: {steps: 1}
"""


def test_paths_of_scores_are_relative_to_the_recipe(build, tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    scores = load_recipe(tmp_path / "mine.yaml").recipe.datasets["train"].args["scores"]
    assert scores == {"path": str(tmp_path / "run"), "min": 0.5}
    with pytest.raises(
        DataError, match=r"datasets\.train\.args\.scores\.path: no such file: nowhere"
    ):
        load_recipe(tmp_path / "mine.yaml", ["datasets.train.args.scores.path=nowhere"])
    with pytest.raises(RecipeError, match=r"scores\.mni\. hint: did you mean min"):
        load_recipe(tmp_path / "mine.yaml", ["datasets.train.args.scores.mni=1"])
