"""`make test-changed` selects the tests that concern a change; `make test`, `make test-long` and
`make test-exhaustive` together run all of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from package_tree import build
from tests_of_changes import CONTRACTS_OF_DATASETS, nearest_tests, select_tests

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def graph(package):
    grimp = pytest.importorskip("grimp")
    sys.path.insert(0, str(package))
    yield grimp.build_graph("rlcli", cache_dir=None)
    sys.path.remove(str(package))


def test_tests_that_import_a_module_are_nearer_than_those_of_its_importers(graph):
    tests = {"rlcli.ops.gae": {"tests/a.py"}, "rlcli.spelling": {"tests/b.py"}}
    assert nearest_tests("rlcli.ops.gae", tests, graph) == {"tests/a.py"}


def test_a_module_that_no_test_imports_has_the_tests_of_its_importers(graph):
    module = "rlcli.ops.gae"
    importers = graph.find_modules_that_directly_import(module)
    assert importers
    tests = {importer: {"tests/a.py"} for importer in importers}
    assert nearest_tests(module, tests, graph) == {"tests/a.py"}
    assert nearest_tests(module, {}, graph) == set()


def test_of_many_tests_those_in_the_room_of_the_module_are_selected(graph):
    files = {f"tests/ops/test_{number}.py" for number in range(3)}
    others = {f"tests/cli/test_{number}.py" for number in range(40)}
    assert select_tests("rlcli/ops/gae.py", {"rlcli.ops.gae": files | others}, graph) >= files
    selected = select_tests("rlcli/ops/gae.py", {"rlcli.ops.gae": files | others}, graph)
    assert not selected & others


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("interfaces/dpo.py", {"tests/interfaces/test_dpo.py"}),
        ("tests/interfaces/test_dpo.py", {"tests/interfaces/test_dpo.py"}),
        ("recipes/ppo_math.yaml", {"tests/recipe/test_shipped_recipes.py"}),
        ("README.md", set()),
    ],
)
def test_components_tests_and_recipes_have_tests(graph, path, expected):
    assert select_tests(path, {}, graph) == expected


@pytest.mark.parametrize("path", ["datasets/prompt_only.py", "datasets/_scores.py"])
def test_datasets_have_the_tests_that_make_them_by_their_names(path):
    graph = pytest.importorskip("grimp").ImportGraph()
    graph.add_module("rlcli.datasets.mixture")
    graph.add_import(importer="rlcli.datasets.prompt_only", imported="rlcli.datasets._scores")
    selected = select_tests(path, {}, graph)
    assert selected >= {"tests/datasets/test_scores.py", CONTRACTS_OF_DATASETS}
    assert "tests/datasets/test_mixture.py" not in selected


def test_a_test_is_run_by_one_of_three_targets_which_are_all_run_before_release():
    """A law is run by two, with more examples by the last one."""
    makefile = (ROOT / "Makefile").read_text()
    recipe = r"^(test|test-long|test-exhaustive):.*\n\t\$\(PYTEST_OF_ALL\) -m (.+) \$\(ARGS\)$"
    runs = dict(re.findall(recipe, makefile, re.M))
    thorough = '"exhaustive or hypothesis" --hypothesis-profile=thorough'
    assert runs == {
        "test": '"not exhaustive and not long"',
        "test-long": '"long and not exhaustive"',
        "test-exhaustive": thorough,
    }
    script = (ROOT / ".ci/run").read_text()
    assert re.search(r"^run_tests test\nrun_tests test-long$", script, re.M)
    assert re.search(r"^for target in .* test-exhaustive; do\n  run_tests ", script, re.M)


def test_a_changed_file_is_printed_with_its_tests(package):
    command = [sys.executable, str(ROOT / "tests/house/tests_of_changes.py"), str(package), "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all((ROOT / line).exists() for line in done.stdout.splitlines())
