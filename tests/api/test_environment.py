"""The contract of environments: tools by type hints, and what a policy may do wrong with them."""

import pytest

from rlcli.api.environment import (
    Environment,
    Observation,
    ToolMistake,
    call_tool,
    has_score,
    is_game,
    schemas_of,
    states_tools,
    tools_in,
    tools_of,
)
from rlcli.errors import ProjectError


class Workshop(Environment):
    """Tools of all kinds."""

    def add(self, a: int, b: int = 1) -> int:
        """Add two numbers."""
        return a + b

    def count(self, words: list[str]) -> int:
        """Count words."""
        return len(words)

    def fail(self) -> str:
        """Divide by zero."""
        return str(1 / 0)

    def leave(self) -> str:
        """End the process."""
        raise SystemExit(3)

    def _hidden(self) -> str:
        return "not a tool"


class Game(Environment):
    def step(self, action: str) -> Observation:
        return Observation(done=True)

    def score(self, answer: str) -> float:
        return 1.0


class Both(Workshop):
    def step(self, action: str) -> Observation:
        return Observation()


def test_public_methods_are_tools():
    assert tools_of(Workshop) == ("add", "count", "fail", "leave")
    assert tools_of(Game) == ()


def test_a_game_has_a_step_and_may_score():
    assert (is_game(Game), has_score(Game)) == (True, True)
    assert (is_game(Workshop), has_score(Workshop)) == (False, False)


def test_an_environment_with_step_and_tools_is_refused():
    with pytest.raises(ProjectError, match="both step"):
        tools_of(Both)


def test_tools_have_the_schemas_of_their_type_hints():
    schema = schemas_of(Workshop)["add"]["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    assert schema["parameters"]["required"] == ["a"]


def test_a_tool_whose_arguments_json_cannot_express_is_refused():
    class Odd(Environment):
        def dig(self, where: complex) -> str:
            """Dig."""
            return ""

    with pytest.raises(ProjectError, match="Odd: dig: where has the type"):
        schemas_of(Odd)


class Desk(Environment):
    """Knows its tools when it is there."""

    def __init__(self, *names):
        self.names = names

    def tool_schemas(self):
        properties = {"count": {"type": "integer"}}
        parameters = {"type": "object", "properties": properties, "required": ["count"]}
        function = {"description": "Write. " * 100, "parameters": parameters}
        return [{"type": "function", "function": {**function, "name": n}} for n in self.names]

    def call_tool(self, name, arguments):
        return [name] * arguments["count"]


def test_an_environment_may_state_tools_that_are_not_methods():
    assert (states_tools(Desk), states_tools(Workshop)) == (True, False)
    assert list(tools_in(Desk("pen", "ink"))) == ["pen", "ink"]
    assert tools_in(Workshop()) == schemas_of(Workshop)
    assert call_tool(Desk("pen"), "pen", {"count": 2}) == "['pen', 'pen']"
    for name, arguments in (("ink", {}), ("pen", {}), ("pen", {"count": "2"})):
        with pytest.raises(ToolMistake):
            call_tool(Desk("pen"), name, arguments)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["pen", "pen"], "two tools have the name pen"),
        (["<|im_end|>"], "a tool has the name"),
        ([""], "a tool has the name"),
        (map(str, range(200)), "there are 200 tools; at most 128"),
        ([f"pen{number}-{'x' * 100}" for number in range(100)], "the schemas of the tools have"),
        ([7], "is not the schema of a tool"),
    ],
)
def test_tools_that_are_stated_wrongly_are_refused(names, problem):
    with pytest.raises(ValueError, match=problem):
        tools_in(Desk(*names))


def test_a_tool_returns_a_text():
    assert call_tool(Workshop(), "add", {"a": 2, "b": 3}) == "5"
    assert call_tool(Workshop(), "add", {"a": 2}) == "3"
    assert call_tool(Workshop(), "count", {"words": ["to", "be"]}) == "2"


@pytest.mark.parametrize(
    ("name", "arguments", "mistake"),
    [
        ("subtract", {}, "there is no tool 'subtract'; the tools are add"),
        ("_hidden", {}, "there is no tool '_hidden'"),
        ("reset", {}, "there is no tool 'reset'"),
        ("__class__", {}, "there is no tool '__class__'"),
        ("add", {}, "add: a is missing"),
        ("add", {"a": "2"}, 'add: a is "2"; it must be integer'),
        ("add", {"a": True}, "add: a is true; it must be integer"),
        ("add", {"a": 1, "c": 2}, 'add: "c" is not an argument; the arguments are: a, b'),
        ("count", {"words": [1]}, "count: words[0] is 1; it must be string"),
        ("fail", {}, "ZeroDivisionError: division by zero"),
        ("leave", {}, "SystemExit: 3"),
    ],
)
def test_mistakes_are_for_the_policy_to_read(name, arguments, mistake):
    with pytest.raises(ToolMistake) as caught:
        call_tool(Workshop(), name, arguments)
    assert mistake in str(caught.value)


def test_an_environment_without_methods_of_its_own_keeps_the_prompt():
    environment = Environment()
    assert environment.reset({}, 0) is None
    environment.close()
