"""Whole runs whose policy plays episodes."""

import json

import pytest
from chat_model import write_chat_model
from flaky_game import NAME, make_flaky_project, write_environment
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


@pytest.mark.long
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


@pytest.mark.long
def test_prompts_whose_environment_fails_are_replaced(tmp_path, train_into):
    make_flaky_project(tmp_path)
    settings = f"{{environment: {NAME}, max_error_fraction: 1.0}}"
    run = train_into(tmp_path, "grpo_guess", *TINY, f"{ACTOR_GEN}.args={settings}")
    numbers = numbers_of(run, "samples/dropped/environment_failed", "actor/discarded")
    assert sum(dropped for dropped, _ in numbers) > 0
    assert any(share > 0 for _, share in numbers)
    assert len(run.steps) == 2


@pytest.mark.long
def test_an_evaluation_leaves_out_prompts_whose_environment_fails(tmp_path, train_into):
    """The others win as much as they can: no failure counts as a reward of 0."""
    make_flaky_project(tmp_path)
    args = {
        "environment": NAME,
        "environment_args": {"prize": 0.75},
        "max_error_fraction": 1.0,
    }
    run = train_into(
        tmp_path,
        "grpo_guess",
        *(setting for setting in TINY if "eval" not in setting),
        f"train.eval.graph.eval_gen.interface.args={json.dumps(args)}",
        "datasets.held_out.args.problems=16",
    )
    assert run.code == 0, run.err
    (first, *_) = [record for record in run.records if "eval/reward" in record]
    assert 0.0 < first["eval/discarded"] < 1.0
    assert first["eval/reward"] == 0.75
    assert "episodes; first, sample" in run.err


@pytest.mark.long
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


@pytest.mark.long
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


FORGETFUL = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>"
    "{{ message.content if message.role == 'user' or loop.last else '-' }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""It writes a dash in place of every earlier turn."""

LISTENER = """
from rlcli.api.environment import Environment, Observation, register_environment


class Listener(Environment):
    \"\"\"Likes some letters better than others.\"\"\"

    REPRODUCIBLE = True

    def step(self, action):
        return Observation("and?", reward=sum(action.encode()) % 10 / 10)


register_environment("zz_listener", Listener)
"""


OF_LISTENER = (
    f"{ACTOR_GEN}={{_replace_: true, type: episodes, args: {{environment: zz_listener}}}}",
    f"{ACTOR_GEN}.args.max_turns=3",
    f"{ACTOR_GEN}.args.turn_tokens=5",
    f"{ACTOR_GEN}.args.scored=true",
    f"{ACTOR_GEN}.args.generation=${{generation}}",
    "graph.reward_inf=null",
    "train.eval.graph.eval_reward=null",
    "models.reward=null",
    "generation.max_new_tokens=240",
    "generation.responses_per_prompt=4",
    "train.prompts_per_step=2",
    "train.steps=2",
    *SMALL,
    "models.actor.backend.args.eps=1e-5",
)
LAYOUTS = {
    "inline": (),
    "micro_batches": ("train.microbatches=3",),
    "two_ranks": ("launch=local", "cluster.devices_per_node=2"),
}


@pytest.fixture
def forgetful(tmp_path):
    """Settings that name a model with this template, and rows."""
    write_environment(tmp_path, "zz_listener", LISTENER)
    model = write_chat_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(FORGETFUL)
    questions = write_rows(tmp_path / "rows.jsonl", *[{"question": "?", "answer": "1"}] * 4)
    return (f"models.actor.path={model}", f"datasets.train.args.path={questions}")


@pytest.mark.long
def test_rows_of_forked_episodes_are_computed_as_they_were_sampled(tmp_path, train_into, forgetful):
    """By every layout of ranks: with the same weights, the log-probs of the sampler are those of
    the trainer."""
    expected = None
    for name, layout in LAYOUTS.items():
        run = train_into(tmp_path, "grpo", *forgetful, *OF_LISTENER, *layout, name=name)
        numbers = numbers_of(run, "actor/forks", "actor/loss", "actor/kl")
        expected = expected or numbers
        assert [forks for forks, *_ in numbers] == [2, 2]
        assert numbers == [pytest.approx(step, rel=1e-4, abs=1e-6) for step in expected]
        assert run.steps[0]["actor/sampler_gap"] < 1e-5
    (line, *_) = samples(run.folder)
    assert [turn.get("repeated") is not None for turn in line["turns"]] == [0, 1, 0, 1, 0]


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
