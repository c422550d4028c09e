"""What a recipe's components require of this machine is found before anything starts."""

import pytest

from rlcli.cli.main import main
from rlcli.recipe.requirements_here import missing_here
from rlcli.recipe.resolve import load_recipe

JUDGE = (
    "graph.reward_inf.interface={type: llm_judge, args: {url: 'https://h/v1', model: m, "
    "api_key_env: RLCLI_NO_KEY}}"
)
SERVERS = (
    "models.actor.rollout.backend={type: sglang, args: {urls: ['http://h:1'], "
    "api_key_env: RLCLI_NO_KEY}}"
)


@pytest.mark.parametrize(("component", "override"), [("llm_judge", JUDGE), ("sglang", SERVERS)])
def test_an_unset_environment_variable_is_reported(monkeypatch, component, override):
    monkeypatch.delenv("RLCLI_NO_KEY", raising=False)
    (error,) = missing_here(load_recipe("grpo_math", [override]))
    assert (error.what, error.exit_code) == (f"{component}: the environment has no RLCLI_NO_KEY", 6)
    assert error.hint == "export RLCLI_NO_KEY=…"
    monkeypatch.setenv("RLCLI_NO_KEY", "secret")
    assert not [*missing_here(load_recipe("grpo_math", [override]))]


def test_validate_refuses_a_missing_api_key(monkeypatch, capsys):
    monkeypatch.delenv("RLCLI_NO_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["validate", "grpo_math", SERVERS])
    assert ended.value.code == 6
    assert "sglang: the environment has no RLCLI_NO_KEY" in capsys.readouterr().err
