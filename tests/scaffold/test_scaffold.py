"""What `rlcli new` writes works as it stands: its tests pass, its style is ours,
nothing is overwritten."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from warm_command import load_everything, run_here

from rlcli import registry
from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.errors import ResourceError, UnknownComponent, UsageError
from rlcli.scaffold import KINDS, plan, plan_project, write
from rlcli.scaffold.names import class_name
from rlcli.scaffold.plan import COPIES
from rlcli.scaffold.templates import HERE, render
from rlcli.testing.tokenizer import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("qa", "my-own_rather-long-name-of-some-thing-2")


def run(*command, cwd):
    env = {
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
        "HOME": str(cwd),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=500)


@pytest.fixture
def tested(project):
    """What `rlcli test interface <arguments>` says in the project, in a fork of this process."""
    load_everything()
    return lambda *arguments: run_here("test", "interface", *arguments, cwd=project)


@pytest.fixture
def project(tmp_path, monkeypatch):
    write(plan_project(tmp_path / "mine"))
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    return tmp_path / "mine"


@pytest.fixture
def full(project):
    """A project with one or two of everything."""
    for kind in KINDS:
        for name in NAMES:
            write(
                plan(
                    kind,
                    f"{name}-{kind}" if kind in ("interface", "reward", "estimator") else name,
                    project,
                )
            )
    return project


@pytest.mark.exhaustive
@pytest.mark.timeout(600)  # pytest in a process of its own, on a machine that may be busy
def test_the_tests_of_all_scaffolds_pass(full):
    """Whole contracts under one name; under the other, whether a name like that works."""
    chosen = ("-k", "qa or registers or not TestContract")
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, cwd=full)
    assert done.returncode == 0, done.stdout + done.stderr
    files = len(list((full / "tests").rglob("test_*.py")))
    assert files == len(NAMES) * 7
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 3 * files - 2


def test_rendered_files_pass_lint_and_format(full):
    ruff = str(Path(sys.executable).parent / "ruff")
    of_projects = "line-length = 120"  # as in the pyproject.toml of a new project
    config = ("--config", str(ROOT / "pyproject.toml"), "--config", of_projects, "--no-cache", ".")
    done = run(ruff, "check", *config, cwd=full)
    assert done.returncode == 0, done.stdout
    done = run(ruff, "format", "--diff", *config, cwd=full)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("like", ["group_relative", "sft", "dpo", "math_reward"])
def test_a_copied_interface_differs_only_in_its_names(project, like):
    name = f"my-{like.replace('_', '-')}"
    write(plan("interface", name, project, like=like))
    text = (project / "interfaces" / f"my_{like}.py").read_text()
    cls = class_name("interface", name)
    assert f'register_interface("{name}", {cls})' in text
    assert not re.search(rf"\b{registry.signature('interfaces', like).class_name}\b", text)
    mine, original = registry.signature("interfaces", name), registry.signature("interfaces", like)
    assert [a.name for a in mine.arguments] == [a.name for a in original.arguments]
    assert text.count(cls) >= 2


def test_episodes_begin_with_the_rows_of_a_new_dataset(project):
    write(plan("dataset", "zz-rows", project))
    Path("rows.jsonl").write_text('{"prompt": "What is 6*7?", "answer": "42"}\n')
    described = DatasetAbstraction("zz-rows", {"path": "rows.jsonl"})
    tokenizer = byte_tokenizer(chat=True)
    (sample,) = registry.make_dataset(described, DatasetUtility(1, 0, 1, tokenizer))
    question = [{"role": "user", "content": "What is 6*7?"}]
    assert sample.metadata == {"answer": ["42"], "messages": [question]}


@pytest.mark.long
def test_a_copied_interface_passes_its_tests(project, tested):
    write(plan("interface", "my-baseline", project, like="group_relative"))
    done = tested("my-baseline")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_copy_that_trains_otherwise_fails_its_test(project, tested):
    write(plan("interface", "my-sft", project, like="sft"))
    file = project / "interfaces" / "my_sft.py"
    file.write_text(file.read_text().replace("return nll_loss(", "return 1.1 * nll_loss("))
    done = tested("my-sft")
    assert done.returncode == 1
    failed = done.stdout[done.stdout.index("FAIL") :]
    assert failed.startswith("FAIL  with neutral arguments it trains as the interface that it was")
    assert re.search(r"loss is [\d.]+ with sft, [\d.]+ with my-sft", failed)


@pytest.mark.long
def test_a_reward_without_answers_passes_its_tests(project, tested):
    write(plan("reward", "brevity", project, without_answer=True))
    done = tested("brevity")
    assert done.returncode == 0, done.stdout + done.stderr
    layer = (project / "recipes" / "rewards" / "brevity.yaml").read_text()
    assert "Needs: any dataset of prompts" in layer


def test_only_rewards_are_without_answers(project):
    with pytest.raises(UsageError, match="--without-answer is for rewards only"):
        plan("dataset", "qa", project, without_answer=True)


def test_only_interfaces_can_be_copied(project):
    with pytest.raises(UsageError, match="copies interfaces only"):
        plan("dataset", "qa", project, like="sft")
    with pytest.raises(UnknownComponent, match="did you mean 'sft'"):
        plan("interface", "qa", project, like="sftt")


@pytest.mark.long
def test_a_broken_interface_fails_its_test(project):
    """The rendered tests can fail: a mean in place of a sum is found out."""
    write(plan("interface", "qa", project))
    file = project / "interfaces" / "qa.py"
    file.write_text(
        file.read_text().replace(
            "loss = nll_loss(output.logprobs, mask)", "loss = -output.logprobs.mean()"
        )
    )
    done = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "sum", cwd=project
    )
    assert done.returncode == 1
    assert "test_the_loss_is_a_sum" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("bug", "check"),
    [
        (("t.mask, all_reduce)", "t.mask)"), "FAIL  inference is the same on 1, 2, 3"),
        (
            ("earned, t.mask, all_reduce)", "earned, None, all_reduce)"),
            "FAIL  actions outside responses get 0",
        ),
        (
            ("earned - self.baseline_share * mean", "self.baseline_share * mean - earned"),
            "FAIL  a higher reward never lowers the advantages of its own response",
        ),
    ],
    ids=["mean-over-the-samples-of-one-rank", "mean-over-prompts-too", "sign"],
)
def test_mistakes_in_a_new_estimator_are_found(project, tested, bug, check):
    write(plan("estimator", "qa", project))
    file = project / "interfaces" / "qa.py"
    text = file.read_text()
    assert len(text.splitlines()) <= 40
    file.write_text(text.replace(*bug))
    done = tested("qa", "-k", "ranks or responses or higher_reward")
    assert done.returncode == 1
    assert check in done.stdout


def test_every_template_is_used_and_missing_values_are_errors(project):
    used = {template for files in KINDS.values() for template in files} | set(
        filter(None, COPIES.values())
    )
    assert used < {path.name for path in HERE.glob("*.j2")}
    with pytest.raises(UndefinedError):
        render("dataset.py.j2", name="x")


def test_existing_files_are_not_overwritten_and_nothing_else_is_written(project):
    layer = project / "recipes" / "data" / "qa.yaml"
    layer.parent.mkdir()
    layer.write_text("mine")
    with pytest.raises(UsageError, match=r"qa\.yaml already exists"):
        write(plan("dataset", "qa", project))
    assert layer.read_text() == "mine"
    assert not (project / "datasets" / "qa.py").exists()
    assert not (project / "tests").exists()


def test_a_failure_removes_the_files_already_written(project):
    (project / "tests").write_text("a file where a folder should be")
    with pytest.raises(ResourceError, match="not writable"):
        write(plan("dataset", "qa", project))
    assert not (project / "datasets" / "qa.py").exists()
    assert (project / "tests").read_text() == "a file where a folder should be"


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("dataset", "My-Data", "for example 'my-data'"),
        ("dataset", "../evil", "cannot name"),
        ("dataset", "_shared", "cannot name"),
        ("dataset", "", "cannot name"),
        ("interface", "class", "a Python keyword"),
        ("reward", "math_reward", "built-in interface"),
        ("dataset", "prompt-answer", "built-in dataset"),
        ("backend", "fsdp", "built-in backend"),
        ("recipe", "ppo_math", "built-in recipe"),
        ("family", "llama", "built-in family"),
        ("interface", "model", "ModelInterface"),
        ("interface", "environments", "a folder of components: interfaces/environments"),
        ("reward", "rewards", "a folder of components"),
    ],
)
def test_bad_names_are_refused(project, kind, name, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        plan(kind, name, project)


def test_a_python_project_is_refused_with_the_setting_to_add(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(UsageError, match=r"\[tool\.rlcli\]"):
        write(plan_project(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]
