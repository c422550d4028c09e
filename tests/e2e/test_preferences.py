"""From preferences to a policy: with a reward model and PPO, with DPO on the same pairs, with a
judge in the graph."""

import json

import pytest

pytestmark = pytest.mark.timeout(300)

WARM = """\
extends: sft_math
models: {actor: {scratch: {hidden_size: 32, num_hidden_layers: 1, intermediate_size: 32}}}
datasets: {train: {args: {problems: 32}}}
train: {steps: 1, prompts_per_step: 8}
"""
REWARD = """\
extends: rm_arithmetic
models: {reward: {path: "recipe:warm.yaml#actor"}}
datasets: {train: {args: {problems: 32}}, held_out: {args: {problems: 8}}}
train: {steps: 2, prompts_per_step: 8, eval: {every_steps: null}}
"""
PPO = """\
extends: rlhf_arithmetic
models: {actor: {path: "recipe:warm.yaml#actor"}, reward: {path: "recipe:reward.yaml#reward"}}
datasets: {train: {args: {problems: 16}}, held_out: {args: {problems: 4}}}
generation: {max_new_tokens: 4}
train: {steps: 2, prompts_per_step: 4, eval: {every_steps: null}}
"""
DPO = """\
extends: dpo_arithmetic
models: {actor: {path: "recipe:warm.yaml#actor"}}
datasets: {train: {args: {problems: 16, pairs_per_problem: 2}}, held_out: {args: {problems: 4}}}
generation: {max_new_tokens: 4}
train: {steps: 2, prompts_per_step: 8, eval: {every_steps: null}}
"""

JUDGED = """\
extends: [grpo_math, profiles/judge]
models:
  actor: {path: "recipe:warm.yaml#actor"}
  judge:
    scratch: {model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
              num_attention_heads: 2, max_position_embeddings: 1024}
    tokenizer: builtin:arithmetic
datasets: {train: {args: {problems: 16}}, held_out: {args: {problems: 4}}}
generation: {max_new_tokens: 4, responses_per_prompt: 2}
graph:  # a model with random weights seldom writes a score
  reward_inf: {interface: {args: {thought_tokens: 8, max_error_fraction: 1.0, error_reward: -1.0}}}
train: {steps: 1, prompts_per_step: 4, eval: {every_steps: null}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory, warm_command):
    """A folder with the recipes, in which PPO and its warm starts have been run."""
    folder = tmp_path_factory.mktemp("preferences")
    for name, text in (
        ("warm", WARM),
        ("reward", REWARD),
        ("ppo", PPO),
        ("dpo", DPO),
        ("judged", JUDGED),
    ):
        (folder / f"{name}.yaml").write_text(text)
    done = warm_command("train", "ppo.yaml", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def records(folder, recipe):
    (run,) = (folder / "runs" / recipe).iterdir()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
def test_a_reward_model_is_evaluated_on_held_out_pairs(home):
    first, *_, last = records(home, "reward")
    for record in (first, last):
        assert 0 <= record["eval/accuracy"] <= 1
        assert record["eval/pairs"] == 8
        margin = record["eval/chosen_reward"] - record["eval/rejected_reward"]
        assert record["eval/margin"] == pytest.approx(margin, abs=1e-6)
    assert last["reward/loss_weight"] == 8


@pytest.mark.exhaustive
def test_ppo_learns_from_the_scores_of_the_reward_model(home):
    steps = records(home, "ppo")
    scores = [record["reward/reward"] for record in steps if "reward/reward" in record]
    assert len(scores) == 2
    assert all(abs(score - round(score)) > 1e-6 for score in scores)  # of a model, not of a rule
    assert steps[0]["eval/accuracy"] == steps[0]["eval/reward"]  # of a rule


@pytest.mark.long
def test_dpo_starts_from_its_reference_and_can_read_stored_log_probs(home, warm_command):
    store = "graph.ref_inf.interface={type: reference, args: {store: store}}"
    runs = []
    for name, changes in {
        "storing": (),
        "stored": ("models.ref.init=null", "models.ref.backend=null"),
    }.items():
        done = warm_command(
            "train", "dpo.yaml", store, *changes, "--run-dir", name, "--json", cwd=home
        )
        assert done.returncode == 0, done.stderr
        lines = [
            json.loads(line) for line in (home / name / "metrics.jsonl").read_text().splitlines()
        ]
        runs.append([line for line in lines if "actor/loss" in line])
    first, second = runs[0]
    assert first["actor/loss"] == pytest.approx(0.6931472)
    assert first["actor/margin"] == pytest.approx(0, abs=1e-6)
    assert first["actor/loss_weight"] == 16
    assert second["actor/margin"] != 0
    assert [step["actor/loss"] for step in runs[0]] == [step["actor/loss"] for step in runs[1]]
    assert len(list((home / "store").iterdir())) == 2  # a part for each step


@pytest.mark.exhaustive
def test_a_role_of_the_graph_judges_the_responses(home, command):
    done = command("train", "judged.yaml", "--run-dir", "judged", "--json", cwd=home)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (home / "judged/metrics.jsonl").read_text().splitlines()]
    (step,) = [line for line in lines if "actor/loss" in line]
    assert 0 < step["judge/reward_errors"] <= 1
    assert -1 <= step["judge/reward"] < 0
    assert "no score from the judge" in done.stderr
