"""Expands `models.<role>.rollout` into the role `<role>_rollout`, which follows the role and
generates in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rlcli.recipe.graph import calls_of
from rlcli.recipe.mesh import DevicesError, devices_of, world_of
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import (
    Entry,
    KeyPath,
    MappingNode,
    Mark,
    at,
    default_mark,
    entries_at,
    key_mark,
    nearest,
    node_of,
    plain,
    with_entry,
    without,
)
from rlcli.recipe.parsing.unresolved import Unresolved
from rlcli.recipe.schema import Recipe

_SUFFIX = "_rollout"


def with_rollouts(
    recipe: Recipe, tree: MappingNode, problems: Problems, unresolved: Unresolved
) -> tuple[Recipe, MappingNode]:
    """The recipe and its tree, with each rollout expanded to a role,
    calls moved to it and a weight copy.

    An impossible rollout is reported and left out;
    what follows from something doubtful is doubtful.
    """
    spelt_out = tree
    for name, role in recipe.models.items():
        path = ("models", name, "rollout")
        if role.rollout is None:
            continue
        if problem := _refusal(recipe, name):
            message, hint, section = problem
            mark = key_mark(tree, section) or nearest(tree, section).mark
            problems.add("R71", message, mark, hint)
            unresolved.values |= {("models",), ("graph",), ("train", "eval", "graph")}
            continue
        spelt_out = _spelt_out(recipe, spelt_out, name)
        for doubtful in (unresolved.values, unresolved.lacking):
            doubtful |= {
                ("models", _follower(name), *inner[3:]) for inner in doubtful if inner[:3] == path
            }
    if spelt_out is tree:
        return recipe, tree
    spelt_out = _others_elsewhere(recipe, spelt_out)
    return Recipe.model_validate(plain(spelt_out)), spelt_out


def as_role(recipe: Recipe, path: KeyPath) -> KeyPath:
    """Path in the expanded recipe of a written one: that of a rollout is in its role."""
    match path:
        case ("models", str(role), "rollout", *rest) if _follower(role) in recipe.models:
            return ("models", _follower(role), *rest)
    return path


def as_rollout(path: KeyPath) -> KeyPath:
    """Path where the keys of a rollout's role are written."""
    match path:
        case ("models", str(role), *rest) if role.endswith(_SUFFIX):
            return ("models", role.removesuffix(_SUFFIX), "rollout", *rest)
    return path


def _follower(role: str) -> str:
    return role + _SUFFIX


def _calls(recipe: Recipe, role: str, kind: str) -> Iterator[KeyPath]:
    yield from (path for path, call in calls_of(recipe) if (call.model, call.call) == (role, kind))


def _refusal(recipe: Recipe, role: str) -> tuple[str, str, KeyPath] | None:
    """What is wrong with a role's rollout, a hint, and the section to blame."""
    removal, path = f"models.{role}.rollout=null removes it", ("models", role, "rollout")
    if _follower(role) in recipe.models:
        return (
            f"the rollout of {role} is the role {_follower(role)}, which models has already",
            f"set its keys in models.{role}.rollout instead, or rename it",
            ("models", _follower(role)),
        )
    for kind, verb in (("generate", "generates with"), ("train_step", "trains")):
        if not any(_calls(recipe, role, kind)):
            return f"no call {verb} {role}, so a rollout of it has nothing to do", removal, path
    for *_, name in _calls(recipe, role, "train_step"):
        follower = recipe.graph[str(name)].hooks.copy_to
        if follower is not None:
            message = (
                f"{name} copies its weights to {follower} (copy_to), so it cannot also "
                "copy them to a rollout"
            )
            return message, removal, path
    return None


def _spelt_out(recipe: Recipe, tree: MappingNode, role: str) -> MappingNode:
    """The tree with the rollout of a role as a role, which generates and gets copies of the
    weights."""
    path = ("models", role)
    rollout = entries_at(tree, path)["rollout"]
    mark = default_mark(f"models.{role}.rollout")
    of_rollout = entries_at(rollout.node)
    follower = Entry(mark, node_of(_follower(role), mark))
    hooks = {"copy_to": follower}
    if "transfer" in of_rollout:
        hooks["transfer"] = of_rollout["transfer"]
    node = _node_of_follower(tree, role, mark)
    tree = without(tree, (*path, "rollout"))
    tree = with_entry(tree, ("models", _follower(role)), Entry(rollout.key, node))
    for call in _calls(recipe, role, "generate"):
        tree = with_entry(tree, (*call, "model"), follower)
    for call in _calls(recipe, role, "train_step"):
        for key, entry in hooks.items():
            tree = with_entry(tree, (*call, "hooks", key), entry)
    return tree


def _node_of_follower(tree: MappingNode, role: str, mark: Mark) -> MappingNode:
    """The role of a rollout: it starts from its role and has its devices and tokenizer, unless the
    rollout sets others."""
    of_role, rollout = entries_at(tree, ("models", role)), at(tree, ("models", role, "rollout"))
    assert isinstance(rollout, MappingNode)
    shared = {key: of_role[key] for key in of_role if key in ("devices", "tokenizer")}
    settings = rollout.without_keys(["transfer"]).entries
    init = Entry(mark, node_of(role, mark))
    return replace(rollout, entries={"init": init, **shared, **settings})


def _others_elsewhere(recipe: Recipe, tree: MappingNode) -> MappingNode:
    """Give roles without their own devices those not used by rollouts."""
    named = {
        name: role.rollout.devices
        for name, role in recipe.models.items()
        if role.rollout is not None
    }
    try:
        world = world_of(recipe.cluster)
        taken = {
            rank
            for name, devices in named.items()
            if devices
            for rank in devices_of(name, devices, world)
        }
    except DevicesError:  # reported by the device checks
        return tree
    left = ",".join(str(rank) for rank in range(world) if rank not in taken)
    chosen_by = next((name for name, devices in named.items() if devices), "")
    for name in recipe.models if taken and left else ():
        if recipe.models[name].devices is None:
            mark = default_mark(f"models.{chosen_by}.rollout.devices")
            tree = with_entry(tree, ("models", name, "devices"), Entry(mark, node_of(left, mark)))
    return tree
