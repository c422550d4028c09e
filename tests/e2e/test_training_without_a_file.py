"""Each algorithm trains a model on rows without a recipe of one's own, and the recipe that the
command prints trains to the same result."""

import json
import shlex

import pytest
from chat_model import write_chat_model
from run_results import result

SMALL = ("train.prompts_per_step=2", "seed=3")
GENERATED = (*SMALL, "generation.max_new_tokens=4", "generation.responses_per_prompt=2")
SUMS = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(4)]
PAIRS = [
    {
        "chosen": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"{n}"}],
        "rejected": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}],
    }
    for n in range(4)
]
JUDGED = [{"prompt": f"{n}+1?", "completion": f"{n + 1}", "label": n != 2} for n in range(4)]
SCORE = "def score(response):\n    return float(len(response))\n"
REWARD = "{type: function_reward, args: {path: brevity.py}}"
RUNS = {
    "sft": ("sft", SUMS, SMALL),
    "dpo": ("dpo", PAIRS, SMALL),
    "kto": ("kto", JUDGED, SMALL),
    "reward": ("reward", PAIRS, SMALL),
    "grpo": ("grpo", SUMS, GENERATED),
    "ppo": ("ppo", SUMS, GENERATED),
    "ppo with a reward of one's own": (
        "ppo",
        [{"prompt": f"Tell me about {n}."} for n in range(4)],
        ("--reward", REWARD, *GENERATED),
    ),
}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny chat")


@pytest.fixture
def run(warm_command, tmp_path):
    """Run a command that must succeed; returns what it prints about its work."""

    def run_command(*words):
        done = warm_command(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run_command


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", RUNS)
def test_the_recipe_that_is_printed_trains_to_the_same_result(case, run, chat_model, tmp_path):
    recipe, rows, settings = RUNS[case]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "brevity.py").write_text(SCORE)
    options = ("--model", str(chat_model), "--data", "rows.jsonl", *settings)
    printed, _, rest = run("train", recipe, *options, "--run-dir", "one").partition("keep it: ")
    command, _, rest = rest.partition("\n\n")
    assert "train: read as rows of " in rest
    run(*shlex.split(command)[1:])
    file = tmp_path / f"my_{recipe}.yaml"
    assert file.read_text() in printed
    assert "keep it" not in run("train", file.name, "--run-dir", "two")
    assert result(tmp_path / "one") == result(tmp_path / "two")
    assert len((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()) == 2
