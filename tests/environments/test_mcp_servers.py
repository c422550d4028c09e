"""The environment `mcp` with real servers. `make test-environments` runs these tests in an
environment of their own."""

from __future__ import annotations

import http.server
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from toy_project import TINY_PPO

from rlcli.api.environment import EnvironmentFailure, ToolMistake, call_tool, tools_in
from rlcli.errors import ProjectError, UsageError, WorkerError

HERE = Path(__file__).parent
ODD = [sys.executable, str(HERE / "odd_mcp_server.py")]
STDIO = [sys.executable, str(HERE / "mcp_server.py")]
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("mcp") is None, reason="make test-environments installs mcp"
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture
def environment():
    return "mcp"


@pytest.fixture(scope="module")
def url():
    """The address of a server on this machine."""
    command = [*STDIO, "http"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        port = process.stdout.readline().strip()
        assert any("running on" in line for line in process.stderr)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


RESET = {"call": "reset", "row": {}, "seed": 1}


def called(tool, **arguments):
    return {"call": "tools", "calls": [[tool, arguments]]}


def test_the_tools_are_those_of_the_server(make):
    schemas = tools_in(make(command=STDIO))
    assert {"calculate", "note", "look"} <= schemas.keys()
    calculate = schemas["calculate"]["function"]
    assert calculate["description"] == "Work out a sum of whole numbers, such as 12+7-3."
    assert calculate["parameters"]["properties"]["expression"]["type"] == "string"
    assert calculate["parameters"]["required"] == ["expression"]


def test_a_recipe_may_choose_some_of_the_tools(make):
    assert list(tools_in(make(command=STDIO, tools=["note", "look"]))) == ["note", "look"]
    with pytest.raises(EnvironmentFailure, match="the server has no tool lok"):
        tools_in(make(command=STDIO, tools=["lok"]))


def test_a_policy_reads_what_tools_return_and_what_is_wrong_with_a_call(make):
    desk = make(command=STDIO)
    assert call_tool(desk, "calculate", {"expression": "12+7-3"}) == "16"
    with pytest.raises(ToolMistake, match="only sums of whole numbers"):
        call_tool(desk, "calculate", {"expression": "2**9"})
    with pytest.raises(ToolMistake, match="expression is 12; it must be string"):
        call_tool(desk, "calculate", {"expression": 12})
    with pytest.raises(ToolMistake, match="there is no tool 'burn'"):
        call_tool(desk, "burn", {})
    assert call_tool(desk, "calculate", {"expression": "1+1"}) == "2"


def test_what_is_not_text_is_named(make):
    observed = call_tool(make(command=STDIO), "look", {})
    assert observed == "a desk\n[image/png]\n[desk://drawer]\nDear policy"


def test_halves_of_characters_do_not_break_the_connection(make):
    desk = make(command=STDIO)
    assert call_tool(desk, "note", {"text": "a\ud800b"}) == "a?b"
    assert call_tool(desk, "note", {"text": "👩‍👩‍👧\0"}) == "a?b|👩‍👩‍👧\0"


def test_each_episode_has_a_server_of_its_own(make):
    first, second = make(command=STDIO), make(command=STDIO)
    assert call_tool(first, "note", {"text": "a"}) == "a"
    assert call_tool(first, "note", {"text": "b"}) == "a|b"
    assert call_tool(second, "note", {"text": "c"}) == "c"


def test_a_server_that_ends_is_not_the_mistake_of_the_policy(make):
    desk = make(command=STDIO)
    with pytest.raises(EnvironmentFailure, match="it wrote: the desk is closed"):
        call_tool(desk, "leave", {})
    with pytest.raises(EnvironmentFailure, match="Connection closed"):
        call_tool(desk, "look", {})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"command": ["no-such-program"]}, "No such file or directory: 'no-such-program'"),
        ({"command": [sys.executable, "-c", "raise SystemExit('no key')"]}, "it wrote: no key"),
        ({"command": [sys.executable, "-c", "print('hello')"]}, "Connection closed"),
        ({"url": "http://127.0.0.1:9/mcp"}, "All connection attempts failed"),
        ({"url": "http://127.0.0.1:9/mcp", "token_variable": "NO_KEY"}, "variable NO_KEY"),
    ],
)
def test_a_server_that_does_not_start_is_a_failure_with_a_reason(make, args, message):
    with pytest.raises(EnvironmentFailure, match=message):
        make(**args).reset({}, 1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "command or url is needed"),
        ({"command": []}, "command or url is needed"),
        ({"command": ["a"], "url": "http://b"}, "command and url are given; keep one"),
        ({"command": ["a"], "token_variable": "DESK_KEY"}, "token_variable is for url"),
        (
            {"url": "http://desk.example/mcp", "token_variable": "DESK_KEY"},
            "a token is only sent over https",
        ),
    ],
)
def test_impossible_ways_to_a_server_are_refused(make, args, message):
    with pytest.raises(UsageError, match=message):
        make(**args)


def test_a_server_that_runs_already_is_asked_through_http(make, url):
    desk = make(url=url)
    assert call_tool(desk, "calculate", {"expression": "12+7"}) == "19"
    with pytest.raises(ToolMistake, match="only sums of whole numbers"):
        call_tool(desk, "calculate", {"expression": "?"})


class Gateway(http.server.BaseHTTPRequestHandler):
    """Passes requests on to `target` while `status` is 200."""

    target = ""
    status = 200
    tokens: list[str] = []

    def do_POST(self):
        import urllib.request

        self.tokens.append(self.headers.get("authorization"))
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.status != 200:
            self.send_error(self.status)
            return
        dropped = ("host", "content-length", "accept-encoding", "connection")
        headers = {name: text for name, text in self.headers.items() if name.lower() not in dropped}
        request = urllib.request.Request(self.target, body, headers)
        with urllib.request.urlopen(request) as answer:
            content = answer.read()
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
            self.end_headers()
            self.wfile.write(content)

    def do_GET(self):
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def gateway(url, monkeypatch):
    monkeypatch.setattr(Gateway, "target", url)
    monkeypatch.setattr(Gateway, "tokens", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
        server.shutdown()


@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_a_gateway_without_a_server_is_not_the_mistake_of_the_policy(
    make, gateway, monkeypatch, status
):
    desk = make(url=gateway)
    assert call_tool(desk, "calculate", {"expression": "1+1"}) == "2"
    monkeypatch.setattr(Gateway, "status", status)
    with pytest.raises(EnvironmentFailure):
        call_tool(desk, "calculate", {"expression": "1+1"})
    with pytest.raises(EnvironmentFailure):
        make(url=gateway).reset({}, 1)


def test_a_server_gets_the_token_of_a_variable(make, gateway, monkeypatch):
    monkeypatch.setenv("DESK_KEY", "canary")
    call_tool(make(url=gateway, token_variable="DESK_KEY"), "calculate", {"expression": "1+1"})
    assert set(Gateway.tokens) == {"Bearer canary"}


def test_a_process_of_environments_sees_the_token_that_an_argument_names(
    pool, gateway, monkeypatch, asked
):
    monkeypatch.setenv("DESK_KEY", "canary-of-the-desk")
    with pool(url=gateway, token_variable="DESK_KEY").calls() as calls:
        _, reply = asked(calls, RESET, called("repeat", text="canary-of-the-desk", times=2))
    assert set(Gateway.tokens) == {"Bearer canary-of-the-desk"}
    assert reply["value"] == [["<redacted>" * 2, False, False]]


def test_a_slow_tool_is_interrupted_and_the_episode_goes_on(pool, asked):
    with pool(command=STDIO, seconds=5.0).calls() as calls:
        _, slow, quick = asked(
            calls, RESET, called("sleep", seconds=60.0), called("repeat", text="a", times=3)
        )
    assert slow == {"value": [["error: sleep took longer than 5 s", True, True]]}
    # a server that works on one thing at a time is still asleep
    assert quick["value"][0][0] in ("aaa", "error: repeat took longer than 5 s")


def test_a_policy_reads_so_much_and_no_more(pool, asked):
    with pool(command=STDIO).calls() as calls:
        _, reply = asked(calls, RESET, called("repeat", text="ab", times=1_000_000))
    assert reply["value"] == [["ab" * 50 + "…" + "ab" * 50, False, False]]


def test_a_server_sees_variables_that_are_named(pool, monkeypatch, asked):
    monkeypatch.setenv("DESK_KEY", "canary")
    for variables, text in (((), "is not set"), (("DESK_KEY",), "canary")):
        with pool(variables, command=STDIO).calls() as calls:
            _, reply = asked(calls, RESET, called("variable", name="DESK_KEY"))
        assert reply["value"] == [[text, False, False]]


def test_a_pool_asks_once_which_tools_there_are(pool):
    desk = pool(command=STDIO, tools=["note"])
    schemas = desk.tool_schemas()
    assert [schema["function"]["name"] for schema in schemas] == ["note"]
    assert desk.tool_schemas() is schemas


def test_a_tool_may_have_no_arguments(make):
    (schema,) = tools_in(make(command=[*ODD, "none"])).values()
    assert schema["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("oddity", "message"),
    [
        ("name", "a tool has the name"),
        ("arguments", "the parameters of look are not those of a JSON object"),
        ("long", "the schemas of the tools have 100"),
    ],
)
def test_an_odd_list_of_tools_is_refused(pool, oddity, message):
    with pytest.raises(ProjectError, match=message):
        pool(command=[*ODD, oddity]).tool_schemas()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["false"], "the MCP server failed: MCPError: Connection closed"),
        ([*ODD, "endless"], "the list of tools does not end"),
    ],
)
def test_a_run_ends_if_no_server_says_which_tools_there_are(pool, command, reason):
    with pytest.raises(WorkerError, match=f"does not say which tools it has: .*{reason}"):
        pool(command=command).tool_schemas()


def rlcli(*arguments):
    """A command that has ended."""
    command = [sys.executable, "-m", "rlcli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def contract(*arguments):
    return rlcli("test", "environment", "mcp", *arguments)


def test_nothing_is_tried_without_a_server():
    ended = contract()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = " ".join(ended.stdout.split())
    assert "needs arguments: rlcli test environment mcp command=… or url=…" in report


def test_a_run_without_a_server_is_refused_before_it_starts():
    interface = "{_replace_: true, type: episodes, args: {environment: mcp}}"
    ended = rlcli("train", "grpo_math", *TINY_PPO, f"graph.actor_gen.interface={interface}")
    assert ended.returncode == 2, ended.stderr
    assert "environment mcp: command or url is needed" in ended.stderr


def test_the_contract_holds_for_a_server_that_runs_already(url):
    ended = contract(f"url={url}", "tools=[calculate]")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_contract_holds_for_a_server_of_each_episode():
    words = "played or alone or releases or network or temporary"
    ended = contract(f"command=[{','.join(STDIO)}]", "tools=[calculate,note]", "-k", words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
