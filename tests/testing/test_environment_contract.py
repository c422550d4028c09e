"""The contract of environments: a planted bug breaks one law, unusual environments break none."""

import importlib.util
import inspect
import os
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from rlcli.errors import RlcliError
from rlcli.testing.contract import Violation
from rlcli.testing.declaration import DeclaredSubject
from rlcli.testing.environment import EnvironmentContract
from rlcli.testing.environment_checks.playable import check_playable
from rlcli.testing.environment_checks.trial import EnvironmentTrial
from rlcli.testing.environment_checks.values import comes_back
from rlcli.testing.runner import run_checks
from rlcli.testing.subjects import Subject

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "mutants"
LAWS = {
    " ".join(method.__doc__.split()): name
    for name, method in inspect.getmembers(EnvironmentContract, inspect.isfunction)
    if name.startswith("test_")
}
STATED = "EXAMPLES lead to what they state: what the policy reads, and the reward"
ELSEWHERE = "an episode depends on its row, seed and actions alone, if it is REPRODUCIBLE"


def _kill_rate():
    spec = importlib.util.spec_from_file_location("kill_rate", HERE / "kill_rate.py")
    module = sys.modules["kill_rate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kill_rate = _kill_rate()
PLANTED = [bug for bug in kill_rate.mutants("environments") if bug.file.startswith("interfaces/")]
UNUSUAL = sorted((HERE / "unusual" / "environments").glob("*.py"))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project for environments."""
    (tmp_path / "interfaces" / "environments").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    return tmp_path


@pytest.fixture
def broken_laws(project, tmp_path):
    """Add an environment to the project; the words of the laws that it breaks."""

    def check(name, source, left_out=()):
        (project / "interfaces" / "environments" / f"{name}.py").write_text(source)
        folder = tmp_path / "scratch"
        folder.mkdir()
        contract = type("Checked", (EnvironmentContract,), {"name": name})()
        fixtures = {"tmp_path": folder, "record_property": lambda name, value: None}
        laws = [(words, law) for words, law in LAWS.items() if words not in left_out]
        trial = EnvironmentTrial(name, {}, folder)
        try:
            check_playable(trial)
            fixtures["trial"] = trial
        except (Violation, RlcliError):
            pass
        return [words for words, law in laws if _is_broken(getattr(contract, law), fixtures)]

    return check


def _is_broken(law, fixtures):
    parameters = inspect.signature(law).parameters
    if not parameters.keys() <= fixtures.keys():  # it cannot be played
        return False
    try:
        law(**{name: fixtures[name] for name in parameters})
    except (pytest.skip.Exception, Violation) as outcome:
        return isinstance(outcome, Violation)
    return False


@pytest.mark.long
@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.bug.replace(" ", "-"))
def test_a_planted_bug_breaks_one_law(broken_laws, bug):
    name = f"planted_{PLANTED.index(bug)}"
    source = (ROOT / bug.file).read_text().replace(bug.old, bug.new)
    registers = f'register_environment("{Path(bug.file).stem}"'
    source = source.replace(registers, f'register_environment("{name}"')
    assert broken_laws(name, source, {STATED, ELSEWHERE} - {bug.law}) == [bug.law]


@pytest.fixture
def pipes_come_and_go():
    """Another thread of this process opens and closes a pipe all the time."""
    ended = threading.Event()

    def open_and_close():
        while not ended.is_set():
            ends = os.pipe()
            ended.wait(0.01)
            for end in ends:
                os.close(end)

    thread = threading.Thread(target=open_and_close)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.mark.usefixtures("pipes_come_and_go")
def test_what_other_threads_open_is_not_left_by_an_environment(broken_laws):
    file = next(file for file in UNUSUAL if file.stem == "only_scores")
    name = "among_others"
    source = file.read_text().replace(f'"{file.stem}"', f'"{name}"')
    assert broken_laws(name, source, {ELSEWHERE}) == []


def test_every_law_of_environments_has_a_bug_that_breaks_it_alone():
    of_all_kinds = {name for name in vars(DeclaredSubject) if name.startswith("test_")}
    laws = {words for words, name in LAWS.items() if name not in of_all_kinds}
    assert {bug.law for bug in kill_rate.mutants("environments")} - {""} == laws


NEEDY = '''"""An environment that others provide."""

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.environment import Environment, register_environment


@dataclass(kw_only=True)
class Needy(Environment):
    """Rewards a word."""

    ONE_OF: ClassVar[tuple[str, ...]] = ("program", "url")

    word: str
    """The right answer."""

    program: str | None = None
    """Its program."""

    url: str | None = None
    """Its address."""

    def score(self, answer: str) -> float:
        return float(answer == self.word)


register_environment("needy", Needy)
'''


@pytest.fixture
def needy(project):
    """The function that tests an environment with some arguments."""
    name = f"zz_{project.name}"
    file = project / "interfaces" / "environments" / f"{name}.py"
    file.write_text(NEEDY.replace('"needy"', f'"{name}"'))
    return lambda *values: run_checks([Subject("environment", name, file, values)], Mock())[0]


@pytest.mark.parametrize(
    ("values", "lacking"),
    [
        ((), "word=… program=… or url=…"),
        (("word=yes",), "program=… or url=…"),
        (("url=http://a",), "word=…"),
    ],
)
def test_an_environment_without_its_arguments_is_not_tried(needy, values, lacking):
    tested = needy(*values)
    command = f"rlcli test environment {tested.subject.name} {lacking}"
    assert tested.is_sound
    reasons = {check.reason for check in tested.checks if check.reason}
    assert reasons == {f"not tried: needs arguments: {command}"}


def test_an_environment_with_its_arguments_is_tried(needy):
    reasons = [check.reason for check in needy("word=yes", "url=http://a").checks]
    assert not any("needs arguments" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("observed", "is_same"),
    [
        ("you wrote zebra日本語العر", True),
        ("you wrote zebra日本語", False),  # shorter than a text that came back
        ("you wrote zebra???????????", False),
        ("zebra日本語quagga", False),
    ],
)
def test_a_text_may_be_cut_but_not_changed(observed, is_same):
    assert comes_back("日本語العربيةไทย", observed) == is_same


def test_a_violation_says_what_and_where_and_how_to_mend_it(project):
    """An episode with a wrong reward, for example."""
    source = (ROOT / "interfaces" / "environments" / "guess.py").read_text()
    source = source.replace("reward=-0.1", "reward=None").replace('"guess"', '"wrong_reward"')
    file = project / "interfaces" / "environments" / "wrong_reward.py"
    file.write_text(source)
    trial = EnvironmentTrial("wrong_reward", {}, project)
    with pytest.raises(Violation) as caught:
        EnvironmentContract().test_rewards_are_numbers(trial)
    step = 1 + source[: source.index("def step")].count("\n")
    assert caught.value.finding == "step() gives the reward None"
    assert caught.value.cause.startswith("a reward is a finite int or float")
    assert caught.value.where == f"{file}:{step}"


@pytest.mark.long
@pytest.mark.parametrize("file", UNUSUAL, ids=lambda file: file.stem)
def test_an_unusual_environment_breaks_no_law(broken_laws, file):
    assert broken_laws(file.stem, file.read_text()) == []
