"""Sources of a role's weights and tokenizer, derived from the recipe alone."""

from __future__ import annotations

from rlcli.errors import ModelError
from rlcli.recipe.schema import Recipe


def weights_origin(recipe: Recipe, role: str) -> str:
    """The role whose weights a role starts from: itself, or the end of its chain of `init`, which
    in a recipe that is still being checked may lead in a circle or to a role that does not
    exist."""
    seen: list[str] = []
    while (source := recipe.models[role].init) in recipe.models and source not in seen:
        assert source is not None
        seen.append(role)
        role = source
    return role


def followed_roles(recipe: Recipe) -> dict[str, str]:
    """Role → the one role whose weights are copied to it, whole or as a moving average."""
    followed: dict[str, str] = {}
    for role in recipe.changing_roles:
        sources = {call.model for call in recipe.graph.values() if call.hooks.copy_to == role}
        if len(sources) == 1:
            followed[role] = sources.pop()
    return followed


def mirrored_roles(recipe: Recipe) -> dict[str, str]:
    """Role → the trained role whose weights it has between any two steps: it starts with them, and
    takes them over whole whenever they have changed."""
    mirrored: dict[str, str] = {}
    for role, source in followed_roles(recipe).items():
        updates = [
            call
            for call in recipe.graph.values()
            if (call.model, call.call) == (source, "train_step")
        ]
        is_copied = all((call.hooks.copy_to, call.hooks.eta) == (role, 1) for call in updates)
        starts_alike = weights_origin(recipe, role) == weights_origin(recipe, source)
        if updates and is_copied and starts_alike:
            mirrored[role] = source
    return mirrored


def stored_roles(recipe: Recipe) -> tuple[str, ...]:
    """The roles whose weights a checkpoint holds: those that change, except mirrors of others."""
    mirrored = mirrored_roles(recipe)
    return tuple(role for role in recipe.changing_roles if role not in mirrored)


def tokenizer_role(recipe: Recipe, role: str) -> str:
    """The role that provides a role's tokenizer: itself, the origin of its weights or, if neither
    has one, the first role that does. Raises ModelError if none has."""
    for name in (role, weights_origin(recipe, role)):
        if recipe.models[name].tokenizer or recipe.models[name].path:
            return name
    provider = next(
        (name for name, section in recipe.models.items() if section.tokenizer or section.path), None
    )
    if provider is None:
        raise ModelError(f"role {role} has no tokenizer", hint=f"set models.{role}.tokenizer")
    return provider


def tokenizer_source(recipe: Recipe, role: str) -> str:
    """`builtin:<name>`, a folder, a Hub id, or the `recipe:…` whose result a role starts from.
    Raises ModelError."""
    section = recipe.models[tokenizer_role(recipe, role)]
    source = section.tokenizer or section.path
    assert source is not None
    return source


def prompt_role(recipe: Recipe) -> str:
    """The role whose tokenizer reads the datasets: that of the graph's first call with weights."""
    with_weights = [
        call.model for call in recipe.graph.values() if recipe.models[call.model].has_weights
    ]
    return with_weights[0] if with_weights else next(iter(recipe.models))
