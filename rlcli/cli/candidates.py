"""Completion candidates for a command line, for the shells. Never raises, never prints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcli.api.run_folder import RESOLVED_RECIPE
from rlcli.cli.help import choices_of
from rlcli.cli.show import KINDS, METRICS
from rlcli.errors import RlcliError
from rlcli.observe.run_search import RUNS, find_run, find_runs, short_name
from rlcli.observe.series import NAMES, find_key
from rlcli.recipe.introspection.candidate import Candidate

if TYPE_CHECKING:
    from rlcli.recipe.parsing.tree import MappingNode


@dataclass
class CommandLine:
    """A command line so far: the command it has reached, and the arguments that were given."""

    command: Any
    context: Any
    positionals: list[str] = field(default_factory=list)
    options: dict[str, list[str]] = field(default_factory=dict)
    """Parameter name of an option → the values given."""
    awaits: Any = None
    """The option whose value comes next."""
    ended: bool = False
    """After `--`: nothing is an option any more."""

    def recipe(self) -> str:
        """The recipe that the keys belong to."""
        for parameter, positional in zip(self.arguments(), self.positionals, strict=False):
            if parameter.name == "recipe":
                return positional
            if parameter.name == "run":
                from rlcli.observe.run_search import find_run

                return str(find_run(positional) / RESOLVED_RECIPE)
        return ""

    def sketch(self, recipe: str) -> MappingNode:
        """The recipe that the line describes so far."""
        from rlcli.recipe.introspection.completions import sketch

        return sketch(recipe, self.overrides(), self.options.get("with_", ()))

    def give(self, option: Any, value: str) -> None:
        """Note the value of an option; one that names a project takes effect."""
        self.options.setdefault(option.name, []).append(value)
        if option.name == "project":
            from rlcli.project import use_project

            with contextlib.suppress(RlcliError):
                use_project(value)

    def arguments(self) -> list[Any]:
        return [p for p in self.command.params if p.param_type_name == "argument"]

    def overrides(self) -> list[str]:
        return [word for word in self.positionals if "=" in word]


def candidates(app: Any, words: Sequence[str]) -> list[Candidate]:
    """Completions of the last of `words` (those after `rlcli`);
    `app` is the command of all verbs."""
    try:
        *before, last = words or [""]
        line = _read(app, before)
        return _sorted_out(_next(line, last), last)
    except (RlcliError, OSError, RecursionError, UnicodeError):
        return []


def _sorted_out(candidates: Iterator[Candidate], last: str) -> list[Candidate]:
    by_text = {candidate.text: candidate for candidate in candidates}
    return [candidate for text, candidate in by_text.items() if text.startswith(last)]


def _read(command: Any, words: Sequence[str]) -> CommandLine:
    """Walk through the words typed so far."""
    line = _line(command)
    for word in words:
        if line.awaits is not None:
            line.give(line.awaits, word)
            line.awaits = None
        elif word == "--" and not line.ended:
            line.ended = True
        elif word.startswith("-") and not line.ended:
            name, equals, value = word.partition("=")
            option = _option_with_value(line, name)
            if option is not None and equals:
                line.give(option, value)
            else:
                line.awaits = option
        elif hasattr(line.command, "list_commands"):
            inner = line.command.get_command(line.context, word)
            if inner is None:
                return _line(None)
            line = _line(inner)
        else:
            line.positionals.append(word)
    return line


def _line(command: Any) -> CommandLine:
    context = command.context_class(command, info_name="rlcli") if command is not None else None
    return CommandLine(command, context)


def _options(line: CommandLine) -> list[Any]:
    return [
        p
        for p in line.command.get_params(line.context)
        if p.param_type_name == "option" and not p.hidden
    ]


def _option_with_value(line: CommandLine, name: str) -> Any:
    """The option of that name that is not a flag, or None."""
    return next((p for p in _options(line) if name in p.opts and not p.is_flag), None)


def _next(line: CommandLine, last: str) -> Iterator[Candidate]:
    if line.command is None:
        return
    if line.awaits is not None:
        yield from _values_of(line.awaits, line, last)
        return
    if last.startswith("-") and not line.ended:
        yield from _options_with_values(line, last)
        return
    if hasattr(line.command, "list_commands"):
        for name in line.command.list_commands(line.context):
            yield Candidate(name, _summary(line.command, name))
        return
    arguments = line.arguments()
    number = min(len(line.positionals), len(arguments) - 1)
    if arguments and (len(line.positionals) < len(arguments) or arguments[-1].nargs == -1):
        yield from _values_of(arguments[number], line, last)


def _options_with_values(line: CommandLine, last: str) -> Iterator[Candidate]:
    """Options that may follow, or, after `--option=`, the values of that option."""
    name, equals, value = last.partition("=")
    option = _option_with_value(line, name)
    if equals and option is not None:
        for candidate in _values_of(option, line, value):
            yield Candidate(f"{name}={candidate.text}", candidate.doc)
        return
    for option in _options(line):
        if option.name not in line.options or option.multiple:
            for name in option.opts:
                if name.startswith("--"):
                    yield Candidate(name, option.help or "")


def _summary(command: Any, name: str) -> str:
    table = getattr(command, "table", None)
    if table is not None:
        return next(verbs[name] for verbs in table.values() if name in verbs)
    return str(command.commands[name].get_short_help_str(80))


def _values_of(parameter: Any, line: CommandLine, last: str) -> Iterator[Candidate]:
    """Values of an argument or option: its choices, or candidates according to its name."""
    if words := choices_of(parameter):
        yield from map(Candidate, words)
        return
    of_this_verb = _BY_NAME.get(f"{line.command.name}.{parameter.name}")
    yield from (of_this_verb or _BY_NAME.get(parameter.name, _any_file))(line, last)


def _recipes(line: CommandLine, last: str) -> Iterator[Candidate]:
    from rlcli.recipe.parsing.finding import recipe_names, whole_recipe_names

    yield from map(Candidate, recipe_names() if "/" in last else whole_recipe_names())
    yield from _files_ending(last, ".yaml", ".yml")


def _overrides(line: CommandLine, last: str) -> Iterator[Candidate]:
    yield from _overrides_of(line, line.recipe(), last)


def _overrides_of(line: CommandLine, recipe: str, last: str) -> Iterator[Candidate]:
    from rlcli.recipe.introspection.completions import override_candidates

    yield from override_candidates(line.sketch(recipe), last, line.overrides())
    key, equals, value = last.partition("=")
    if equals and key.endswith((".path", ".tokenizer", ".dir")):
        yield from (Candidate(f"{key}={candidate.text}") for candidate in _any_file(line, value))


def _keys(line: CommandLine, last: str) -> Iterator[Candidate]:
    from rlcli.recipe.introspection.completions import key_candidates

    yield from key_candidates(line.sketch(line.recipe()), last)


def _sections(line: CommandLine, last: str) -> Iterator[Candidate]:
    """Sections and components, as `schema` takes them."""
    from rlcli.recipe.introspection.completions import key_candidates

    keys = key_candidates(line.sketch(""), last)
    yield from (
        Candidate(candidate.text.removesuffix("."), candidate.doc)
        for candidate in keys
        if candidate.text.endswith(".")
    )
    yield from _components(line, last)


def _datasets(line: CommandLine, last: str) -> Iterator[Candidate]:
    from rlcli.recipe.introspection.completions import values

    yield from (Candidate(name) for name, _ in values(line.sketch(line.recipe()), "train.dataset"))


def _profiles(line: CommandLine, last: str) -> Iterator[Candidate]:
    from rlcli.recipe.parsing.finding import profile_names

    yield from map(Candidate, profile_names())
    yield from _files_ending(last, ".yaml", ".yml")


def _components(line: CommandLine, last: str) -> Iterator[Candidate]:
    """The names of the preceding kind, or of all kinds if there is none."""
    from rlcli import registry

    kind = next((KINDS[word] for word in line.positionals if word in KINDS), None)
    for listed_kind in [kind] if kind else KINDS.values():
        yield from (
            Candidate(name, listed_kind.removesuffix("s")) for name in registry.names(listed_kind)
        )


def _rewards(line: CommandLine, last: str) -> Iterator[Candidate]:
    """Interfaces, and Python files with a function."""
    from rlcli import registry

    yield from map(Candidate, registry.names("interfaces"))
    yield from _files_ending(last, ".py")


def _rows(line: CommandLine, last: str) -> Iterator[Candidate]:
    """Rows of an evaluation: a dataset, those of a recipe, or a file."""
    from rlcli import registry

    yield from map(Candidate, registry.names("datasets"))
    yield from _recipes(line, last)
    yield from _any_file(line, last)


def _shown(line: CommandLine, last: str) -> Iterator[Candidate]:
    """Arguments of `show`: a kind and a name, a name, a section, or a recipe and overrides."""
    if not line.positionals:
        yield from map(Candidate, (*KINDS, METRICS))
        yield from _sections(line, last)
        yield from _recipes(line, last)
    elif line.positionals[0] in KINDS:
        yield from _components(line, last) if len(line.positionals) == 1 else ()
    else:
        yield from _overrides_of(line, line.positionals[0], last)


def _tested_kinds(line: CommandLine, last: str) -> Iterator[Candidate]:
    from rlcli.testing.subjects import ALL, KINDS

    yield from map(Candidate, (*KINDS, ALL))


def _tested(line: CommandLine, last: str) -> Iterator[Candidate]:
    """The names of the preceding kind."""
    from rlcli.testing.subjects import KINDS, names

    kind = line.positionals[0]
    yield from map(Candidate, names(kind)) if kind in KINDS else ()


def _tested_with(line: CommandLine, last: str) -> Iterator[Candidate]:
    """Overrides of a recipe."""
    kind, name, *_ = line.positionals
    yield from _overrides_of(line, name, last) if kind == "recipe" else ()


def _runs(line: CommandLine, last: str) -> Iterator[Candidate]:
    """Runs by name or folder, the newest first, and any other folder."""
    root = Path((line.options.get("runs") or [str(RUNS)])[-1])
    for run in find_runs(root)[:200]:
        yield Candidate(str(run) if last.startswith(str(root)) else short_name(run, root))
    yield from _folders(line, last)


def _runs_and_metrics(line: CommandLine, last: str) -> Iterator[Candidate]:
    """Runs, and the keys and curves of the first one."""
    from rlcli.observe.run_overview import last_numbers

    if line.positionals:
        keys = last_numbers(find_run(line.positionals[0]) / "metrics.jsonl")
        yield from (Candidate(name) for name in NAMES if find_key(keys, name) is not None)
        yield from (Candidate(key) for key in keys if key != "step")
    yield from _runs(line, last)


def _recipes_or_runs(line: CommandLine, last: str) -> Iterator[Candidate]:
    yield from _recipes(line, last)
    yield from _runs(line, last)


def _any_file(line: CommandLine, last: str) -> Iterator[Candidate]:
    yield from _files(last, lambda path: True)


def _folders(line: CommandLine, last: str) -> Iterator[Candidate]:
    yield from _files(last, lambda path: False)


def _migrated(line: CommandLine, last: str) -> Iterator[Candidate]:
    yield from _files_ending(last, ".yaml", ".yml")


def _files_ending(last: str, *endings: str) -> Iterator[Candidate]:
    """Such files; folders only once something is typed, because names come first."""
    files = _files(last, lambda path: path.suffix in endings)
    yield from (file for file in files if last or file.is_whole)


def _files(last: str, is_offered: Callable[[Path], bool]) -> Iterator[Candidate]:
    """Folders, and the files that are offered, below the typed path."""
    head, slash, partial = last.rpartition("/")
    folder = Path(f"{head}{slash}" or ".").expanduser()
    with contextlib.suppress(OSError, ValueError):
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(partial) or (
                path.name.startswith(".") and not partial.startswith(".")
            ):
                continue
            if path.is_dir():
                yield Candidate(f"{head}{slash}{path.name}/")
            elif is_offered(path):
                yield Candidate(f"{head}{slash}{path.name}")


_BY_NAME: dict[str, Callable[[CommandLine, str], Iterator[Candidate]]] = {
    "recipe": _recipes,
    "overrides": _overrides,
    "sweep": _overrides,
    "with_": _profiles,
    "key": _keys,
    "show.words": _shown,
    "schema.subject": _sections,
    "test.kind": _tested_kinds,
    "test.name": _tested,
    "test.settings": _tested_with,
    "migrate.recipes": _migrated,
    "new.name": _folders,
    "like": _components,
    "name": _components,
    "dataset": _datasets,
    "eval.dataset": _rows,
    "reward": _rewards,
    "run": _runs,
    "watch.words": _runs,
    "report.words": _runs,
    "compare.words": _runs_and_metrics,
    "plot.words": _runs_and_metrics,
    "chat.model": _runs,
    "eval.model": _runs,
    "generate.model": _runs,
    "convert.source": _runs,
    "before": _recipes_or_runs,
    "now": _recipes_or_runs,
    "run_dir": _folders,
    "runs": _folders,
    "project": _folders,
}
"""Candidates by the name of a verb's parameter, together with the verb where necessary; anything
else is a file."""
