"""The built-in environments."""

from pathlib import Path

import pytest

from rlcli.api.config import EnvironmentAbstraction
from rlcli.api.environment import ToolMistake, call_tool
from rlcli.registry import make_environment

ROOT = Path(__file__).parents[2]


def make(name, **args):
    return make_environment(EnvironmentAbstraction(name, args))


@pytest.mark.parametrize(
    ("expression", "total"),
    [("12+7", "19"), ("-3+10-2", "5"), ("007", "7"), ("+" + "1+" * 9 + "1", "10")],
)
def test_the_calculator_works_out_sums(expression, total):
    assert call_tool(make("calculator"), "calculate", {"expression": expression}) == total


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "2**9", "__import__('os')", "1 + 1", "1+1\n", "٣+١", "9" * 10, "1+" * 200 + "1"],
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises(ToolMistake, match="only sums of whole numbers"):
        call_tool(make("calculator"), "calculate", {"expression": expression})


def test_the_documented_calculator_is_the_one_that_is_built_in():
    source = (ROOT / "interfaces" / "environments" / "calculator.py").read_text()
    assert source in (ROOT / "docs" / "environments.md").read_text()
    assert len(source.splitlines()) <= 30


def test_halving_the_range_finds_every_number():
    hidden = set()
    for seed in range(40):
        game = make("guess")
        game.reset({}, seed)
        low, high, rewards = 1, 7, []
        for _ in range(3):
            guess = (low + high) // 2
            observation = game.step(f" {guess} ")
            rewards.append(observation.reward)
            if observation.done:
                break
            low, high = (guess + 1, high) if "higher" in observation.text else (low, guess - 1)
        assert (observation.done, rewards[-1]) == (True, 1.0)
        hidden.add(guess)
    assert hidden == set(range(1, 8))


@pytest.mark.parametrize("action", ["", "four", "4.0", "-4", "٤", "4 4", "9" * 10**6])
def test_what_is_not_a_number_costs_a_little(action):
    game = make("guess")
    game.reset({}, 0)
    observation = game.step(action)
    assert (observation.text, observation.reward, observation.done) == (
        "not a number\n",
        -0.1,
        False,
    )


def test_the_hidden_number_depends_on_the_seed_alone():
    def hidden(seed):
        game = make("guess", highest=1000)
        game.reset({"answer": "3"}, seed)
        return next(n for n in range(1, 1001) if game.step(str(n)).done)

    assert hidden(3) == hidden(3)
    assert len({hidden(seed) for seed in range(8)}) > 4
