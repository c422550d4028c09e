"""Which keys of a recipe may change when a run is resumed."""

import pytest

from rlcli.recipe.changes import RULES, Kind, changes, kind_of_change
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import SECTIONS


def test_every_section_has_a_rule():
    assert set(SECTIONS) <= set(RULES)


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("seed=7", Kind.FORBIDDEN),
        ("models.actor.path=recipe:sft_math#critic", Kind.FORBIDDEN),
        ("train.shuffle=false", Kind.FORBIDDEN),
        ("graph.critic_train.call=evaluate", Kind.FORBIDDEN),
        ("ppo.kl_ctl=0.5", Kind.ALTERS),
        ("models.actor.backend.args.lr=1e-6", Kind.ALTERS),
        ("train.prompts_per_step=16", Kind.ALTERS),
        ("generation.temperature=0.5", Kind.ALTERS),
        ("train.max_tokens_per_microbatch=999", Kind.SAFE),
        ("checkpoint.every_steps=5", Kind.SAFE),
        ("log.plot=false", Kind.SAFE),
        ("launch=local", Kind.SAFE),
        ("models.critic.mesh.dp=1", Kind.SAFE),
    ],
)
def test_a_change_is_what_its_rule_says(override, kind):
    before = load_recipe("ppo_math").recipe
    now = before if override.startswith(("models.actor.path", "graph.")) else load_recipe("ppo_math", [override]).recipe
    if now is before:
        assert kind_of_change(tuple(override.partition("=")[0].split("."))) is kind
        return
    assert {change.kind for change in changes(before, now)} == {kind}


@pytest.mark.parametrize(("schedule", "kind"), [("constant", Kind.SAFE), ("linear", Kind.ALTERS)])
def test_another_length_alters_a_run_whose_learning_rate_decays_over_it(schedule, kind):
    settings = [f"models.{role}.backend.args.schedule={schedule}" for role in ("actor", "critic")]
    before, now = (load_recipe("ppo_math", [*settings, f"train.steps={steps}"]).recipe for steps in (20, 80))
    assert [change.kind for change in changes(before, now)] == [kind]


def test_a_change_tells_both_values():
    before, now = load_recipe("ppo_math").recipe, load_recipe("ppo_math", ["train.steps=80"]).recipe
    (change,) = changes(before, now)
    assert (change.key, change.before, change.now) == ("train.steps", 20, 80)


def test_equal_recipes_have_no_changes():
    recipe = load_recipe("ppo_math").recipe
    assert changes(recipe, recipe) == []
