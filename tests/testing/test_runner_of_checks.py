"""`run_checks` on a toy contract: its reports of checks that pass, fail, crash,
hang and are skipped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import TracebackType

import pytest
from toy_runs import Diary, failure, outcomes, own_tests, run

from rlcli.errors import ProjectError, ResourceError, UnknownComponent, UsageError
from rlcli.testing import subjects as of_subjects
from rlcli.testing.contract import TimeIsUp
from rlcli.testing.results import exit_code
from rlcli.testing.runner import Options, run_checks
from rlcli.testing.subjects import Subject, subjects
from rlcli.testing.time_limit import time_limit, with_line_numbers


@pytest.mark.parametrize("mark", ["exhaustive", "long"])
def test_own_tests_marked_so_run_with_all_layouts_only(project, mark):
    own_tests(
        project,
        f"""
        import pytest

        @pytest.mark.{mark}
        def test_of_every_layout(): ...

        def test_of_one_layout(): ...
        """,
    )
    (tested,) = run()
    assert outcomes(tested).get("of every layout", "left out") == "left out"
    assert outcomes(tested)["of one layout"] == "ok"
    (tested,) = run(all_layouts=True)
    assert outcomes(tested)["of every layout"] == "ok"


def test_other_files_that_mention_a_component_run_with_its_checks(project):
    own_tests(project, "def test_named_after_it(): ...")
    (project / "tests" / "interfaces" / "test_limits.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from toy_contract_for_tests import ToyContract

            NAME = "toy-checked"

            class TestAnother(ToyContract):
                name = "another"

            def test_mentioning_it(): ...

            @pytest.mark.timeout(100)
            def test_of_minutes(): ...
            """
        )
    )
    (tested,) = run(check_seconds=50)
    assert outcomes(tested)["named after it"] == outcomes(tested)["mentioning it"] == "ok"
    assert "of minutes" not in outcomes(tested)
    assert not [check for check in tested.checks if "TestAnother" in check.test]
    (tested,) = run(check_seconds=50, all_layouts=True)
    assert outcomes(tested)["of minutes"] == "ok"


def test_a_correct_component_passes_and_its_checks_are_described(project):
    diary = Diary()
    (tested,) = run(diary=diary)
    assert outcomes(tested) == {
        "it can be made": "ok",
        "its factor is 1": "ok",
        "it divides by its factor": "ok",
        "its limit is kept": "ok",
        "it answers at once": "ok",
        "nothing": "skip",
    }
    assert exit_code([tested]) == 0
    assert diary.components == [("toy-checked", 6), "done"]
    assert diary.begun == [check.words for check in diary.ended] == list(outcomes(tested))
    assert diary.ended[-1].reason == "has no other"
    assert diary.ended[0].note == "of Toy"
    assert [check.cases for check in tested.checks] == [1, 1, 1, 3, 1, 1]


def test_a_violation_is_reported_with_number_cause_and_line(project):
    (tested,) = run("factor=2")
    assert exit_code([tested]) == 1
    reported = failure(tested, "its factor is 1")
    assert (reported.finding, reported.cause, reported.where) == (
        "its factor is 2",
        "leave it alone",
        "interfaces/toy_checked.py:8",
    )


def test_a_crash_is_reported_with_the_line_of_the_component(project):
    (tested,) = run("factor=0")
    reported = failure(tested, "it divides by its factor")
    assert reported.finding == "ZeroDivisionError: division by zero"
    assert reported.where == "interfaces/toy_checked.py:21"
    assert "subject.divided()" in reported.traceback


def test_a_fault_in_the_constructor_is_reported_with_its_line(project):
    (tested,) = run("limit=-1")
    reported = next(check.failure for check in tested.checks if check.failure is not None)
    assert "limit is -1" in reported.finding
    assert reported.where == "interfaces/toy_checked.py:18"


def test_an_unknown_argument_is_one_error(project):
    with pytest.raises(UsageError, match="no argument 'faktor'; did you mean 'factor'") as refused:
        run("faktor=2")
    assert refused.value.hint == "rlcli show toy-checked lists its arguments"
    with pytest.raises(UsageError, match="factor"):
        run("factor=many")


def test_parametrized_cases_count_as_one_check(project):
    (tested,) = run("limit=1")
    (check,) = [check for check in tested.checks if check.outcome == "FAIL"]
    assert (check.words, check.cases, check.failed_cases) == ("its limit is kept", 3, ("2", "3"))
    assert check.failure.finding == "assert n <= subject.limit"


def test_a_check_that_hangs_is_interrupted(project):
    (tested,) = run("seconds=60.0", check_seconds=0.2)
    assert outcomes(tested)["it answers at once"] == "FAIL"
    assert failure(tested, "it answers at once").finding == "not done after 0.2 s"
    assert outcomes(tested)["its factor is 1"] == "ok"


class Impatient(Diary):
    """Presses Ctrl-C while a check sleeps."""

    def begin(self, words):
        if words == "it answers at once":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_ctrl_c_is_reported_with_the_interrupted_check(project):
    # a job may ignore it
    diary, before = Impatient(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run("seconds=60.0", diary=diary)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert diary.components[-1] == "interrupted: it answers at once"


def test_checks_are_selected_by_keyword_or_until_the_first_failure(project):
    (tested,) = run("factor=0", keyword="factor or crash")
    assert list(outcomes(tested)) == ["its factor is 1", "it divides by its factor"]
    (tested,) = run("factor=0", exit_first=True)
    assert list(outcomes(tested)) == ["it can be made", "its factor is 1"]
    (tested,) = run(keyword="factor it divides or LIMIT kept")
    assert list(outcomes(tested)) == ["it divides by its factor", "its limit is kept"]
    for keyword in ("nonesuch", "(", "limit divides"):
        with pytest.raises(UsageError, match="no check matches"):
            run(keyword=keyword)


@pytest.mark.long
def test_each_of_several_components_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    diary = Diary()
    tested = run_checks(subjects("interface"), diary, Options(keyword="registers under its name"))
    assert [one[0] for one in diary.components if one != "done"] == [
        one.subject.name for one in tested
    ]
    assert all(one.count("ok") == len(one.checks) > 0 for one in tested)


def test_tests_of_the_project_are_run_too(project):
    own_tests(
        project,
        """
        def test_it_is_a_toy():
            pass

        def test_sums(tmp_path):
            assert 1 + 1 == 3
        """,
    )
    (tested,) = run()
    assert list(outcomes(tested))[-2:] == ["it is a toy", "sums"]
    reported = failure(tested, "sums")
    assert reported.finding == "assert (1 + 1) == 3"
    assert reported.where == "tests/interfaces/test_toy_checked.py:6"


def test_a_contract_in_a_projects_test_file_replaces_the_general_one(project):
    own_tests(
        project,
        """
        from toy_contract_for_tests import ToyContract

        class TestContract(ToyContract):
            name = "toy-checked"
            args = {"limit": 2}
        """,
    )
    (tested,) = run()
    assert len(tested.checks) == 6
    (failed,) = [check for check in tested.checks if check.outcome == "FAIL"]
    assert failed.failed_cases == ("3",)
    (tested,) = run("limit=4")
    assert exit_code([tested]) == 0


def test_a_contract_with_a_fixture_for_its_arguments_is_left_out_if_values_are_given(project):
    own_tests(
        project,
        """
        import pytest
        from toy_contract_for_tests import ToyContract

        class TestContract(ToyContract):
            name = "toy-checked"

            @pytest.fixture
            def args(self):
                return {}

        def test_own(): ...
        """,
    )
    (tested,) = run("limit=2")
    (failed,) = [check for check in tested.checks if check.outcome == "FAIL"]
    assert failed.failed_cases == ("3",)
    assert outcomes(tested)["own"] == "ok"
    (tested,) = run(keyword="own")
    assert tested.count("ok") == 1


def test_a_partial_contract_in_a_projects_test_file_is_added(project):
    own_tests(
        project,
        """
        from toy_contract_for_tests import ToyPart

        class TestPart(ToyPart):
            name = "toy-checked"
        """,
    )
    (tested,) = run()
    assert len(tested.checks) == 7
    assert {check.words for check in tested.checks} >= {"it can be made", "its limit is kept"}


def test_own_tests_import_from_the_folders_that_the_project_names(project):
    with (project / "pyproject.toml").open("a") as settings:
        settings.write("pythonpath = ['tests/shared folder']\n")
    own_tests(project, "from helper_of_own_tests import LIMIT\n\ndef test_own():\n    pass\n")
    helpers = project / "tests" / "shared folder"
    helpers.mkdir()
    (helpers / "helper_of_own_tests.py").write_text("LIMIT = 2\n")
    (tested,) = run(keyword="own")
    assert [(check.words, check.outcome) for check in tested.checks] == [("own", "ok")]
    assert str(helpers) not in sys.path


def test_contracts_with_different_arguments_are_distinguished(project):
    own_tests(
        project,
        """
        from toy_contract_for_tests import ToyContract

        class TestContract(ToyContract):
            name = "toy-checked"

        class TestLimited(ToyContract):
            name = "toy-checked"
            args = {"limit": 2}

        def test_own():
            pass
        """,
    )
    (tested,) = run(keyword="cases or own")
    assert [(check.words, check.variant, check.outcome) for check in tested.checks] == [
        ("its limit is kept", "no arguments", "ok"),
        ("its limit is kept", "limit=2", "FAIL"),
        ("own", "", "ok"),
    ]


def test_a_reward_is_tested_with_the_checks_of_rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (reward,) = subjects("reward", "math_reward")
    assert reward.file.name == "math_reward.py"
    assert [subject.name for subject in subjects("reward")] == ["math_reward"]
    (tested,) = run_checks([reward], Diary(), Options(keyword="texts"))
    assert tested.count("ok")
    assert not tested.count("FAIL")
    assert not [check for check in tested.checks if "train" in check.words]
    with pytest.raises(UsageError, match="no score_texts"):
        subjects("reward", "sft")


def test_unreadable_project_tests_are_a_failure_and_the_contract_still_runs(project):
    own_tests(project, "import nonesuch\n")
    (tested,) = run()
    reported = failure(tested, "its tests can be imported")
    assert "No module named 'nonesuch'" in reported.finding
    assert reported.where == "tests/interfaces/test_toy_checked.py:1"
    assert outcomes(tested)["it can be made"] == "ok"
    assert exit_code([tested]) == 1


def test_a_closed_output_ends_the_run_silently(project, capfd):
    class Closed(Diary):
        def end(self, check):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(diary=Closed())
    assert capfd.readouterr() == ("", "")


def test_no_files_or_environment_changes_are_left_behind(project):
    run("factor=0")
    assert not [
        path
        for path in project.rglob("*")
        if "pytest" in path.name and path.name != "pyproject.toml"
    ]
    assert os.environ["PYTEST_ADDOPTS"] == "--more-nonsense"
    assert "PYTEST_CURRENT_TEST" in os.environ


def test_junit_has_every_check(project):
    run("factor=0", junit=Path("report.xml"))
    (suite,) = ElementTree.parse(project / "report.xml").getroot()
    assert (suite.get("name"), suite.get("tests"), suite.get("failures"), suite.get("skipped")) == (
        "rlcli",
        "8",
        "2",
        "1",
    )
    assert {case.get("classname") for case in suite} == {"interface.toy-checked.TestContract"}


def test_a_broken_file_is_an_error_alone_and_a_result_among_others(project):
    (project / "interfaces" / "toy_checked_broken.py").write_text("import nonesuch\n")
    with pytest.raises(ProjectError, match="nonesuch") as caught:
        run(name="toy-checked-broken")
    assert caught.value.where.endswith("toy_checked_broken.py:1")
    both = [
        Subject("interface", name, project / f"interfaces/{name}.py")
        for name in ("toy_checked_broken", "toy_checked")
    ]
    diary = Diary()
    broken, working = run_checks(both, diary)
    assert broken.broken is not None
    assert not broken.checks
    assert exit_code([working]) == 0
    assert exit_code([broken, working]) == 2
    assert diary.components == ["done", ("toy_checked", 6), "done"]


def test_a_component_that_lacks_a_library_is_an_error_alone_and_left_out_among_others(project):
    source = (project / "interfaces" / "toy_checked.py").read_text().replace("-checked", "-lacking")
    requires = '"""A toy."""\n\n    REQUIRES = ("nonesuch>=1",)\n'
    lacking_source = source.replace('"""A toy."""\n', requires)
    (project / "interfaces" / "toy_lacking.py").write_text(lacking_source)
    with pytest.raises(ResourceError, match="nonesuch>=1, which is not installed"):
        run(name="toy-lacking")
    both = [
        Subject("interface", name, project / f"interfaces/{name}.py")
        for name in ("toy_lacking", "toy_checked")
    ]
    lacking, working = run_checks(both, Diary())
    assert lacking.lacks_library
    assert lacking.as_json()["ok"]
    assert exit_code([lacking, working]) == 0


@pytest.mark.parametrize(
    ("kind", "name", "error", "says"),
    [
        ("interface", "toy-chekced", UnknownComponent, "did you mean 'toy_checked'"),
        ("family", "lama", UnknownComponent, "did you mean 'llama'"),
        ("recipe", "ppo_mat", UsageError, "ppo_math"),
        ("interfaces", "sft", UsageError, "rlcli test interface"),
        ("toy-checked", None, UsageError, "rlcli test interface toy-checked"),
        ("datset", "x", UsageError, "did you mean dataset"),
        ("all", "sft", UsageError, "takes no name"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(project, kind, name, error, says):
    with pytest.raises(error) as caught:
        subjects(kind, name)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_component_and_recipe_is_a_subject(project):
    every = subjects("all")
    assert {subject.kind for subject in every} == set(of_subjects.KINDS) - {"reward"}
    assert ("family", "qwen3_moe") in {(subject.kind, subject.name) for subject in every}
    assert {subject.file.is_file() for subject in every} == {True}
    assert [subject.name for subject in subjects("interface")] == sorted(
        {s.name for s in every if s.kind == "interface"}
    )
    with pytest.raises(UsageError, match="names several"):
        subjects("interface", None, ["factor=1"])


def test_a_check_interrupted_between_lines_still_has_a_report():
    """Instructions that Python adds, such as those that clean up, belong to no line."""

    def cleans_up():
        try:
            len("")
        finally:
            ""
        return sys._getframe()

    frame = cleans_up()
    nowhere = next(start for start, _, line in frame.f_code.co_lines() if line is None)
    traceback = TracebackType(None, frame, nowhere, -1)
    assert traceback.tb_lineno in {None, -1}
    error = with_line_numbers(TimeIsUp("not done after 1 s").with_traceback(traceback))
    assert pytest.ExceptionInfo.from_exception(error).getrepr()
    assert error.__traceback__.tb_lineno == frame.f_code.co_firstlineno


@pytest.fixture
def crowded():
    """This process has to share one processor with three that never rest."""
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("the system does not say how long a process waits for a processor")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    rivals = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    yield
    for rival in rivals:
        rival.kill()
        rival.wait()
    os.sched_setaffinity(0, before)


def test_a_time_limit_does_not_count_what_others_compute(crowded):
    began = time.process_time()
    with time_limit(0.4):
        while time.process_time() - began < 0.3:
            pass
