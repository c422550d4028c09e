"""Rows that hold pairs count as the sequences that they hold."""

import pytest

from rlcli.recipe.resolve import load_recipe
from rlcli.topology.report import make_plan


@pytest.mark.parametrize(("pairs", "sequences"), [(1, 64), (3, 192)])
def test_the_arithmetic_of_a_step_counts_sequences(pairs, sequences):
    plan = make_plan(
        load_recipe("dpo_arithmetic", [f"datasets.train.args.pairs_per_problem={pairs}"])
    )
    batch = plan.topology.batch
    assert (batch.prompts, batch.responses_per_prompt, batch.sequences) == (32, 1, sequences)
    lines = [f"60 steps of 32 rows x {2 * pairs} sequences at most = {sequences} sequences"]
    assert batch.lines()[:2] == [
        *lines,
        f"actor: {sequences} sequences ({sequences} per rank) in 1 update",
    ]


def test_a_mixture_has_as_many_sequences_per_row_as_its_largest_source(tmp_path):
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        "extends: dpo_arithmetic\n"
        "datasets:\n"
        "  one: arithmetic_pairs\n"
        "  two: {type: arithmetic_pairs, args: {pairs_per_problem: 2, seed: 1}}\n"
        "  train: {type: mixture, args: {weights: {one: 1.0, two: 1.0}}}\n"
    )
    assert make_plan(load_recipe(recipe)).topology.batch.sequences == 32 * 4
