"""What calls ask of the backends of their roles."""

import pytest

from rlcli.recipe.abilities import runs_calls_of
from rlcli.recipe.resolve import load_recipe


@pytest.fixture(scope="module")
def ppo():
    return load_recipe("ppo_math", []).recipe


@pytest.mark.parametrize(
    ("backend", "roles"),
    [
        ("fsdp", {"actor", "critic", "ref"}),
        ("megatron", {"critic", "ref"}),
        ("inference", {"ref"}),
        ("sglang", set()),
    ],
)
def test_a_backend_has_the_abilities_for_all_calls_of_a_role(ppo, backend, roles):
    able = {role for role in ("actor", "critic", "ref") if runs_calls_of(backend, role, ppo)}
    assert able == roles


def test_calls_of_evaluations_count(ppo):
    sampler = ppo.model_copy(update={"graph": {"actor_gen": ppo.graph["actor_gen"]}})
    assert runs_calls_of("sglang", "actor", sampler)
    scoring = ppo.graph["ref_inf"].model_copy(update={"model": "actor", "call": "evaluate"})
    evaluation = ppo.train.eval.model_copy(update={"graph": {"score": scoring}})
    train = ppo.train.model_copy(update={"eval": evaluation})
    evaluated = sampler.model_copy(update={"train": train})
    assert not runs_calls_of("sglang", "actor", evaluated)
    assert runs_calls_of("fsdp", "actor", evaluated)
