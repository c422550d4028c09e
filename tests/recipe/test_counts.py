"""Numbers that are a mistake in any recipe."""

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.resolve import load_recipe


@pytest.mark.parametrize(
    "override",
    [
        "grpo.eps_clip=1.5",
        "grpo.ppo_epochs=1000000000000",
        "train.prompts_per_step=1000000000000",
        "train.max_staleness=1000000000",
        "train.steps=1000000000000",
        "train.microbatches=1000000000000",
        "train.max_tokens_per_microbatch=1000000000000",
        "train.eval.every_steps=1000000000000",
        "checkpoint.every_steps=1000000000000",
        "checkpoint.keep_last=1000000000000",
        "checkpoint.every_seconds=1e300",
        "launch.step_deadline=1e300",
        "launch.max_restarts=1000000000000",
        "log.samples_per_step=1000000000000",
        "generation.responses_per_prompt=1000000000000",
        "graph.reward_inf.interface.args.workers=1000000000000",
    ],
)
def test_a_number_out_of_any_reasonable_range_is_refused(override):
    with pytest.raises(RecipeError) as caught:
        load_recipe("grpo_math", [override])
    assert override.partition("=")[0].rpartition(".")[2] in str(caught.value)
