"""Answers that a library evaluates compute with numbers only."""

import pytest

from rlcli.interfaces.environments.reasoning_gym import FORMULAS, LISTS, _is_harmless


@pytest.mark.parametrize("task", FORMULAS)
@pytest.mark.parametrize(
    "formula",
    ["(3+5)*7-2", "x**2 + 3*x", "sin(x)*exp (2*x)/3 + C", "2.5*log(x)", "-Abs(X) + 1.5"],
)
def test_formulas_are_evaluated(task, formula):
    assert _is_harmless(task, formula)


@pytest.mark.parametrize("task", FORMULAS)
@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').system('true')",
        "exit(1)",
        "(exit)(1)",
        "(exit)\n(1)",
        "print (x)",
        "open",
        "lambdify(x, x)",
        "x.func(1)",
        "x. func",
        "x.\nfunc",
        "'text'",
        "[x]",
        "{x}",
        "lambda: 1",
        "ｅｘｉｔ(1)",
        "sin(x)(1)",
        "x\\\n(1)",
        "1#",
        "sin;exit",
        "a if b else c @ d",
    ],
)
def test_other_texts_are_not(task, formula):
    assert not _is_harmless(task, formula)


@pytest.mark.parametrize("task", LISTS)
def test_lists_call_nothing(task):
    assert _is_harmless(task, "[[1, 2], ['A', 'B']]")
    assert not _is_harmless(task, "[print(1)]")


def test_answers_that_are_only_compared_may_be_anything():
    assert _is_harmless("chain_sum", "exit(1)")
