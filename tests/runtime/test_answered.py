"""What calls report, and under which names."""

from rlcli.api.config import ModelInterfaceAbstraction
from rlcli.api.dataflow import MFCDef, ModelInterfaceType
from rlcli.recipe.mesh import Mesh
from rlcli.runtime.report import Answered, named_reports
from rlcli.topology import RolePlacement


def running(name, role, sums, stats=None):
    mfc = MFCDef(name=name, model_name=role, interface_type=ModelInterfaceType.INFERENCE,
                 interface_impl=ModelInterfaceAbstraction("x"))  # fmt: skip
    answers = {0: {"scores": sums, "counts": {}, "stats": stats or {}, "seconds": 1.0, "dropped": {}, "version": 0}}
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
    assert set(named_reports(REWARDS, Answered.reports, lambda _: "")) == {"math_inf/reward", "short_inf/reward"}


def test_a_call_on_several_draws_of_a_step_reports_once():
    first = running("math_inf", "reward", {"reward": (3.0, 9.0, 3)})
    second = running("math_inf", "reward", {"reward": (1.0, 1.0, 1), "accuracy": (1.0, 1.0, 1)})
    both = first.and_then(second)
    assert by_role([both]) == {"reward/reward": 1.0, "reward/accuracy": 1.0}
    assert both.times() == {"math_inf": 2.0}
