"""What follows from the speeds that the ranks of a run have measured."""

import pytest

from rlcli.recipe.measured_arguments import fastest, roles_to_measure, with_choices, with_choices_of
from rlcli.recipe.resolve import load_recipe

ROLES = ("actor", "critic", "ref")


def recipe(*overrides, **dtypes):
    """ppo_math with `dtype: auto`, but for some roles."""
    chosen = dict.fromkeys(ROLES, "auto") | dtypes
    settings = [f"models.{role}.backend.args.dtype={dtype}" for role, dtype in chosen.items()]
    return load_recipe("ppo_math", [*settings, *overrides]).recipe


def dtypes(recipe):
    return {
        name: role.backend.args.get("dtype")
        for name, role in recipe.models.items()
        if role.backend.type in ("fsdp", "inference")
    }


def seconds(float32, bfloat16):
    return {"dtype": {"float32": float32, "bfloat16": bfloat16}}


def values(choices):
    return {(choice.role, choice.argument): choice.value for choice in choices}


def test_the_slowest_rank_of_a_role_decides():
    slow_in_bfloat16 = [{"actor": seconds(2.0, 1.0)}, {"actor": seconds(2.0, 5.0)}]

    assert values(fastest(slow_in_bfloat16)) == {("actor", "dtype"): "float32"}
    assert values(fastest(slow_in_bfloat16[:1])) == {("actor", "dtype"): "bfloat16"}


def test_roles_that_are_compared_get_one_dtype():
    measured = [{"actor": seconds(6.0, 3.0), "ref": seconds(1.0, 1.1)}]

    assert set(values(fastest(measured)).values()) == {"bfloat16"}


@pytest.mark.parametrize(
    ("float32", "bfloat16", "value", "reason"),
    [
        (1.8, 1.0, "bfloat16", "1.8 times as fast as float32"),
        (1.1, 1.0, "float32", "bfloat16 is not much faster"),
        (1.0, 9.0, "float32", "9.0 times as fast as bfloat16"),
    ],
)
def test_a_small_advantage_does_not_cost_exactness(float32, bfloat16, value, reason):
    [choice] = fastest([{"actor": seconds(float32, bfloat16)}])

    assert choice.value == value
    assert reason in choice.reason


def test_only_arguments_that_are_left_open_are_measured():
    open_to_all = recipe()
    fixed_actor = recipe(actor="float32")

    assert roles_to_measure(open_to_all) == ["actor", "critic", "ref"]
    assert roles_to_measure(fixed_actor) == ["critic", "ref"]


def test_weights_of_a_moving_average_stay_exact():
    averaged = recipe("graph.actor_train.hooks={copy_to: ref, eta: 0.1}")

    assert "ref" not in roles_to_measure(averaged)


def test_a_choice_is_written_as_if_the_recipe_had_named_it():
    chosen = with_choices(recipe(), fastest([{"actor": seconds(2.0, 1.0)}]))

    assert dtypes(chosen) == {"actor": "bfloat16", "critic": "auto", "ref": "auto"}


def test_a_resumed_run_keeps_its_choices():
    before = with_choices(recipe(), fastest([{"actor": seconds(2.0, 1.0)}]))

    assert dtypes(with_choices_of(before, recipe()))["actor"] == "bfloat16"
    explicit = recipe(actor="float32")
    assert dtypes(with_choices_of(before, explicit))["actor"] == "float32"
