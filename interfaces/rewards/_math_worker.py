"""A process that compares mathematical expressions. Started by `_math_pool`, as a script."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rlcli.interfaces.rewards._worker import Broken, Work, serve


def parsed(latex: str) -> Any:
    """The whole text as one expression; raises if it is not one. (math-verify's `parse` would
    search for one in it.)"""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from math_verify.grader import should_treat_as_complex

    normalized = NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="none",
        equations=False,
    )
    return latex2sympy(
        latex, is_real=not should_treat_as_complex(latex), normalization_config=normalized
    )


parsed_gold = lru_cache(maxsize=256)(parsed)


def compare(answer: str, expected: str) -> dict[str, Any]:
    from math_verify import verify

    try:
        gold = parsed_gold(expected)
    except Exception:  # a text that looked like an expression, such as "red apples"
        return {"equal": answer.split() == expected.split()}
    try:
        expression = parsed(answer)
    except Exception:
        return {"unparsed": True}
    return {"equal": bool(verify(gold, expression, timeout_seconds=None))}


def work(task: dict[str, Any]) -> dict[str, Any]:
    try:
        return compare(task["answer"], task["expected"])
    except Exception as problem:  # caused by the answer: the gold could be read
        return {"crashed": f"{type(problem).__name__}: {str(problem)[:200]}"}


def prepare(settings: dict[str, Any]) -> Work:
    try:
        import math_verify  # noqa: F401
    except Exception as problem:
        raise Broken(f"{type(problem).__name__}: {problem}") from problem
    return work


if __name__ == "__main__":
    serve(prepare)
