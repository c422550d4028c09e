"""Runs contract suites with pytest, in this process, for any component,
without test file or configuration."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlcli import registry
from rlcli.errors import ProjectError, RlcliError, UsageError
from rlcli.files import not_writable
from rlcli.garbage import collect_as_usual
from rlcli.project import current_project
from rlcli.recipe.parsing.merge import merge
from rlcli.recipe.parsing.overrides import parse_overrides
from rlcli.recipe.parsing.problems import Problems
from rlcli.recipe.parsing.tree import COMMAND_LINE, MappingNode, Mark, Node, plain
from rlcli.spelling import nearest_name
from rlcli.testing.contract import TimeIsUp
from rlcli.testing.plugin import CheckObserver, ComponentLoop
from rlcli.testing.process_state import PUT_BACK, ProcessState
from rlcli.testing.reporter import Reporter
from rlcli.testing.results import Examined, Watcher
from rlcli.testing.selection import CheckSelection
from rlcli.testing.subjects import COMPONENTS, KINDS, Subject
from rlcli.testing.time_limit import time_limit

CHECK_SECONDS, LOADING_SECONDS = 120.0, 120.0
"""Time after which a check, or loading a component, counts as hung."""


@dataclass(frozen=True)
class Options:
    """Which checks to run, and how."""

    keyword: str = ""
    """Words that a check must contain; ` or ` separates alternatives."""
    exit_first: bool = False
    junit: Path | None = None
    check_seconds: float = CHECK_SECONDS
    all_layouts: bool = False
    """Whether backends are tried in every layout, and own tests run that may take long."""


def run_checks(
    subjects: Sequence[Subject], watcher: Watcher, options: Options | None = None
) -> list[Examined]:
    """Run the contract of each subject and its own tests. Raises UsageError if no check matches the
    keyword, and ProjectError if the only subject cannot be loaded."""
    options = options or Options()
    if options.junit is not None:
        _check_writable(options.junit)
    sound, broken = _loaded(subjects, watcher)
    for examined in broken:
        watcher.done(examined)
    if not sound:
        return broken
    with tempfile.TemporaryDirectory(prefix="rlcli-test-") as folder:
        suites = {
            _suite(subject, number, Path(folder)): subject for number, subject in enumerate(sound)
        }
        values = {subject: values_of(subject) for subject in sound}
        selection = CheckSelection(
            suites,
            values,
            keyword=options.keyword,
            check_seconds=options.check_seconds,
            all_layouts=options.all_layouts,
        )
        reporter = Reporter(selection, watcher)
        own_tests = sorted({file for subject in sound for file in subject.own_tests})
        watcher.limited("loading the checks", LOADING_SECONDS)
        collect_as_usual()  # pytest goes through all objects several times as it ends
        with _undisturbed(has_own_tests=bool(own_tests)):
            code = pytest.main(
                [*_arguments(Path(folder), own_tests, options), *map(str, [*suites, *own_tests])],
                plugins=[
                    ComponentLoop(selection, reporter, options.check_seconds),
                    CheckObserver(selection, watcher, options.check_seconds),
                    reporter,
                ],
            )
    if code == pytest.ExitCode.INTERRUPTED and reporter.was_interrupted:
        raise KeyboardInterrupt
    if code == pytest.ExitCode.NO_TESTS_COLLECTED and options.keyword:
        raise UsageError(
            f"no check matches -k {options.keyword!r}",
            hint="use words from its line in the report, such as -k 'masked tokens'",
        )
    if reporter.internal_error is not None:
        raise reporter.internal_error
    return [*broken, *reporter.tested()]


def _check_writable(file: Path) -> None:
    """Raises ResourceError before the checks, rather than after them."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            pass
    except OSError as error:
        raise not_writable(file, error, "give another --junit FILE") from None


def _loaded(subjects: Sequence[Subject], watcher: Watcher) -> tuple[list[Subject], list[Examined]]:
    sound, broken = [], []
    for subject in subjects:
        watcher.limited(f"loading {subject.title}", LOADING_SECONDS)
        try:
            _load(subject)
            sound.append(subject)
        except RlcliError as error:
            if len(subjects) == 1:
                raise
            broken.append(Examined(subject, broken=error))
    return sound, broken


def _load(subject: Subject) -> None:
    """Raises ProjectError if its file cannot be loaded, takes too long, or changes the process."""
    before = ProcessState.now()
    try:
        with time_limit(LOADING_SECONDS):
            subject.load()
    except TimeIsUp:
        message = f"loading {subject.title} is not done after {LOADING_SECONDS:g} s"
        raise ProjectError(message, where=str(subject.file)) from None
    except pytest.skip.Exception as error:
        message = f"loading {subject.title} calls pytest.skip: {error}"
        raise ProjectError(message, where=str(subject.file)) from None
    changes = ProcessState.now().changes_since(before)
    before.restore()
    if changes:
        raise ProjectError(
            f"loading {subject.title} changes the whole process: {changes}",
            where=str(subject.file),
            hint=PUT_BACK,
        )


def _suite(subject: Subject, number: int, folder: Path) -> Path:
    """A pytest file with the contract of one component."""
    kind = KINDS[subject.kind]
    path = folder / f"suite_{number}_{subject.kind}.py"
    path.write_text(
        f"from {kind.module} import {kind.contract}\n\n\n"
        f"class TestContract({kind.contract}):\n"
        f"    name = {subject.name!r}\n",
        encoding="utf-8",
    )
    return path


def values_of(subject: Subject) -> Any:
    """The values from the command line: a recipe's overrides as text,
    a component's arguments parsed."""
    if subject.kind == "recipe":
        return subject.values
    problems = Problems()
    tree: Node = MappingNode({}, Mark(COMMAND_LINE, 1, 1))
    for override in parse_overrides(subject.values, problems):
        tree = merge(tree, override, problems)
    problems.raise_if_any()
    values = plain(tree)
    if subject.kind in COMPONENTS:
        _check_arguments(subject, values)
    return values


def _check_arguments(subject: Subject, values: Any) -> None:
    """Raises UsageError for an argument that the component does not have, or of another type."""
    from rlcli.registry.arguments import validated

    folder = COMPONENTS[subject.kind]
    arguments = registry.signature(folder, subject.name).arguments
    names = [argument.name for argument in arguments]
    for name in values:
        if name not in names:
            close = nearest_name(name, names)
            guess = f"; did you mean {close!r}?" if close else ""
            raise UsageError(
                f"{subject.title} has no argument {name!r}{guess}",
                where=COMMAND_LINE,
                hint=f"rlcli show {subject.name} lists its arguments",
            )
    if all(argument.name in values for argument in arguments if argument.required):
        validated(folder, subject.name, values)


def _arguments(folder: Path, own_tests: Sequence[Path], options: Options) -> list[str]:
    """pytest arguments: none of the user project's settings apply except where its tests import
    from, and nothing is left behind in it."""
    configuration = folder / "pytest.ini"
    projects = dict.fromkeys(tests.parents[2] for tests in own_tests)
    imported = shlex.join(path for project in projects for path in _pythonpath(project))
    configuration.write_text(
        f"[pytest]\naddopts =\nconsole_output_style = classic\npythonpath = {imported}\n"
    )
    root = current_project() or Path.cwd()
    words = [
        "-c",
        str(configuration),
        f"--rootdir={root}",
        f"--confcutdir={root}",
        f"--basetemp={folder / 'tmp'}",
    ]
    words += ["--continue-on-collection-errors", "--import-mode=importlib"]
    words += ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:randomly"]
    words += ["--maxfail=1"] if options.exit_first else []
    words += (
        [f"--junitxml={options.junit.absolute()}", "-o", "junit_suite_name=rlcli"]
        if options.junit
        else []
    )
    return words


def _pythonpath(project: Path) -> list[str]:
    """The folders that a project's pytest settings add to those that its tests import from."""
    tables = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    settings = tables.get("tool", {}).get("pytest", {}).get("ini_options", {})
    folders = settings.get("pythonpath", [])
    names = shlex.split(folders) if isinstance(folders, str) else folders
    return [str(project / name) for name in names]


@contextlib.contextmanager
def _undisturbed(has_own_tests: bool) -> Iterator[None]:
    """Remove pytest settings from the environment;
    plugins are available to the user's own tests."""
    pytest_names = (
        "PYTEST_ADDOPTS",
        "PYTEST_PLUGINS",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD",
        "PYTEST_CURRENT_TEST",
    )
    names = (*pytest_names, "CUDA_VISIBLE_DEVICES")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    # all runs on the CPU, and a process that has seen GPUs cannot be forked
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not has_own_tests:
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
