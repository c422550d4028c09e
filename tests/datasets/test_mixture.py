"""Mixtures: shares, passes, ids, and their sources."""

import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility, SequenceSample
from rlcli.datasets.mixture import interleaved, row_counts, uses
from rlcli.errors import RecipeError, UsageError
from rlcli.inspect.checklist import preflight
from rlcli.inspect.rows import open_dataset
from rlcli.recipe.components import dataset_keys
from rlcli.recipe.resolve import load_recipe
from rlcli.registry import make_dataset
from rlcli.testing.tokenizer import byte_tokenizer


@pytest.fixture
def build(tmp_path):
    """Builds a mixture of files with the given numbers of rows."""

    def make(lengths, weights, kind="prompt_only", **args):
        described = {}
        for name, length in lengths.items():
            path = tmp_path / f"{name}.jsonl"
            path.write_text(
                "\n".join(
                    json.dumps({"prompt": f"{name}{n}", "answer": "a"}) for n in range(length)
                )
            )
            described[name] = DatasetAbstraction(kind, {"path": str(path)})
        described["train"] = DatasetAbstraction("mixture", {"weights": weights, **args})
        util = DatasetUtility(1, 0, 1, byte_tokenizer(), described)
        return make_dataset(described["train"], util)

    return make


def ids(dataset):
    return [dataset.preview(row).id for row in range(len(dataset))]


def test_shares_passes_and_ids_of_a_mixture(build):
    mixture = build({"a": 4, "b": 2}, {"a": 1, "b": 1})
    assert ids(mixture) == [
        "a/a:1",
        "b/b:1",
        "a/a:2",
        "b/b:2",
        "a/a:3",
        "b/b:1#2",
        "a/a:4",
        "b/b:2#2",
    ]
    assert [mixture[row].ids[0] for row in range(8)] == ids(mixture)
    assert mixture[1].metadata["source"] == ["b"]
    assert mixture.notes == [
        "a: 4 rows, 50 % of all, 1.00 passes over its 4",
        "b: 4 rows, 50 % of all, 2.00 passes over its 2",
    ]


def test_an_epoch_of_fixed_length_uses_part_of_a_pass(build):
    mixture = build({"a": 10, "b": 10}, {"a": 3, "b": 1}, rows=8)
    assert Counter(id_[0] for id_ in ids(mixture)) == {"a": 6, "b": 2}
    assert len(set(ids(mixture))) == 8
    assert ids(build({"a": 10, "b": 10}, {"a": 3, "b": 1}, rows=8)) == ids(mixture)
    longer = build({"a": 10, "b": 10}, {"a": 3, "b": 1}, rows=9)
    assert longer.digest() != mixture.digest()


def test_the_digest_depends_on_the_text_of_every_dataset(build, tmp_path):
    before = build({"a": 3, "b": 3}, {"a": 1, "b": 1}).digest()
    assert build({"a": 3, "b": 3}, {"a": 1, "b": 1}).digest() == before
    assert build({"a": 3, "b": 3}, {"a": 1, "b": 1}, kind="prompt_answer").digest() != before


LENGTHS = st.dictionaries(st.sampled_from("abc"), st.integers(1, 7), min_size=1)


@given(LENGTHS, st.data())
def test_every_row_is_used_before_any_is_repeated(lengths, data):
    weights = {name: data.draw(st.sampled_from([0.1, 0.3, 1, 2, 2.5])) for name in lengths}
    rows = data.draw(st.one_of(st.none(), st.integers(1, 40)))
    counts = row_counts(lengths, weights, rows)
    assert rows is None or sum(counts.values()) == rows
    total = sum(counts.values())
    for name, count in counts.items():
        assert abs(count - total * weights[name] / sum(weights.values())) < 1
        assert rows is not None or count >= lengths[name]
    plan = interleaved({name: uses(lengths[name], count, 0) for name, count in counts.items()})
    assert len(set(plan)) == len(plan) == total
    for name, length in lengths.items():
        times = Counter(row for one, row, _ in plan if one == name)
        used = [times[row] for row in range(length)]
        assert max(used) - min(used) <= 1
        passes = [number for one, _, number in plan if one == name]
        assert passes == sorted(passes)
        so_far = [
            sum(one == name for one, *_ in plan[:end]) - counts[name] * end / total
            for end in range(total + 1)
        ]
        assert all(abs(drift) < len(lengths) for drift in so_far)


def test_rows_with_different_metadata_form_a_batch(tmp_path):
    described = {
        "sums": DatasetAbstraction("arithmetic", {"problems": 3}),
        "train": DatasetAbstraction("mixture", {"weights": {"plain": 1, "sums": 1}}),
    }
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}')
    described["plain"] = DatasetAbstraction("prompt_only", {"path": str(tmp_path / "p.jsonl")})
    mixture = make_dataset(described["train"], DatasetUtility(1, 0, 1, byte_tokenizer(), described))
    batch = SequenceSample.gather([mixture[row] for row in range(len(mixture))])
    assert sorted(map(str, batch.metadata["source"])) == ["plain"] * 3 + ["sums"] * 3
    assert batch.metadata["answer"].count(None) == 3


def test_invalid_mixtures_are_refused(build, tmp_path):
    with pytest.raises(
        UsageError,
        match="weights names c, which is not another dataset of the recipe; there is a, train",
    ):
        build({"a": 1}, {"a": 1, "c": 1})
    with pytest.raises(UsageError, match="weights names train"):
        build({"a": 1}, {"a": 1, "train": 1})
    for weights in ({}, {"a": 0}, {"a": -1.0}):
        with pytest.raises(UsageError, match="each with a number above 0"):
            build({"a": 1}, weights)
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}')
    stream = DatasetAbstraction(
        "prompt_only", {"path": str(tmp_path / "a.jsonl"), "streaming": True}
    )
    of_a = DatasetAbstraction("mixture", {"weights": {"a": 1}})
    with pytest.raises(UsageError, match="weights names a, a stream"):
        make_dataset(of_a, DatasetUtility(1, 0, 1, byte_tokenizer(), {"a": stream}))
    described = {
        "a": DatasetAbstraction("arithmetic", {"problems": 2}),
        "b": DatasetAbstraction("arithmetic_demonstrations", {"problems": 2}),
    }
    util = DatasetUtility(1, 0, 1, byte_tokenizer(), described)
    with pytest.raises(
        UsageError, match=r"different keys, .* a: packed_prompts; b: packed_input_ids, prompt_mask"
    ):
        make_dataset(DatasetAbstraction("mixture", {"weights": {"a": 1, "b": 1}}), util)


# -- in a recipe -----------------------------------------------------------------------------------

RECIPE = """\
extends: base/sft
models:
  actor:
    scratch: {model_type: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}
    tokenizer: builtin:arithmetic
datasets:
  train: {type: mixture, args: {weights: {easy: 3, hard: 1}}}
  easy: {type: arithmetic_demonstrations, args: {problems: 12, levels: [1], hasty: [0.0]}}
  hard: {type: arithmetic_demonstrations, args: {problems: 8, levels: [4], hasty: [0.0], seed: 1}}
train: {steps: 2, prompts_per_step: 4}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)


def test_a_mixture_has_the_keys_of_its_sources(recipe):
    datasets = load_recipe("mine.yaml").recipe.datasets
    assert dataset_keys(datasets, "train") == ("packed_input_ids", "prompt_mask")
    assert load_recipe("mine.yaml").recipe.used_datasets == ("train",)


def test_check_reports_how_many_rows_of_each_source_an_epoch_uses(recipe):
    findings = {one.about: one for one in preflight(load_recipe("mine.yaml"), 5)}
    assert findings["train"].says.startswith("32 rows of mixture")
    assert findings["train"].details[0] == "easy: 24 rows, 75 % of all, 2.00 passes over its 12"
    assert {"easy", "hard", "train loss mask", "train packing"} <= set(findings)
    assert "train repeats" not in findings  # using a row twice is not a repetition


def test_an_unknown_source_is_refused_with_its_location(recipe, tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("hard: 1", "hrad: 1"))
    with pytest.raises(RecipeError) as caught:
        load_recipe("mine.yaml")
    (problem,) = caught.value.problems
    assert (problem.what, problem.hint) == ("no dataset is named 'hrad'", "did you mean hard?")
    assert problem.where.endswith("mine.yaml:7:58")


def test_the_order_of_rows_does_not_depend_on_where_a_run_starts(recipe):
    opened = open_dataset(load_recipe("mine.yaml"), "train")
    again = open_dataset(load_recipe("mine.yaml"), "train")
    late = [again.preview(row).id for row in range(16, len(again))]
    assert [opened.preview(row).id for row in range(len(opened))][16:] == late
    assert all(a != b for a, b in pairwise(late))
