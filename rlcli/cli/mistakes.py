"""Messages for mistakes on the command line: what is wrong, what was probably meant,
an example that works."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlcli.cli.help import argument_name, split_example
from rlcli.errors import UsageError
from rlcli.spelling import nearest_name

_VERBS = {
    "quickstart apps.main realhf.apps.quickstart start": (
        "rlcli train RECIPE, for example rlcli train ppo_math seed=1 launch=slurm"
    ),
    "run launch fit finetune fine_tune rl sft grpo ppo dpo": "rlcli train RECIPE",
    "sweep tune search": "rlcli train RECIPE --sweep KEY=VALUE,VALUE",
    "continue restart recover": "rlcli resume RUN",
    "runs ps jobs top queue": "rlcli status",
    "tail log": "rlcli logs RUN",
    "monitor": "rlcli attach RUN, or several: rlcli watch",
    "kill cancel abort terminate": "rlcli stop RUN",
    "metrics metric curves tensorboard": "rlcli plot RUN, or what they mean: rlcli show metrics",
    "init create scaffold": "rlcli new",
    "list components recipes": "rlcli ls",
    "copy fork clone": "rlcli cp RECIPE",
    "config get cat print": "rlcli show RECIPE",
    "lint verify": "rlcli validate RECIPE",
    "graph dag memory estimate": "rlcli plan RECIPE",
    "benchmark bench score": "rlcli eval MODEL",
    "predict infer inference rollout": "rlcli generate MODEL",
    "serve deploy": "rlcli has no server; rlcli chat MODEL answers here",
    "export merge": "rlcli convert CHECKPOINT OUT --to-hf",
    "upload publish": "rlcli push RUN --to OWNER/NAME",
    "sync wandb mlflow trackio mirror": "rlcli track RUN --to wandb",
    "checkpoints checkpoint": "rlcli ckpt ls RUN",
    "rm delete prune clean": "rlcli ckpt prune RUN",
    "env info debug": "rlcli doctor",
    "version": "rlcli --version",
    "upgrade update install setup": "use pip or uv; rlcli doctor says what is missing",
    "login auth": "rlcli has no accounts; hf auth login logs in to the Hub",
    "models": "rlcli status lists runs and their models; rlcli ls families, what can be trained",
    "reward rewards": "rlcli ls interfaces, or rlcli new reward NAME for your own",
}
"""Verbs of other tools → what does that here."""

_OPTIONS = {
    "gpus gpu n_gpus num_gpus nproc nproc_per_node num_processes devices": (
        "N devices: cluster.devices_per_node=N launch=local, or a profile: --with gpu8"
    ),
    "resume resume_from_checkpoint resume_from continue": "rlcli resume RUN continues a run",
    "config config_file config_name config_path recipe": (
        "the recipe is the first argument: rlcli train RECIPE"
    ),
    "vllm use_vllm sglang": "servers generate with --with vllm or --with sglang",
    "cuda": "write cluster.device=cuda",
    "cpu": "write cluster.device=cpu",
    "profile": "write --with PROFILE",
    "set override": "write KEY=VALUE without an option",
    "output_dir out output": "write log.dir=FOLDER, or --run-dir FOLDER for one run",
}
"""Options of other tools that are not keys → what does that here."""

_SAME_OPTION = {
    "gpus gpu n_gpus num_gpus nproc nproc_per_node": "--devices",
    "gpu_memory memory_gb": "--device-memory",
    "data test_data eval_data": "--dataset",
    "text question input": "--prompt",
}
"""Options of other tools, or of other verbs → the option of those verbs that have it."""


def _meaning(table: Mapping[str, str], word: str) -> str | None:
    plain = word.lower().replace("-", "_")
    return next((advice for words, advice in table.items() if plain in words.split()), None)


def unknown_verb(path: str, name: str, verbs: Iterable[str]) -> UsageError:
    """The error for an unknown verb. `path` is the command so far: `rlcli`, `rlcli ckpt`."""
    names = list(verbs)
    meant = _meaning(_VERBS, name)
    if path == "rlcli" and _is_recipe(name):
        return UsageError(
            f"{name} is a recipe, not a verb", hint=f"rlcli train {name}, or rlcli plan {name}"
        )
    near = nearest_name(name, names)
    if path != "rlcli":  # what `list` is to rlcli, `ckpt list` is to rlcli ckpt
        verb = next((word for word in (meant or "").split() if word in names), None)
        meant = verb and f"{path} {verb}"
    hint = meant or (f"did you mean {near}?" if near else f"{path} --help lists them")
    return UsageError(f"{path} has no verb {name!r}", hint=hint)


def as_usage_error(error: Any, arguments: list[str]) -> UsageError:
    """The parser's error as ours, recognised by its class name,
    because typer brings its own copy of click."""
    context = getattr(error, "ctx", None)
    command = context.command if context is not None else None
    path = context.command_path if context is not None else "rlcli"
    _, example = split_example((command.help if command is not None else None) or "")
    hint = f"for example: {example}" if example else f"{path} --help"
    match type(error).__name__:
        case "NoSuchOption":
            return _unknown_option(path, error.option_name, command, context, arguments)
        case "MissingParameter":
            return UsageError(f"{path} needs {_name_of(error.param)}", hint=hint)
        case "BadParameter":
            return _bad_value(error, path)
        case "BadOptionUsage":
            needs = "takes no value" if "not take" in error.message else "needs a value"
            return UsageError(
                f"{error.option_name} {needs}", hint=hint if context is not None else None
            )
    return _other_mistake(error.format_message().rstrip("."), path, hint)


def _name_of(parameter: Any) -> str:
    """The long name of an option, or what help calls an argument."""
    option = next((name for name in parameter.opts if name.startswith("--")), None)
    return option or argument_name(parameter)


def _other_mistake(message: str, path: str, hint: str) -> UsageError:
    """A mistake that only the parser's message tells apart from others."""
    if extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        return UsageError(f"{path} takes no further {extra[1]!r}", hint=hint)
    if message == "Missing command":
        return UsageError(f"{path} needs a verb", hint=f"{path} --help")
    return UsageError(message, hint=f"{path} --help")


def _unknown_option(
    path: str, option: str, command: Any, context: Any, arguments: list[str]
) -> UsageError:
    word = option.lstrip("-").replace("-", "_")
    options = _options_of(command, context)
    takes_keys = any("KEY=VALUE" in (parameter.metavar or "") for parameter in command.params)
    advice = _about_option(word, options, takes_keys)
    if advice is not None:
        return UsageError(f"{path} has no option {option}", hint=advice)
    key = _key_of(word) if takes_keys else None
    if key is not None:
        value = _value_of(option, arguments, key)
        return UsageError(
            f"{option} is a key of the recipe, not an option", hint=f"write {key}={value}"
        )
    near = nearest_name(option, options)
    return UsageError(
        f"{path} has no option {option}",
        hint=f"did you mean {near}?" if near else f"{path} --help lists them",
    )


def _options_of(command: Any, context: Any) -> list[str]:
    parameters = command.get_params(context)
    return [name for each in parameters for name in each.opts if name.startswith("-")]


def _value_of(option: str, arguments: list[str], key: str) -> str:
    """The value of a key for an option, as written with it or after it; or the value that the
    option stands for, as `--bf16` does."""
    from rlcli.recipe.synonyms import VALUES, trackers_in

    if key.endswith(".backend"):
        return "NAME"
    joined = (
        text.removeprefix(f"{option}=") for text in arguments if text.startswith(f"{option}=")
    )
    after = arguments[arguments.index(option) + 1 :] if option in arguments else []
    values = [*joined, *(text for text in after[:1] if not text.startswith("-"))]
    if key == "log.trackers":
        return trackers_in(option, *values)
    return values[0] if values else VALUES.get(option.lstrip("-"), "VALUE")


def _about_option(word: str, options: list[str], takes_keys: bool) -> str | None:
    """What to write for an option that is not a key here, or that rlcli does not have yet."""
    from rlcli.recipe.synonyms import absent

    same = _meaning(_SAME_OPTION, word)
    if same in options:
        return f"did you mean {same}?"
    if not takes_keys:
        return None
    return _meaning(_OPTIONS, word) or absent(word)


def _key_of(word: str) -> str | None:
    """The key of a recipe that an option names, in rlcli's words or those of others."""
    from rlcli.recipe.schema import SECTIONS
    from rlcli.recipe.suggest import home_of
    from rlcli.recipe.synonyms import translated

    if word.split(".")[0] in SECTIONS or "." in word:
        return word
    key = translated([word]) or home_of(word)
    names = {"<role>": "actor", "<name>": "train"}
    for placeholder, name in names.items():
        key = key and key.replace(placeholder, name)
    return key


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
        hint = _instead_of_choice(path, value.strip("'/"), legal)
        return UsageError(f"{name or path}: {value} is not one of {', '.join(legal)}", hint=hint)
    fault = error.message.removeprefix("Value error, ").rstrip(".")
    if re.search(r"integer|number|range|greater|less", fault):
        fault = "must be " + _number(parameter, fault)
    return UsageError(f"{name} {fault}" if name else fault, hint=f"{path} --help")


def _instead_of_choice(path: str, word: str, legal: Iterable[str]) -> str:
    """What was probably meant by a word that is not among those that a verb takes."""
    if (near := nearest_name(word, legal)) is not None:
        return f"did you mean {near}?"
    if path == "rlcli new":
        return f"the kind comes first: rlcli new dataset {word}"
    return (_meaning(_VERBS, word) if path == "rlcli ls" else None) or f"{path} --help"


def _number(parameter: Any, complaint: str) -> str:
    """`a whole number, at least 1`: which numbers a parameter takes."""
    kind = parameter if hasattr(parameter, "min") else getattr(parameter, "type", None)
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    may_be_fraction = (
        isinstance(least, float)
        or isinstance(most, float)
        or "float" in complaint
        or "valid number" in complaint
    )
    words = ["a number" if may_be_fraction else "a whole number"]
    words += [f"at least {_as_text(least)}"] if least is not None else []
    words += [f"at most {_as_text(most)}"] if most is not None else []
    return ", ".join(words)


def _as_text(bound: float) -> str:
    """`0` for 0.0."""
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _is_recipe(name: str) -> bool:
    from rlcli.recipe.parsing.finding import recipe_names

    if "\0" in name:
        return False
    return (name.endswith((".yaml", ".yml")) and Path(name).is_file()) or name in recipe_names()
