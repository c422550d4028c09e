"""Follows the hints of errors: reads the overrides in them, and applies these to the recipe."""

from __future__ import annotations

import re

from rlcli.errors import Problem, RecipeError
from rlcli.recipe.resolve import load_recipe

ABSENT = "lora=8"
"""What rlcli does not have; the hint says what comes nearest instead."""


def problems(*words: str) -> list[Problem]:
    recipe, *overrides = words
    profiles = []
    while "--with" in overrides:
        at = overrides.index("--with")
        profiles.append(overrides[at + 1])
        del overrides[at : at + 2]
    try:
        load_recipe(recipe, overrides, profiles)
    except RecipeError as error:
        return list(error.problems)
    return []


def still_wrong(recipe: str, words: list[str], hint: str) -> list[str]:
    """What is still wrong with a recipe after a hint is followed, for each of its alternatives."""
    problems_left: list[str] = []
    for alternative in re.split(r",? or ", hint):
        if followed := followed_overrides(alternative):
            left = problems(recipe, *with_overrides(words, followed))
            problems_left += [f"{' '.join(followed)}: {problem.what}" for problem in left]
    return problems_left


def followed_overrides(hint: str) -> list[str]:
    """The overrides and profiles that a hint, or one of its alternatives, consists of or names."""
    profiles = re.findall(r"--with (\w+)", hint)
    if profiles:
        return ["--with", profiles[0]]
    return [
        word.rstrip(",;")
        for word in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*=[^\s;,]+", hint)
        if "…" not in word and not re.search(r"=[A-Z]+$", word)
    ]


def with_overrides(words: list[str], followed: list[str]) -> list[str]:
    """The command line after the hint: the last value of a key counts, as does a profile."""
    keys = {word.partition("=")[0] for word in followed}
    keys |= {word.partition("=")[0] for word in words if word.endswith(ABSENT)}
    if followed[:1] == ["--with"]:
        return followed
    return [word for word in words if word.partition("=")[0] not in keys] + followed
