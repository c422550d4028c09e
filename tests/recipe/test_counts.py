"""Numbers that are a mistake, whatever the recipe."""

import pytest

from rlcli.errors import RecipeError
from rlcli.recipe.resolve import load_recipe


@pytest.mark.parametrize(
    "override", ["grpo.eps_clip=1.5", "train.prompts_per_step=1000000000000", "train.max_staleness=1000000000"]
)
def test_a_number_out_of_any_reasonable_range_is_refused(override):
    with pytest.raises(RecipeError) as caught:
        load_recipe("grpo_math", [override])
    assert override.partition("=")[0].rpartition(".")[2] in str(caught.value)
