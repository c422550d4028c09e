"""`rlcli explain`: every place of a value's life, the one that wins, and where it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

BASE = """\
scale: {lr: 3e-4}
models:
  actor:
    scratch: {model_type: llama}
    tokenizer: builtin:arithmetic
    backend: {type: fsdp, args: {lr: "${scale.lr}"}}
datasets: {train: arithmetic_demonstrations}
graph:
  sft_train:
    {model: actor, call: train_step, interface: sft, inputs: [packed_input_ids, prompt_mask]}
train: {steps: 3, prompts_per_step: 4}
"""


@pytest.fixture
def layers(rlcli, tmp_path):
    """`top.yaml` over `base.yaml` in the working directory."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "top.yaml").write_text(
        "extends: base.yaml\nscale:\n  lr: 1e-4\ntrain: {steps: 5}\n"
    )
    return rlcli


def test_all_locations_of_a_value_are_shown_in_order(layers):
    code, out, _ = layers("explain", "top.yaml", "train.steps", "train.steps=7")
    assert code == 0
    assert out.splitlines()[0] == "train.steps = 7   int >= 1 <= 1000000000 | null"
    steps = [line.split() for line in out.splitlines() if line[2:3].isdigit()]
    assert steps == [
        ["1", "default", "null"],
        ["2", "base.yaml:11:16", "3"],
        ["3", "top.yaml:4:16", "5"],
        ["4", "command", "line", "7", "<-", "wins"],
    ]


def test_a_value_by_reference_is_shown_with_the_reference(layers):
    document = json.loads(
        layers("explain", "top.yaml", "models.actor.backend.args.lr", "--json")[1]
    )
    assert document["value"] == 1e-4
    default, reference, lower, upper = document["steps"]
    assert default["where"] == "default"
    assert default["note"].partition(":")[0].endswith("backends/_settings.py")
    assert (reference["where"], reference["value"], reference["wins"]) == (
        "base.yaml:6:38",
        "${scale.lr}",
        False,
    )
    assert (lower["where"], lower["value"]) == ("base.yaml:1:13", "3e-4")
    assert (upper["where"], upper["value"], upper["wins"]) == ("top.yaml:3:7", "1e-4", True)
    assert upper["note"] == "as scale.lr, taken over at base.yaml:6:38"
    assert document["used_by"][0]["who"] == "actor (rank 0)"


def test_the_calls_that_use_a_block_are_shown(rlcli):
    code, out, _ = rlcli("explain", "ppo_math", "ppo.kl_ctl")
    assert code == 0
    assert "Weight of the KL penalty" in out
    document = json.loads(rlcli("explain", "ppo_math", "ppo.kl_ctl", "--json")[1])
    assert [use["key"] for use in document["used_by"]] == ["graph.advantages.interface.args.kl_ctl"]
    both = json.loads(rlcli("explain", "ppo_math", "ppo.minibatches", "--json")[1])
    assert {use["key"].split(".")[1] for use in both["used_by"]} >= {"actor_train", "critic_train"}
    assert {use["through"] for use in document["used_by"]} == {"${ppo}"}
    assert (document["changes"], document["on_resume"]) == ("none", "alters")


@pytest.mark.parametrize(("schedules", "effect"), [((), "alters"), (("actor", "critic"), "safe")])
def test_a_longer_run_needs_the_same_consent_as_it_does_on_resume(rlcli, schedules, effect):
    constant = [f"models.{role}.backend.args.schedule=constant" for role in schedules]
    document = json.loads(rlcli("explain", "ppo_math", "train.steps", *constant, "--json")[1])
    assert document["on_resume"] == effect


def test_chains_of_references_are_followed(rlcli):
    document = json.loads(rlcli("explain", "ppo_math", "generation.max_new_tokens", "--json")[1])
    through = {use["key"]: use["through"] for use in document["used_by"]}
    assert through["graph.actor_gen.interface.args.generation.max_new_tokens"] == "${ppo}"
    evaluation = "train.eval.graph.eval_gen.interface.args.generation.max_new_tokens"
    assert through[evaluation] == "${evaluation}"


def test_a_key_that_overrides_a_reference_does_not_use_the_block(rlcli):
    # for both calls, as they share the critic's interface
    interface = "{interface: {args: {minibatches: 2}}}"
    Path("own.yaml").write_text(
        f"extends: ppo_math\ngraph: {{critic_train: {interface}, critic_inf: {interface}}}\n"
    )
    document = json.loads(rlcli("explain", "own.yaml", "ppo.minibatches", "--json")[1])
    reached = [use["key"] for use in document["used_by"]]
    assert "graph.actor_train.interface.args.minibatches" in reached
    assert "graph.critic_train.interface.args.minibatches" not in reached


def test_an_unset_argument_is_explained_under_its_block(rlcli):
    document = json.loads(rlcli("explain", "ppo_math", "ppo.eps_clip", "--json")[1])
    (step,) = document["steps"]
    assert (step["where"], step["value"], step["wins"]) == ("default", "0.2", True)
    assert document["value"] == 0.2


def test_roles_that_start_from_the_weights_are_named(rlcli):
    out = rlcli("explain", "ppo_math", "models.actor.path")[1]
    assert "critic, ref start from the same weights" in out


def test_values_of_a_replaced_section_do_not_take_effect(layers):
    backend = "{_replace_: true, type: fsdp, args: {eps: '${scale.lr}'}}"
    Path("new.yaml").write_text(f"extends: top.yaml\nmodels: {{actor: {{backend: {backend}}}}}\n")
    document = json.loads(
        layers("explain", "new.yaml", "models.actor.backend.args.lr", "--json")[1]
    )
    assert document["value"] == 1e-5
    assert [step["wins"] for step in document["steps"]] == [True, False, False, False]


def test_a_reference_to_a_default_takes_precedence(layers):
    Path("new.yaml").write_text("extends: top.yaml\nlog: {samples_per_step: '${seed}'}\n")
    document = json.loads(layers("explain", "new.yaml", "log.samples_per_step", "--json")[1])
    assert document["value"] == 1
    assert [(step["value"], step["wins"]) for step in document["steps"]] == [
        ("4", False),
        ("${seed}", True),
    ]


def test_a_section_lists_its_values_with_origins(rlcli):
    code, out, err = rlcli("explain", "ppo_math", "models.actor.backend")
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:]}
    assert rows["args.beta1"] == ["0.9", "default"]
    assert rows["type"][0] == "fsdp"
    assert rows["args.lr"][1].startswith("ppo_math.yaml:")
    assert "rlcli explain ppo_math models.actor.backend.type" in err
    document = json.loads(rlcli("explain", "ppo_math", "train", "--json")[1])
    assert {"key": "train.shuffle", "value": True, "origin": "default"} in document["values"]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("kl_ctl", "did you mean ppo.kl_ctl?"),
        ("ppo.kl_clt", "did you mean ppo.kl_ctl?"),
        ("trian.steps", "did you mean train.steps?"),
        ("learning_rate", "models.actor.backend.args.lr"),
        ("models.actr", "did you mean models.actor?"),
        ("ppo.gamma", '"gamma" is called ppo.discount in rlcli'),
        ("train.batch_size", '"batch_size" is called train.prompts_per_step in rlcli'),
        ("train.eval.often", "valid here: dataset, every_steps, at_start, at_end, graph"),
        ("train.steps.often", "did you mean train.steps?"),
    ],
)
def test_an_unknown_key_exits_2_with_a_suggestion(rlcli, key, hint):
    code, out, err = rlcli("explain", "ppo_math", key)
    assert (code, out) == (2, "")
    assert err.startswith("error[R42]")
    assert hint in err


@pytest.mark.parametrize(
    "key", ["ppo.kl_ctl", "train.steps", "generation.max_new_tokens", "models.actor.path", "log"]
)
def test_explanations_fit_80_columns(rlcli, key):
    out = rlcli("explain", "ppo_math", key, "train.steps=7")[1]
    home = str(Path(__file__).parents[2])
    assert [line for line in out.replace(home + "/", "").splitlines() if len(line) > 80] == []
