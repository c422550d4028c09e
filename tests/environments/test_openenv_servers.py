"""The environment `openenv` with a real server. `make test-environments` runs these tests in an
environment of their own."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from toy_project import TINY_PPO

from rlcli.api.environment import EnvironmentFailure
from rlcli.errors import UsageError

from .servers import openenv_server

ROOM = 32
"""Sessions of a server."""
ROW = {"prompt": "Talk to the parrot.", "level": "angry"}
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("openenv") is None,
        reason="make test-environments installs openenv",
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def url():
    with openenv_server(ROOM) as address:
        yield address


@pytest.fixture
def environment():
    return "openenv"


@pytest.fixture
def begun(make, url):
    """The function that begins an episode."""

    def begun(**args):
        parrot = make(url=url, **{"observation_field": "text", **args})
        parrot.reset(ROW, 7)
        return parrot

    return begun


def test_an_episode_begins_with_its_prompt_and_what_the_server_says(make, url):
    beginning = make(url=url, observation_field="text").reset(ROW, 7)
    assert beginning == "Talk to the parrot.\nan easy parrot, 7\n"


def test_a_server_is_reset_with_fields_of_the_row(make, url):
    beginning = make(url=url, observation_field="text", reset_fields=["level"]).reset(ROW, 7)
    assert beginning == "Talk to the parrot.\nan angry parrot, 7\n"


def test_texts_rewards_and_the_end_are_those_of_the_server(begun):
    parrot = begun()
    steps = [parrot.step(action) for action in ("good day", "", "goodbye")]
    assert [step.text for step in steps] == ["English: good day", "English: ", "English: goodbye"]
    assert [step.reward for step in steps] == [2.0, 0.0, 1.0]
    assert [step.done for step in steps] == [False, False, True]


def test_actions_may_have_other_fields(begun):
    assert begun(action={"language": "French"}).step("salut").text == "French: salut"


def test_a_policy_may_read_the_whole_observation(begun):
    observed = json.loads(begun(observation_field=None).step("é").text)
    assert observed["text"] == "English: é"


def test_episodes_have_sessions_of_their_own(begun):
    first, second = begun(), begun()
    first.step("a")
    assert (first.step("count").text, second.step("count").text) == ("2", "1")


def test_the_policy_reads_why_its_action_was_refused(begun):
    parrot = begun()
    assert parrot.step("hatch").text == "error: parrots lay eggs"
    too_long = parrot.step("x" * (1 << 22))
    assert "at most 2097152 characters" in too_long.text
    assert parrot.step("count").text == "2"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"action_field": "words"},
            "words: Extra inputs are not permitted; set action_field and action",
        ),
        ({"action_field": "language"}, "message: Field required; set action_field"),
        ({"observation_field": "words"}, "an observation has no 'words', but "),
    ],
)
def test_wrong_names_of_fields_are_not_the_mistake_of_the_policy(make, url, args, message):
    with pytest.raises(ValueError, match=message):  # noqa: PT012 either call
        parrot = make(url=url, **args)
        parrot.reset(ROW, 7)
        parrot.step("hello")


def test_a_server_that_is_not_there_is_a_failure(make):
    with pytest.raises(EnvironmentFailure, match="ConnectionRefusedError"):
        make(url="http://127.0.0.1:9").reset(ROW, 7)


def test_a_server_that_ends_or_has_no_room_is_a_failure(make):
    with openenv_server(1) as address:
        first, second = make(url=address), make(url=address)
        first.reset(ROW, 7)
        with pytest.raises(EnvironmentFailure, match="CAPACITY_REACHED"):
            second.reset(ROW, 7)
        with pytest.raises(EnvironmentFailure, match="ConnectionClosed"):
            first.step("leave")


@pytest.fixture
def guarded(monkeypatch):
    """The address of a server that asks for the token in the variable PARROT_TOKEN."""
    monkeypatch.setenv("PARROT_TOKEN", "canary-of-the-parrot")
    with openenv_server(2, token="canary-of-the-parrot") as address:
        yield address


def test_a_server_gets_the_token_of_a_variable(make, guarded, monkeypatch):
    parrot = make(url=guarded, token_variable="PARROT_TOKEN")
    assert "an easy parrot, 7" in parrot.reset(ROW, 7)
    with pytest.raises(EnvironmentFailure, match="HTTP 403"):
        make(url=guarded).reset(ROW, 7)
    monkeypatch.setenv("PARROT_TOKEN", "canary-of-another")
    with pytest.raises(EnvironmentFailure, match="HTTP 403") as refused:
        make(url=guarded, token_variable="PARROT_TOKEN").reset(ROW, 7)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("token", ["canary\n", "canary\r\nX-Other: header", "cänary"])
def test_what_no_header_can_hold_is_neither_sent_nor_shown(make, url, monkeypatch, token):
    monkeypatch.setenv("PARROT_TOKEN", token)
    with pytest.raises(EnvironmentFailure, match="variable PARROT_TOKEN has characters") as refused:
        make(url=url, token_variable="PARROT_TOKEN").reset(ROW, 7)
    assert token not in str(refused.value)


def test_an_address_has_a_scheme(make):
    with pytest.raises(UsageError, match="must begin with http"):
        make(url="127.0.0.1:8000")


def test_no_token_goes_to_another_machine_in_plain_text(make):
    with pytest.raises(UsageError, match="a token is only sent over https"):
        make(url="http://games.example:8000", token_variable="PARROT_TOKEN")
    make(url="https://games.example", token_variable="PARROT_TOKEN")
    make(url="http://games.example:8000")


def test_a_slow_step_ends_the_episode(pool, asked, url):
    with pool(url=url, seconds=5.0).calls() as calls:
        begun, slow = asked(
            calls,
            {"call": "reset", "row": ROW, "seed": 1},
            {"call": "step", "action": "sleep"},
        )
    assert "value" in begun
    assert slow == {"limit": "step() took longer than 5 s"}


def rlcli(*arguments):
    """A command that has ended."""
    command = [sys.executable, "-m", "rlcli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_a_run_without_its_token_is_refused_before_it_starts():
    args = '{url: "http://127.0.0.1:9", token_variable: NO_TOKEN}'
    episodes = f"{{environment: openenv, environment_args: {args}}}"
    interface = f"{{_replace_: true, type: episodes, args: {episodes}}}"
    ended = rlcli("train", "grpo_math", *TINY_PPO, f"graph.actor_gen.interface={interface}")
    assert ended.returncode == 6, ended.stderr
    assert "openenv: the environment has no NO_TOKEN" in ended.stderr


def contract(*arguments):
    ended = rlcli("test", "environment", "openenv", *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("chosen", ["null", "text"])
def test_the_contract_holds(url, chosen):
    assert "needs arguments" not in contract(f"url={url}", f"observation_field={chosen}")


def test_nothing_is_tried_without_a_server():
    report = " ".join(contract().split())
    assert "needs arguments: rlcli test environment openenv url=…" in report
