"""Which test files of a project concern a component."""

import pytest

from rlcli.recipe.components import declared
from rlcli.testing.own_tests import files_about, helpers_of
from rlcli.testing.subjects import subjects

MODULE = "rlcli.interfaces.rewards.my_reward"
NAMES = ("my-reward", "my_reward")
COMPONENTS = {MODULE, "rlcli.interfaces.sft", "rlcli.datasets.chat"}
HELPERS = {"rlcli.interfaces.rewards._counting"}
ABOUT = {
    "imports its class": "from rlcli.interfaces.rewards.my_reward import MyReward",
    "imports its module": "from rlcli.interfaces.rewards import _text, my_reward",
    "imports it in a function": "def test_it():\n    import rlcli.interfaces.rewards.my_reward",
    "makes it by its name": "make_interface(ModelInterfaceAbstraction('my-reward'))",
    "imports a helper of it": "from rlcli.interfaces.rewards._counting import count",
    "has its contract": "class TestContract(InterfaceContract):\n    name = 'my_reward'",
}
NOT_ABOUT = {
    "imports another too": f"import {MODULE}\nfrom rlcli.datasets.chat import Chat",
    "imports a helper for another one": (
        "import rlcli.datasets.chat\nfrom rlcli.interfaces.rewards import _counting"
    ),
    "names it for another one": "from rlcli.interfaces.sft import SFTInterface\nROLE = 'my-reward'",
    "has its name in a comment": "pass  # my-reward",
    "has its name in a text": "print('my-reward is good')",
    "runs its checks in a process": "run([python, '-m', 'rlcli', 'test', 'reward', 'my-reward'])",
    "runs its checks by a fixture": "rlcli('test', 'reward', 'my-reward')",
    "runs its checks in a shell": "shell('rlcli test reward my-reward', 'my-reward')",
    "runs checks": "from rlcli.testing.runner import run_checks\nNAME = 'my-reward'",
    "cannot be parsed": "NAME = 'my-reward",
}


def is_about(folder, source):
    (folder / "test_of_something.py").write_text(source)
    return bool(files_about(NAMES, MODULE, HELPERS, COMPONENTS, [folder]))


@pytest.mark.parametrize("source", ABOUT.values(), ids=ABOUT)
def test_a_file_that_uses_a_component_is_about_it(tmp_path, source):
    assert is_about(tmp_path, source)


@pytest.mark.parametrize("source", NOT_ABOUT.values(), ids=NOT_ABOUT)
def test_a_file_about_several_or_that_runs_checks_is_not_about_it(tmp_path, source):
    assert not is_about(tmp_path, source)


def test_helpers_are_modules_that_a_component_imports_through_each_other(tmp_path):
    sources = {
        MODULE: "from ._counting import count\nfrom rlcli.interfaces import _words, sft",
        "rlcli.interfaces.rewards._counting": "def count():\n    import rlcli.ops.kl",
        "rlcli.interfaces._words": "from .rewards import _counting\nfrom . import rewards",
        "rlcli.interfaces._unused": "import rlcli.ops.losses",
        "rlcli.interfaces.sft": "import rlcli.interfaces._unused",
        "rlcli.ops.kl": "def kl(:",
    }
    for module, source in sources.items():
        (tmp_path / module).write_text(source)
    helpers = helpers_of(
        MODULE, COMPONENTS, lambda module: tmp_path / module if module in sources else None
    )
    assert helpers == {
        "rlcli.interfaces.rewards._counting",
        "rlcli.interfaces._words",
        "rlcli.ops.kl",
    }


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("dataset", "prompt_only", "test_scores"),
        ("dataset", "arithmetic_pairs", "test_generated_problems"),
        ("dataset", "mixture", "test_mixture"),
        ("environment", "calculator", "test_environments"),
        ("interface", "math_reward", "test_score_texts"),
        ("interface", "math_reward", "test_units"),
        ("interface", "ppo_actor", "test_policy_losses"),
        ("dataset", "chat", "test_messages"),
    ],
)
def test_tests_of_built_in_components_are_found_whatever_their_names(kind, name, expected):
    (subject,) = subjects(kind, name)
    assert expected in [file.stem for file in subject.own_tests]


@pytest.mark.parametrize("name", ["mismatched", "generation", "dpo"])
def test_a_file_that_is_named_after_another_component_is_that_ones(name):
    """`test_kto` mentions the first, `test_group_relative` the second."""
    (subject,) = subjects("interface", name)
    files = [file for file in subject.own_tests if file.parent.name == "interfaces"]
    assert [file.stem for file in files] == [f"test_{name}"]


def test_tests_of_backends_are_found_by_name_only():
    (subject,) = subjects("backend", "fsdp")
    assert [file.stem for file in subject.own_tests] == ["test_fsdp"]


def test_every_backend_that_needs_more_than_a_processor_has_tests_of_its_own():
    """Without them `rlcli test` could hardly try it: servers and GPUs are in them."""
    needs_more = {
        subject.name: subject
        for subject in subjects("backend")
        if declared("backends", subject.name, "SERVER_REQUIRES")
        or declared("backends", subject.name, "DEVICES") == ("cuda",)
    }
    assert set(needs_more) >= {"megatron", "sglang", "vllm"}
    assert [name for name, subject in needs_more.items() if not subject.own_tests] == []
