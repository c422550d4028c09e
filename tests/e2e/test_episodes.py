"""Whole runs whose policy plays episodes."""

import json

import pytest
from chat_model import write_chat_model
from run_files import samples
from toy_project import TINY_PPO

from rlcli.api.environment import schemas_of
from rlcli.interfaces.environments.calculator import Calculator

pytestmark = pytest.mark.timeout(300)

ACTOR_GEN = "graph.actor_gen.interface"
TINY = (
    "models.actor.backend.args.warmup_steps=0",
    "models.actor.backend.args.eps=1e-5",  # as usual, it would let rounding move weights
    "generation.responses_per_prompt=4",
    "train.prompts_per_step=4",
    "train.eval.dataset=null",
    "train.steps=2",
    "log.plot=false",
    "log.trackers=[]",
)


def numbers_of(run, *names):
    assert run.code == 0, run.err
    return [[step[name] for name in names] for step in run.steps]


def test_episodes_of_one_turn_train_like_plain_responses_bit_for_bit(tmp_path, train_into):
    settings = (*TINY_PPO, "generation.responses_per_prompt=4")
    one_turn = "{_replace_: true, type: episodes, args: {environment: calculator, max_turns: 1}}"
    generation = f"{ACTOR_GEN}.args.generation=${{generation}}"
    plain = train_into(tmp_path, "grpo_math", *settings, name="plain")
    played = train_into(
        tmp_path, "grpo_math", *settings, f"{ACTOR_GEN}={one_turn}", generation, name="played"
    )
    names = ("actor/loss", "actor/grad_norm", "reward/reward", "actor/kl")
    assert numbers_of(played, *names) == numbers_of(plain, *names)


FLAKY = """
from rlcli.api.environment import EnvironmentFailure, register_environment
from rlcli.interfaces.environments.guess import Guess


class Flaky(Guess):
    \"\"\"A game that half of the rows cannot play.\"\"\"

    def step(self, action):
        if self._seed % 2 == 0:
            raise EnvironmentFailure("no server")
        return super().step(action)

    def reset(self, row, seed):
        self._seed = seed
        return super().reset(row, seed)


register_environment("zz_flaky", Flaky)
"""


def test_prompts_whose_environment_fails_are_replaced(tmp_path, train_into):
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    environments = tmp_path / "interfaces" / "environments"
    environments.mkdir(parents=True)
    (environments / "zz_flaky.py").write_text(FLAKY)
    settings = "{environment: zz_flaky, max_error_fraction: 1.0}"
    run = train_into(tmp_path, "grpo_guess", *TINY, f"{ACTOR_GEN}.args={settings}")
    numbers = numbers_of(run, "samples/dropped/environment_failed", "actor/discarded")
    assert sum(dropped for dropped, _ in numbers) > 0
    assert any(share > 0 for _, share in numbers)
    assert len(run.steps) == 2


def test_layouts_of_ranks_play_the_same_episodes(tmp_path, train_into):
    variants = {
        "inline": (),
        "micro_batches": ("train.microbatches=3",),
        "two_ranks": ("launch=local", "cluster.devices_per_node=2"),
    }
    runs = {
        name: train_into(tmp_path, "grpo_guess", *TINY, *extra, name=name)
        for name, extra in variants.items()
    }
    expected = numbers_of(runs["inline"], "actor/turns", "actor/out_of_turns", "actor/reward")
    assert all(turns > 1 for turns, _, _ in expected)
    losses = numbers_of(runs["inline"], "actor/loss")
    for run in runs.values():
        played = numbers_of(run, "actor/turns", "actor/out_of_turns", "actor/reward")
        for ours, theirs in zip(played, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        for (ours,), (theirs,) in zip(numbers_of(run, "actor/loss"), losses, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


CALL = {"name": "calculate", "arguments": {"expression": "6+7"}}
CONVERSATION = {
    "tools": list(schemas_of(Calculator).values()),
    "messages": [
        {"role": "user", "content": "6+7?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
        {"role": "tool", "content": "13"},
        {"role": "assistant", "content": "#### 13"},
    ],
}
SMALL = (
    "models.actor.backend.args={_replace_: true, dtype: float32, lr: 1e-2, warmup_steps: 0}",
    "log.plot=false",
    "log.trackers=[]",
)


def write_rows(file, *rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def talker(tmp_path, train_into):
    """The folder of a chat model that has learnt one conversation, and nearly always repeats it."""
    model = write_chat_model(tmp_path / "model", positions=1024)
    rows = write_rows(tmp_path / "conversations.jsonl", *[CONVERSATION] * 4)
    learnt = train_into(
        tmp_path,
        "sft",
        f"models.actor.path={model}",
        f"datasets.train={{_replace_: true, type: chat, args: {{path: {rows}}}}}",
        "train.prompts_per_step=2",
        "train.epochs=null",
        "train.steps=100",
        *SMALL,
        name="learnt",
    )
    assert learnt.code == 0, learnt.err
    return learnt.folder / "models" / "actor"


def test_a_chat_model_plays_with_its_template_in_a_whole_run(tmp_path, train_into, talker):
    questions = write_rows(tmp_path / "rows.jsonl", {"question": "6+7?", "answer": "13"})
    settings = "{_replace_: true, type: episodes, args: {environment: calculator, max_turns: 3}}"
    run = train_into(
        tmp_path,
        "grpo",
        f"models.actor.path={talker}",
        f"datasets.train.args.path={questions}",
        f"{ACTOR_GEN}={settings}",
        f"{ACTOR_GEN}.args.generation=${{generation}}",
        "generation.max_new_tokens=240",
        "train.prompts_per_step=1",
        "train.epochs=null",
        "train.steps=2",
        *SMALL,
    )
    names = ("actor/turns", "actor/tool_calls", "reward/accuracy")
    for turns, calls, accuracy in numbers_of(run, *names):
        assert turns > 1.5
        assert calls > 0.5
        assert accuracy > 0.5
    episode = max(samples(run.folder), key=lambda sample: sample["reward"])
    texts = [turn["text"] for turn in episode["turns"]]
    assert texts == [json.dumps(CALL), "<tool>13", "#### 13"]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_a_policy_learns_to_call_the_calculator(tmp_path, warm_command):
    """With its warm start, as a user trains it: minutes."""
    done = warm_command("train", "grpo_calculator", cwd=tmp_path, timeout=3500)
    assert done.returncode == 0, done.stderr
    (metrics,) = (tmp_path / "runs" / "grpo_calculator").glob("*/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluations = [record for record in records if "eval/accuracy" in record]
    assert evaluations[0]["eval/accuracy"] <= 0.3
    assert evaluations[-1]["eval/accuracy"] >= 0.95
    assert evaluations[-1]["eval/tool_calls"] > 0.95
