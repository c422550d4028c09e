"""What `--model`, `--data` and `--reward` mean: overrides of the recipe that they come with."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlcli.api.key_meaning import REWARDS
from rlcli.errors import UsageError
from rlcli.recipe.components import argument_names
from rlcli.recipe.expansion.call_keys import made_by
from rlcli.recipe.introspection.completions import sketch
from rlcli.recipe.parsing.finding import whole_recipe_names
from rlcli.recipe.parsing.scalars import ScalarError, core_scalar
from rlcli.recipe.parsing.tree import MappingNode, at, keys_at, value_at

GRAPH = ("graph",)


def as_overrides(
    recipe: str,
    profiles: Sequence[str],
    *,
    model: str | None = None,
    data: str | None = None,
    reward: str | None = None,
) -> list[str]:
    """`key=value` for each of: the path of the model that is trained, the path of the rows that it
    is trained on, the interface that rewards responses. Raises UsageError if the recipe has no
    such key; for a recipe that cannot be read, the usual keys: loading it reports why."""
    tree = sketch(recipe, profiles=profiles)
    overrides = []
    if model is not None:
        overrides.append(f"models.{_trained_role(tree)}.path={_as_value(model)}")
    if data is not None:
        overrides.append(f"{_data_path(tree, recipe, data)}={_as_value(data)}")
    if reward is not None and keys_at(tree, GRAPH):
        overrides.append(f"graph.{_reward_call(tree, recipe)}.interface={reward_interface(reward)}")
    return overrides


def reward_interface(reward: str) -> str:
    """The interface of that name, or for a Python file the one that calls its function."""
    if not reward.endswith(".py"):
        return reward
    return f"{{type: function_reward, args: {{path: {_quoted(reward)}}}}}"


def _data_path(tree: MappingNode, recipe: str, data: str) -> str:
    """The key of the path of the rows to train on. Raises UsageError if they come from no file."""
    name = str(value_at(tree, ("train", "dataset")) or "train")
    key, kind = f"datasets.{name}", str(value_at(tree, ("datasets", name, "type")) or "")
    arguments = argument_names("datasets", kind)
    if arguments is not None and "path" not in arguments:
        raise UsageError(
            f"--data: the rows of {recipe} come from {kind}, which does not read a file",
            hint=f"{key}='{{type: hf, args: {{path: {data}}}}}' reads them instead",
        )
    return f"{key}.args.path"


def _trained_role(tree: MappingNode) -> str:
    """The first role that is trained and does not start as a copy of another one."""
    calls = [(*GRAPH, name) for name in keys_at(tree, GRAPH)]
    training = [call for call in calls if value_at(tree, (*call, "call")) == "train_step"]
    named = [value_at(tree, (*call, "model")) for call in training]
    roles = [str(role) for role in named if role is not None]
    first = [role for role in roles if at(tree, ("models", role, "init")) is None]
    return next(iter([*first, *roles, *keys_at(tree, ("models",))]), "actor")


def _reward_call(tree: MappingNode, recipe: str) -> str:
    """The first call that makes rewards. Raises UsageError."""
    makers = _makers_of_rewards(tree)
    if not makers:
        rewarded = [name for name in whole_recipe_names() if _makers_of_rewards(sketch(name))]
        raise UsageError(
            f"--reward: {recipe} has no call that computes rewards",
            hint=f"recipes that have one: {', '.join(rewarded)}",
        )
    return makers[0]


def _makers_of_rewards(tree: MappingNode) -> list[str]:
    return [call for call in keys_at(tree, GRAPH) if REWARDS in made_by(at(tree, (*GRAPH, call)))]


def _as_value(path: str) -> str:
    """A path as the value of an override, which is text whatever it looks like."""
    try:
        is_text = path[:1] not in "[{\"'" and core_scalar(path.strip()) == path
    except ScalarError:
        is_text = False
    return path if is_text else _quoted(path)


def _quoted(path: str) -> str:
    return json.dumps(path, ensure_ascii=False)
