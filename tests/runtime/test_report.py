"""What calls report, and under which names."""

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.dataflow import MFCDef, ModelInterfaceType
from rlcli.recipe.mesh import Mesh
from rlcli.runtime.report import Answered, named_reports, performance, profile_of
from rlcli.topology import RolePlacement


def running(name, role, sums, stats=None, work=None):
    mfc = MFCDef(
        name=name,
        model_name=role,
        interface_type=ModelInterfaceType.INFERENCE,
        interface_impl=ModelInterfaceAbstraction("x"),
    )
    answers = {
        0: {
            "scores": sums,
            "counts": {},
            "stats": stats or {},
            "seconds": 1.0,
            "dropped": {},
            "segments": {},
            "version": 0,
            "tokens": 0,
            "operations": 0.0,
            "rate": 0.0,
            **(work or {}),
        }
    }
    return Answered.of(mfc, RolePlacement(role, (0,), Mesh()), answers)


REWARDS = [
    running("math_inf", "reward", {"reward": (3.0, 9.0, 4)}),
    running("short_inf", "reward", {"reward": (1.0, 1.0, 4)}),
]


def by_role(calls):
    return named_reports(calls, Answered.reports, lambda mfc: mfc.model_name)


def test_reports_of_two_calls_of_one_role_do_not_overwrite_each_other():
    actor = running("train", "actor", {}, {"loss": 2.0})
    expected = {"math_inf/reward": 0.75, "short_inf/reward": 0.25, "actor/loss": 2.0}
    assert by_role([*REWARDS, actor]) == expected
    assert by_role([actor, *reversed(REWARDS)]) == expected


def test_one_call_reports_under_its_section():
    assert by_role(REWARDS[:1]) == {"reward/reward": 0.75}
    assert named_reports(REWARDS[:1], Answered.reports, lambda _: "") == {"reward": 0.75}
    assert set(named_reports(REWARDS, Answered.reports, lambda _: "")) == {
        "math_inf/reward",
        "short_inf/reward",
    }


def test_a_name_does_not_depend_on_which_calls_had_errors():
    """What never happened in a step is not reported, but its name is not another call's then."""
    none, some = {"counts": {"errors": (0.0, 0.0, 4)}}, {"counts": {"errors": (1.0, 1.0, 4)}}
    for of_judge, of_code, reported in (
        (some, some, {"judge_inf/errors": 0.25, "code_inf/errors": 0.25}),
        (some, none, {"judge_inf/errors": 0.25}),
        (none, some, {"code_inf/errors": 0.25}),
        (none, none, {}),
    ):
        calls = [
            running("judge_inf", "reward", {}, work=of_judge),
            running("code_inf", "reward", {}, work=of_code),
        ]
        assert by_role(calls) == reported


def test_scores_and_statistics_of_two_calls_do_not_overwrite_each_other():
    calls = [
        running("gen", "actor", {"accuracy": (1.0, 1.0, 4)}),
        running("classify", "reward", {}, {"accuracy": 0.75}),
    ]
    scores = named_reports(calls, Answered.averages, lambda _: "")
    stats = named_reports(calls, lambda answered: answered.stats, lambda _: "")
    assert {name: moments.mean for name, moments in scores.items()} == {"gen/accuracy": 0.25}
    assert stats == {"classify/accuracy": 0.75}


def test_a_call_on_several_draws_of_a_step_reports_once():
    first = running("math_inf", "reward", {"reward": (3.0, 9.0, 3)})
    second = running("math_inf", "reward", {"reward": (1.0, 1.0, 1), "accuracy": (1.0, 1.0, 1)})
    both = first.and_then(second)
    assert by_role([both]) == {"reward/reward": 1.0, "reward/accuracy": 1.0}
    assert both.costs() == {"time/math_inf": 2.0}


def test_the_performance_of_a_role_covers_its_calls_that_compute_with_tokens():
    calls = [
        running("gen", "actor", {}, work={"tokens": 100, "operations": 1e9, "rate": 4e9}),
        running("train", "actor", {}, work={"tokens": 300, "operations": 3e9, "rate": 4e9}),
        running("advantages", "actor", {}, work={"rate": 4e9}),
        running("grade", "reward", {}),
        running("score", "judge", {}, work={"tokens": 50}),
    ]
    assert performance(calls) == {
        "perf/actor/tokens_per_second": 200.0,
        "perf/actor/flops": 4e9,
        "perf/actor/mfu": 0.5,
        "perf/judge/tokens_per_second": 50.0,
    }
    assert [call.mfu for call in profile_of(1, calls)] == [0.25, 0.75, None, None, None]
