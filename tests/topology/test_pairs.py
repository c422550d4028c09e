"""Rows that hold pairs count as the sequences that they hold."""

import pytest

from rlcli.recipe.resolve import load_recipe
from rlcli.topology.report import make_plan


@pytest.mark.parametrize(("pairs", "sequences"), [(1, 64), (3, 192)])
def test_the_arithmetic_of_a_step_counts_sequences(pairs, sequences):
    plan = make_plan(load_recipe("dpo_arithmetic", [f"datasets.train.args.pairs_per_problem={pairs}"]))
    batch = plan.topology.batch
    assert (batch.prompts, batch.responses_per_prompt, batch.sequences) == (32, 1, sequences)
    lines = [f"60 steps of 32 rows x {2 * pairs} sequences at most = {sequences} sequences"]
    assert batch.lines()[:2] == [*lines, f"actor: 1 update of {sequences} sequences; {sequences} per rank"]
