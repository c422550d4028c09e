"""How full micro-batches are: compared with values worked out by hand,
and as `rlcli check` reports it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcli.inspect.checklist import preflight
from rlcli.inspect.findings import quantile
from rlcli.inspect.packing import pack_steps
from rlcli.recipe.resolve import load_recipe
from rlcli.registry import load


def test_packing_of_a_small_step():
    packing = pack_steps([[[6], [4], [3], [5]]], capacity=10, ranks=1, minibatches=1, cut=False)
    assert (packing.micro_batches, packing.fill) == ([2], 0.9)  # 6 + 4, 5 + 3
    assert packing.figures() == {
        "row_tokens_min": 3,
        "row_tokens_median": 4,
        "row_tokens_p95": 6,
        "row_tokens_max": 6,
        "micro_batches_min": 2,
        "micro_batches_max": 2,
        "fill": 0.9,
    }


@pytest.mark.parametrize(
    ("numbers", "fraction", "value"),
    [(20, 0.95, 19), (100, 0.99, 99), (101, 0.99, 100), (3, 0.5, 2), (4, 0.5, 2), (1, 0.0, 1)],
)
def test_a_quantile_is_the_least_number_that_this_fraction_does_not_exceed(
    numbers, fraction, value
):
    assert quantile(range(1, numbers + 1), fraction) == value


def test_ranks_and_minibatches_are_packed_separately():
    assert pack_steps([[[5]] * 4], 10, ranks=2, minibatches=1, cut=False).micro_batches == [1, 1]
    assert pack_steps([[[5]] * 4], 10, ranks=1, minibatches=4, cut=False).micro_batches == [4]
    # one rank idles
    assert pack_steps([[[5]]], 10, ranks=2, minibatches=1, cut=False).micro_batches == [1, 1]


def test_sequences_of_a_row_stay_together_unless_cut():
    rows = [[[6, 4], [4, 6]]]
    assert pack_steps(rows, 10, 1, 1, cut=False).micro_batches == [2]
    assert pack_steps([[[6, 6], [4, 4]]], 12, 1, 1, cut=False).micro_batches == [2]
    assert pack_steps([[[6, 6], [4, 4]]], 10, 1, 1, cut=True).micro_batches == [2]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_fill_is_at_most_one_and_all_rows_are_packed(rows, ranks, minibatches):
    packing = pack_steps([[[length] for length in rows]], 50, ranks, minibatches, cut=False)
    assert 0 < packing.fill <= 1
    assert sum(packing.rows) == sum(rows)


RECIPE = """\
extends: base/sft
models:
  actor:
    scratch: {model_type: llama, hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}
    tokenizer: tok
datasets: {train: {type: prompt_answer, args: {path: rows.jsonl}}}
train: {steps: 2, prompts_per_step: 2, max_tokens_per_microbatch: 10, shuffle: false}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """mine.yaml with rows of 6, 8, 6 and 8 tokens."""
    load("datasets", "arithmetic").make_tokenizer().save_pretrained(tmp_path / "tok")
    rows = [{"prompt": "1+1", "answer": "2"}, {"prompt": "11+11", "answer": "2"}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)


def packing_of(*overrides):
    return next(
        (
            finding
            for finding in preflight(load_recipe("mine.yaml", overrides))
            if "packing" in finding.about
        ),
        None,
    )


def test_check_reports_how_full_micro_batches_are(recipe):
    finding = packing_of()
    lengths = sorted(finding.figures[f"row_tokens_{name}"] for name in ("min", "max"))
    fill = 2 * sum(lengths) / (2 * 2 * 10)
    assert (finding.level, finding.figures["micro_batches_max"]) == ("ok", 2)
    assert finding.figures["fill"] == pytest.approx(fill, abs=1e-4)
    assert "2 micro-batches of a rank per step" in finding.says
    assert "in the first 2 steps" in finding.says
    assert "1 micro-batch of a rank" in packing_of("train.max_tokens_per_microbatch=1000").says
    # a row that does not fit is a separate error
    assert packing_of("train.max_tokens_per_microbatch=5") is None


def test_responses_count_with_their_full_length(monkeypatch):
    resolved = load_recipe(
        "ppo_math", ["datasets.train.args.problems=300", "generation.max_new_tokens=64"]
    )
    finding = next(finding for finding in preflight(resolved, 5) if "packing" in finding.about)
    assert "rows with responses of 64 tokens" in finding.says
    responses = resolved.recipe.generation.responses_per_prompt
    assert finding.figures["row_tokens_min"] >= responses * 65
