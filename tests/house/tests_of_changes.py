"""The test files that concern what has changed since a commit: those that import a changed module
or, if none does, those that import a module which imports it, and so on. Tests make most datasets
by their names: theirs are those that `rlcli test` finds.

    python tests/house/tests_of_changes.py FOLDER [COMMIT]

FOLDER has the package tree that `package_tree.py` builds. Prints a path on each line.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp
from package_tree import COMPONENT_FOLDERS, ROOT

TESTS = ROOT / "tests"
MANY = 20
"""Test files above which only those in the room of the changed module are selected, if any are."""
SHIPPED_RECIPES = "tests/recipe/test_shipped_recipes.py"
DATASETS = "datasets"
CONTRACTS_OF_DATASETS = "tests/datasets/test_shipped_datasets.py"
"""Of all of them; other components have a file each."""


def changed_files(commit: str) -> list[str]:
    """Paths of changed and new files, relative to the repository."""
    commands = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    return [
        path
        for command in commands
        for path in subprocess.check_output(["git", *command], cwd=ROOT, text=True).splitlines()
    ]


def imported_modules(source: str) -> set[str]:
    """Names of modules that a file imports anywhere; `from a import b` counts as `a` and `a.b`."""
    modules = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def tests_by_module() -> dict[str, set[str]]:
    """Module → test files that import it. Helpers of tests are modules as well."""
    importers = defaultdict[str, set[str]](set)
    for file in TESTS.rglob("test_*.py"):
        for module in imported_modules(file.read_text(encoding="utf-8")):
            importers[module].add(str(file.relative_to(ROOT)))
    return importers


def module_of(path: str) -> str | None:
    """The module that a file defines; None for a file that is not one."""
    parts = Path(path).with_suffix("").parts
    if not path.endswith(".py"):
        return None
    if parts[0] == "tests":
        return parts[-1]
    if parts[0] in COMPONENT_FOLDERS:
        parts = ("rlcli", *parts)
    return ".".join(parts).removesuffix(".__init__")


def nearest_tests(module: str, tests: Mapping[str, set[str]], graph: grimp.ImportGraph) -> set[str]:
    """The test files that are nearest to a module in the graph of imports."""
    modules, seen = {module}, set[str]()
    while modules:
        if selected := set[str]().union(*(tests.get(name, ()) for name in modules)):
            return selected
        seen |= modules
        in_graph = modules & graph.modules
        modules = set().union(*map(graph.find_modules_that_directly_import, in_graph)) - seen
    return set()


def in_own_room(path: str, tests: set[str]) -> set[str]:
    """Of many test files, those in the folder of tests that is named after the changed file's."""
    if len(tests) <= MANY:
        return tests
    parts = Path(path).parts
    room = parts[0] if parts[0] in COMPONENT_FOLDERS else parts[1]
    return {test for test in tests if test.startswith(f"tests/{room}/")} or tests


def tests_of_datasets(module: str, graph: grimp.ImportGraph) -> set[str]:
    """The test files about the dataset in a module, or about those that import this shared code."""
    from rlcli.testing.own_tests import files_about  # the graph is built before rlcli is imported

    datasets = set(filter(is_dataset, graph.modules))
    concerned = {module} & datasets or graph.find_downstream_modules(module) & datasets
    helpers, folders = {module} - datasets, [TESTS / DATASETS]
    files = [
        file
        for dataset in concerned
        for file in files_about({dataset.rpartition(".")[2]}, dataset, helpers, datasets, folders)
    ]
    return {str(file.relative_to(ROOT)) for file in files} | {CONTRACTS_OF_DATASETS}


def is_dataset(module: str) -> bool:
    folder, _, name = module.removeprefix("rlcli.").partition(".")
    return folder == DATASETS and bool(name) and not name.startswith("_")


def select_tests(path: str, tests: Mapping[str, set[str]], graph: grimp.ImportGraph) -> set[str]:
    """The test files that concern a changed file."""
    name = Path(path).name
    if path.startswith("tests/") and name.startswith("test_"):
        return {path} if (ROOT / path).exists() else set()
    if path.startswith("recipes/"):
        return {SHIPPED_RECIPES}
    module = module_of(path)
    if module is None:
        return set()
    namesakes = {str(file.relative_to(ROOT)) for file in TESTS.rglob(f"test_{name}")}
    nearest = in_own_room(path, nearest_tests(module, tests, graph))
    if not path.startswith(f"{DATASETS}/"):
        return namesakes | nearest
    in_room = {test for test in nearest if test.startswith(f"tests/{DATASETS}/")}
    return namesakes | in_room | tests_of_datasets(module, graph)


def select_all(paths: Iterable[str], package: Path) -> list[str]:
    """The test files that concern changed files, by name."""
    sys.path.insert(0, str(package))
    graph = grimp.build_graph("rlcli", cache_dir=None)
    tests = tests_by_module()
    return sorted(set[str]().union(*(select_tests(path, tests, graph) for path in paths)))


def main(package: str, commit: str = "HEAD") -> None:
    """Print the test files that concern the changes since a commit."""
    for test in select_all(changed_files(commit), Path(package).resolve()):
        print(test)


if __name__ == "__main__":
    main(*sys.argv[1:])
