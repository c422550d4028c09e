"""Messages for mistakes on the command line: what is wrong, what was probably meant,
an example that works."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlcli.cli.help import argument_name, split_example
from rlcli.errors import UsageError


def unknown_verb(path: str, name: str, verbs: Iterable[str]) -> UsageError:
    """The error for an unknown verb. `path` is the command so far: `rlcli`, `rlcli ckpt`."""
    names = list(verbs)
    near = _near(name, names)
    if near is None and path == "rlcli" and _is_recipe(name):
        return UsageError(
            f"{name} is a recipe, not a verb", hint=f"rlcli train {name}, or rlcli plan {name}"
        )
    hint = f"did you mean {near}?" if near else f"{path} --help lists them"
    return UsageError(f"{path} has no verb {name!r}", hint=hint)


def as_usage_error(error: Any, arguments: list[str]) -> UsageError:
    """The parser's error as ours, recognised by its class name,
    because typer brings its own copy of click."""
    context = getattr(error, "ctx", None)
    command = context.command if context is not None else None
    path = context.command_path if context is not None else "rlcli"
    _, example = split_example((command.help or "") if command is not None else "")
    hint = f"for example: {example}" if example else f"{path} --help"
    match type(error).__name__:
        case "NoSuchOption":
            return _unknown_option(path, error.option_name, command, context, arguments)
        case "MissingParameter":
            option = next((name for name in error.param.opts if name.startswith("--")), None)
            return UsageError(f"{path} needs {option or argument_name(error.param)}", hint=hint)
        case "BadParameter":
            return _bad_value(error, path)
        case "BadOptionUsage":
            needs = "takes no value" if "not take" in error.message else "needs a value"
            return UsageError(
                f"{error.option_name} {needs}", hint=hint if context is not None else None
            )
    message = error.format_message().rstrip(".")
    if extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        return UsageError(f"{path} takes no further {extra[1]!r}", hint=hint)
    if message == "Missing command":
        return UsageError(f"{path} needs a verb", hint=f"{path} --help")
    return UsageError(message, hint=f"{path} --help")


def _unknown_option(
    path: str, option: str, command: Any, context: Any, arguments: list[str]
) -> UsageError:
    word = option.lstrip("-").replace("-", "_")
    if any("KEY=VALUE" in (parameter.metavar or "") for parameter in command.params):
        from rlcli.recipe.schema import SECTIONS
        from rlcli.recipe.synonyms import translated

        key = word if word.split(".")[0] in SECTIONS or "." in word else translated([word])
        if key is not None:
            after = arguments[arguments.index(option) + 1 :] if option in arguments else []
            value = after[0] if after and not after[0].startswith("-") else "VALUE"
            return UsageError(
                f"{option} is a key of the recipe, not an option", hint=f"write {key}={value}"
            )
    options = [
        name
        for parameter in command.get_params(context)
        for name in parameter.opts
        if name.startswith("-")
    ]
    near = _near(option, options)
    return UsageError(
        f"{path} has no option {option}",
        hint=f"did you mean {near}?" if near else f"{path} --help lists them",
    )


def _bad_value(error: Any, path: str) -> UsageError:
    parameter = error.param
    name = None
    if parameter is not None:
        name = (
            parameter.opts[-1]
            if parameter.param_type_name == "option"
            else argument_name(parameter)
        )
    value, _, rest = error.message.removeprefix("Value error, ").partition(" is not one of ")
    if rest:
        legal = [word.strip(" '.") for word in rest.split(",")]
        near = _near(value.strip("'"), legal)
        hint = f"did you mean {near}?" if near else f"{path} --help"
        return UsageError(f"{name or path}: {value} is not one of {', '.join(legal)}", hint=hint)
    fault = error.message.removeprefix("Value error, ").rstrip(".")
    if re.search(r"integer|number|range|greater|less", fault):
        fault = "must be " + _number(parameter, fault)
    return UsageError(f"{name} {fault}" if name else fault, hint=f"{path} --help")


def _number(parameter: Any, complaint: str) -> str:
    """`a whole number, at least 1`: which numbers a parameter takes."""
    kind = parameter if hasattr(parameter, "min") else getattr(parameter, "type", None)
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    words = [
        "a number" if "float" in complaint or "valid number" in complaint else "a whole number"
    ]
    words += [f"at least {least}"] if least is not None else []
    words += [f"at most {most}"] if most is not None else []
    return ", ".join(words)


def _near(word: str, candidates: Iterable[str]) -> str | None:
    from difflib import get_close_matches

    names = list(candidates)
    starts = [name for name in names if len(word) > 1 and name.startswith(word)]
    near = starts[:1] or get_close_matches(word, names, n=1, cutoff=0.6)
    return near[0] if near else None


def _is_recipe(name: str) -> bool:
    from rlcli.recipe.parsing.layers import recipe_names

    if "\0" in name:
        return False
    return (name.endswith((".yaml", ".yml")) and Path(name).is_file()) or name in recipe_names()
