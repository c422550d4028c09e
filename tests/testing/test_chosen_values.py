"""The values with which `rlcli test` tries arguments that have no default."""

import pytest
from toy_runs import own_tests, run

from rlcli.testing.chosen_values import chosen_values
from rlcli.testing.subjects import subjects


@pytest.fixture
def declare(project):
    """Adds declarations to the class of the toy interface."""
    file = project / "interfaces" / "toy_checked.py"

    def add(*declarations):
        text = file.read_text()
        text = text.replace("@dataclass\n", "@dataclass(kw_only=True)\n")
        text = text.replace("import dataclass\n", "import dataclass\nfrom typing import Literal\n")
        for declaration in declarations:
            text = text.replace("    factor:", f"    {declaration}\n    factor:")
        file.write_text(text)

    return add


def chosen(**present):
    (subject,) = subjects("interface", "toy-checked")
    return chosen_values(subject, present)


@pytest.mark.parametrize(
    ("annotation", "limits", "value"),
    [
        ("int", {}, 2),
        ("float", {}, 0.5),
        ("bool", {}, False),
        ("int | None", {}, 2),
        ("Literal['b', 'a']", {}, "b"),
        ("float | Literal['auto']", {}, "auto"),
        ("float", {"gt": 1}, 2),
        ("int", {"ge": 50}, 100),
        ("float", {"lt": 0}, -1),
    ],
)
def test_a_number_switch_or_choice_gets_a_value_within_its_limits(
    declare, annotation, limits, value
):
    declare(f"needed: {annotation}", f"LIMITS = {{'needed': {limits}}}" if limits else "")
    assert chosen() == {"needed": value}
    assert type(chosen()["needed"]) is type(value)


@pytest.mark.parametrize(
    "declarations",
    [
        ["needed: int", "name: str"],
        ["needed: int", "column: int | str"],
        ["needed: int", "LIMITS = {'needed': {'gt': 1000}}"],
        ["needed: int", "EXAMPLES = ({'row': {}, 'right': 'a', 'wrong': 'b'},)"],
        ["needed: int", "url: str = ''", "path: str = ''", "ONE_OF = ('url', 'path')"],
    ],
)
def test_nothing_is_chosen_where_the_author_must_give_values(declare, declarations):
    declare(*declarations)
    assert chosen() == {}


def test_only_what_is_not_given_is_chosen(declare):
    declare("needed: int", "name: str")
    assert chosen(name="x") == {"needed": 2}
    assert chosen(name="x", needed=7) == {}


def test_the_report_says_with_which_values_a_component_was_tested(declare):
    declare("needed: int")
    (tested,) = run()
    assert {check.variant for check in tested.checks} == {"needed=2"}
    (tested,) = run("needed=7")
    assert {check.variant for check in tested.checks} == {"needed=7"}


def test_values_from_the_authors_own_contract_come_first(declare, project):
    declare("needed: int", "switch: bool")
    own_tests(
        project,
        """
        from toy_contract_for_tests import ToyContract

        class TestContract(ToyContract):
            name = "toy-checked"
            args = {"needed": 5}
        """,
    )
    (tested,) = run()
    assert {check.variant for check in tested.checks} == {"needed=5, switch=False"}


def test_a_fixture_may_give_the_arguments(declare, project):
    declare("needed: int")
    own_tests(
        project,
        """
        import pytest
        from toy_contract_for_tests import ToyContract

        class TestContract(ToyContract):
            name = "toy-checked"

            @pytest.fixture
            def args(self):
                return {"needed": 5}
        """,
    )
    (tested,) = run()
    assert {check.variant for check in tested.checks} == {""}
