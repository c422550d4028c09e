"""`path: recipe:sft_math#actor`: recipes whose results a recipe starts from,
and the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlcli.errors import RecipeError
from rlcli.recipe.lengths import positions_of
from rlcli.recipe.parsing.finding import find_recipe
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.resolve import Resolved, load_recipe
from rlcli.recipe.validation.semantics import lengths
from rlcli.recipe.validation.semantics.notes import Notes


@dataclass(frozen=True)
class WarmStart:
    """A role that starts from the result of another recipe."""

    role: str
    source: Resolved
    """The other recipe."""
    source_role: str
    """The role in it whose saved model is used."""


def warm_starts(resolved: Resolved) -> list[WarmStart]:
    """The warm starts of the recipe itself. Raises RecipeError if it names a recipe or role that
    does not exist.

    The other recipe is loaded as it is, once: neither profiles nor overrides of this one apply to
    it.
    """
    if "warm_starts" not in resolved.derived:
        resolved.derived["warm_starts"] = _loaded(resolved)
    starts: list[WarmStart] = resolved.derived["warm_starts"]
    return starts


def _loaded(resolved: Resolved) -> list[WarmStart]:
    starts: list[WarmStart] = []
    for name, role in resolved.recipe.models.items():
        if role.warm_start is None:
            continue
        recipe, source_role = role.warm_start
        source = load_recipe(_find(resolved, name, recipe), fresh=False)
        if source_role not in source.recipe.saved_roles:
            saved = ", ".join(source.recipe.saved_roles) or "nothing"
            raise _error(
                resolved, name, f"{recipe} saves no role {source_role!r}", f"it saves {saved}"
            )
        starts.append(WarmStart(name, source, source_role))
    _check_lengths(resolved, starts)
    return starts


def _check_lengths(resolved: Resolved, starts: list[WarmStart]) -> None:
    """Sequences must fit into the models produced by other recipes,
    whose sizes are known only now."""
    limits = {start.role: positions_of(start.source.recipe, start.source_role) for start in starts}
    positions = {role: limit[0] for role, limit in limits.items() if limit is not None}
    if positions:
        problems = _problems_of(resolved)
        lengths.check(Notes(resolved.recipe, resolved.tree, problems, Unresolved(), positions))
        problems.raise_if_any()


def chain(resolved: Resolved) -> list[Resolved]:
    """Every recipe that must run before this one, in order; without this one itself."""
    order: list[Resolved] = []
    _visit(resolved, [], order)
    return order[:-1]


def _visit(resolved: Resolved, above: list[Resolved], order: list[Resolved]) -> None:
    if any(_are_same(done, resolved) for done in order):
        return
    opened = [*above, resolved]
    for start in warm_starts(resolved):
        _refuse_circle(start, opened)
        _visit(start.source, opened, order)
    order.append(resolved)


def _are_same(left: Resolved, right: Resolved) -> bool:
    return left.path.resolve() == right.path.resolve()


def _refuse_circle(start: WarmStart, opened: list[Resolved]) -> None:
    """Raises RecipeError R52 if a role of the last of these recipes starts from one of them."""
    first = next((n for n, step in enumerate(opened) if _are_same(step, start.source)), None)
    if first is not None:
        names = " → ".join(step.recipe.name for step in (*opened[first:], start.source))
        message = f"the recipes start from each other: {names}"
        raise _error(opened[-1], start.role, message, None, code="R52")


def _find(resolved: Resolved, role: str, recipe: str) -> Path:
    for candidate in (resolved.path.parent / recipe, resolved.path.parent / f"{recipe}.yaml"):
        if candidate.is_file():
            return candidate
    problems = Problems()
    file = find_recipe(recipe, problems)
    if file is None:
        problem = problems.reported[0]
        raise _error(resolved, role, problem.what, problem.hint)
    return file


def _error(
    resolved: Resolved, role: str, message: str, hint: str | None, code: str = "R51"
) -> RecipeError:
    mark = resolved.origin(("models", role, "path"))
    problems = _problems_of(resolved)
    problems.add(code, message, mark, hint)
    return RecipeError(problems.reported)


def _problems_of(resolved: Resolved) -> Problems:
    """An empty collection, able to quote the recipe."""
    problems = Problems()
    problems.sources = resolved.problems.sources
    problems.pulled_in_by = resolved.problems.pulled_in_by
    return problems
