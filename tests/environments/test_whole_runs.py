"""Whole runs that play other people's environments."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from chat_model import write_chat_model

from rlcli.api.config import EnvironmentAbstraction
from rlcli.registry import make_environment

from .servers import openenv_server

SERVER = {
    "command": [sys.executable, str(Path(__file__).with_name("mcp_server.py"))],
    "tools": ["calculate"],
}
SMALL = (
    "models.actor.backend.args={_replace_: true, dtype: float32, lr: 1e-2, warmup_steps: 0}",
    "log.plot=false",
    "log.trackers=[]",
    "train.epochs=null",
)
QUESTION = '{"question": "6+7?", "answer": "13"}\n'
TOKEN = "canary-of-the-parrot"
pytestmark = pytest.mark.timeout(1800)


def needs(module):
    """The mark of a test that plays with a library."""
    is_missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(is_missing, reason=f"make test-environments installs {module}")


def train(folder, recipe, *overrides):
    """The metrics of each step of a run, which takes place in a folder of this name."""
    command = [sys.executable, "-m", "rlcli", "train", recipe, *SMALL, *overrides]
    command += ["--run-dir", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1500, cwd=folder.parent)
    assert ended.returncode == 0, ended.stderr
    (folder / "talk.txt").write_text(ended.stdout + ended.stderr)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if "actor/loss" in (record := json.loads(line))]


def playing(environment, environment_args, **limits):
    """The override by which a policy plays with an environment."""
    args = {"environment": environment, "environment_args": environment_args, **limits}
    args["generation"] = "${generation}"
    interface = {"_replace_": True, "type": "episodes", "args": args}
    return f"graph.actor_gen.interface={json.dumps(interface)}"


def train_documented(folder, recipe, *overrides):
    """The metrics of two steps of a recipe of the documentation, with a small model."""
    (folder / "mine.yaml").write_text(recipe)
    return train(
        folder / "played",
        "mine.yaml",
        f"models.actor.path={write_chat_model(folder / 'model', positions=4096)}",
        "generation.max_new_tokens=240",
        "generation.responses_per_prompt=4",
        "train.prompts_per_step=2",
        "train.steps=2",
        *overrides,
    )


@pytest.fixture
def schema():
    """The schema of the server's tool."""
    server = make_environment(EnvironmentAbstraction("mcp", SERVER))
    (schema,) = server.tool_schemas()
    server.close()
    return schema


@pytest.fixture
def talker(tmp_path, schema):
    """The folder of a model that has learnt one conversation, in which it calls the tool."""
    call = {"name": "calculate", "arguments": {"expression": "6+7"}}
    messages = [
        {"role": "user", "content": "6+7?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "13"},
        {"role": "assistant", "content": "#### 13"},
    ]
    conversation = json.dumps({"tools": [schema], "messages": messages})
    (tmp_path / "conversations.jsonl").write_text(f"{conversation}\n" * 4)
    train(
        tmp_path / "learnt",
        "sft",
        f"models.actor.path={write_chat_model(tmp_path / 'model', positions=1024)}",
        "datasets.train={_replace_: true, type: chat, args: {path: conversations.jsonl}}",
        "train.prompts_per_step=2",
        "train.steps=100",
    )
    return tmp_path / "learnt" / "models" / "actor"


@needs("mcp")
def test_a_chat_model_is_trained_with_the_tools_of_a_server(tmp_path, talker):
    (tmp_path / "questions.jsonl").write_text(QUESTION)
    steps = train(
        tmp_path / "played",
        "grpo",
        f"models.actor.path={talker}",
        "datasets.train.args.path=questions.jsonl",
        playing("mcp", SERVER, max_turns=3),
        "generation.max_new_tokens=240",
        "generation.responses_per_prompt=4",
        "train.prompts_per_step=1",
        "train.steps=2",
    )
    assert len(steps) == 2
    for step in steps:
        assert step["actor/turns"] > 1.5
        assert step["actor/tool_calls"] > 0.5
        assert step["reward/accuracy"] > 0.5


@needs("openenv")
def test_a_chat_model_plays_with_a_server_that_asks_for_a_token(tmp_path, monkeypatch):
    """The server repeats the token, which is nowhere in what the run leaves behind."""
    monkeypatch.setenv("PARROT_TOKEN", TOKEN)
    (tmp_path / "questions.jsonl").write_text(QUESTION)
    with openenv_server(8, TOKEN) as address:
        server = {"url": address, "observation_field": "text", "token_variable": "PARROT_TOKEN"}
        steps = train(
            tmp_path / "played",
            "grpo",
            f"models.actor.path={write_chat_model(tmp_path / 'model', positions=1024)}",
            "models.reward=null",
            "graph.reward_inf=null",
            "datasets.train.args.path=questions.jsonl",
            playing("openenv", server, max_turns=2, turn_tokens=16, scored=True),
            "generation.max_new_tokens=400",
            "generation.responses_per_prompt=4",
            "train.prompts_per_step=1",
            "train.steps=2",
            "train.eval=null",
        )
    assert [step["actor/turns"] for step in steps] == [2.0, 2.0]
    files = [file.read_bytes() for file in (tmp_path / "played").rglob("*") if file.is_file()]
    assert any(b"It knows <redacted>: an easy parrot" in content for content in files)
    assert not any(TOKEN.encode() in content for content in files)


@needs("reasoning_gym")
def test_a_model_is_trained_on_problems_of_a_library(tmp_path, documented):
    steps = train_documented(
        tmp_path,
        documented("reasoning_gym"),
        "datasets.train.args.template='{question}'",
        "datasets.held_out.args.problems=2",
        "train.eval.every_steps=1",
    )
    assert all("actor/turns" in step for step in steps)


@needs("verifiers")
def test_a_model_is_trained_on_tasks_of_verifiers(tmp_path, documented, tasksets):
    steps = train_documented(
        tmp_path,
        documented("verifiers"),
        "taskset.id=number_games",
        "datasets.train.args.rows=8",
        "graph.actor_gen.interface.args.max_turns=2",
        "graph.actor_gen.interface.args.turn_tokens=64",
        "graph.actor_gen.interface.args.variables=[PYTHONPATH]",
    )
    assert all(step["actor/turns"] == 2 for step in steps)
