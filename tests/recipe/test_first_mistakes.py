"""Mistakes of the first hour: each is one error, with a hint that names what was meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlcli.errors import ModelError, RecipeError, RlcliError
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Recipe

ROWS = "'datasets.train={type: hf, args: {path: x.jsonl}}'"


def problems_of(recipe, *overrides, with_=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, overrides, with_)
    return caught.value.problems


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=-3", "train.steps is -3; it must be at least 1"),
        ("ppo.eps_clip=-0.2", "ppo.eps_clip is -0.2; it must be above 0"),
        (
            "cluster.nodes=9999",
            "cluster.nodes is 9999; it must be at most 4096",
        ),
        (
            "generation.stop_token_ids=[5, -1]",
            "generation: stop_token_ids is [5, -1]; ids of tokens are at least 0",
        ),
    ],
)
def test_a_number_out_of_bounds_is_named_with_its_bound(override, words):
    [problem] = problems_of("ppo_math", override)
    assert problem.what == words


def test_a_wrong_value_is_reported_once_though_references_carry_it():
    [problem] = problems_of("ppo_math", "generation.temperature=hot")
    assert problem.where == "command line"
    assert "found text 'hot'" in problem.what


@pytest.mark.parametrize("key", ["backend.args.lr=0.1", "mesh.tp=2", "path=some/model"])
def test_a_key_of_a_role_that_does_not_exist_is_one_error(key):
    [problem] = problems_of("sft_math", f"models.lm.{key}")
    assert (problem.what, problem.hint) == ("no call uses the role lm", "there is actor")


def test_a_misspelt_base_recipe_proposes_the_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: ppo_mth\n")
    [problem] = problems_of("mine.yaml")
    assert (problem.where, problem.hint) == ("mine.yaml:1:10", "did you mean ppo_math?")


def test_a_recipe_without_its_sections_proposes_a_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("seed: 3\n")
    [problem] = problems_of("mine.yaml")
    assert "datasets is required" in problem.what
    assert "extends: NAME" in problem.hint


def test_a_launcher_given_as_a_profile_proposes_the_key():
    [problem] = problems_of("ppo_math", with_=["slurm"])
    assert problem.hint == "it is a launcher: write launch=slurm"


def test_a_folder_given_as_a_recipe_is_called_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    [problem] = problems_of("mine")
    assert "not found (a folder, and" in problem.what
    Path("mine/status.json").write_text("{}")
    [problem] = problems_of("mine")
    assert problem.hint == "it is the folder of a run; to continue it: rlcli resume mine"
    Path("mine/recipe.resolved.yaml").write_text("seed: 3\n")
    Path("mine").rename("my run")
    [problem] = problems_of("my run")
    assert "; its recipe is 'my run/recipe.resolved.yaml'; " in problem.hint
    assert problem.hint.endswith("rlcli resume 'my run'")


def test_a_missing_file_of_rows_is_not_taken_for_a_dataset_of_the_hub():
    with pytest.raises(RlcliError) as caught:
        load_recipe("ppo_gsm8k", ["datasets.train.args.path=data/nothing.jsonl"])
    assert "looked in the working directory" in caught.value.hint


def test_a_missing_reward_file_is_not_taken_for_a_dataset():
    reward = "{type: function_reward, args: {path: no.py}}"
    with pytest.raises(RlcliError) as caught:
        load_recipe("ppo_math", [f"graph.reward_inf.interface={reward}"])
    assert "looked in the working directory" in caught.value.hint
    assert "dataset" not in caught.value.hint


def test_a_pattern_in_place_of_a_folder_of_rows_proposes_the_folder():
    with pytest.raises(RlcliError) as caught:
        load_recipe("ppo_gsm8k", ["datasets.train.args.path=rows/*.jsonl"])
    assert "or the folder that holds them" in caught.value.hint


def test_an_override_in_place_of_the_recipe_is_recognised():
    [problem] = problems_of("train.steps=3")
    assert problem.hint == "the recipe comes before its overrides: RECIPE train.steps=3"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("datasets.train.problems=9", "did you mean datasets.train.args.problems?"),
        ("datasets.train.path=x.jsonl", f"to read a file: {ROWS}"),
        ("datasets.train.args.path=x.jsonl", f"to read a file: {ROWS}"),
        ("models.actor.backend.lr=0.1", "did you mean models.actor.backend.args.lr?"),
        (
            "graph.advantages.baseline=none",
            "did you mean graph.advantages.interface.args.baseline?",
        ),
        ("models.actor=a/model", "to start from other weights: models.actor.path=a/model"),
        ("datasets=x.jsonl", f"to train on other rows: {ROWS}"),
        ("train.lr=1e-6", "did you mean models.actor.backend.args.lr?"),
        ("launch=torchrun", "did you mean local?"),
        ("train.eval=false", "write null"),
        ("kl_ctl=0.1", "did you mean grpo.kl_ctl?"),
        (
            "gradient_checkpointing=true",
            "did you mean models.actor.backend.args.gradient_checkpointing?",
        ),
        ("~checkpoint.save", "to remove a key: checkpoint.save=null"),
        ("mine.yaml", "to apply a recipe file on top: --with mine.yaml"),
    ],
)
def test_a_key_or_value_of_another_place_proposes_what_to_write(override, hint):
    backend = ["models.actor.backend=fsdp"] if "backend" in override else []
    [problem] = problems_of("grpo_math", *backend, override)
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("datasets.train=x.jsonl", "{type: hf, args: {path: FILE}}"),
        ("graph.reward_inf.interface=mine.py", "{type: function_reward, args: {path: FILE.py"),
    ],
)
def test_a_file_in_place_of_a_component_proposes_the_component_that_reads_it(override, hint):
    [problem] = problems_of("ppo_math", override)
    assert hint in problem.hint


def test_another_name_of_deepspeed_proposes_it():
    [problem] = problems_of("ppo_math", "models.critic.backend=zero3")
    assert "rlcli has 'deepspeed' instead" in problem.what


def test_a_path_to_a_shipped_recipe_proposes_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [problem] = problems_of("./elsewhere/grpo_math.yaml")
    assert problem.hint == "did you mean grpo_math?"


def test_an_overlong_word_is_refused_without_repeating_it():
    account = "a" * 5000
    [problem] = problems_of("ppo_math", f"launch={{type: slurm, slurm: {{account: {account}}}}}")
    message = "launch.slurm.account has 5000 characters; it may have at most 4096"
    assert (problem.code, problem.what) == ("R35", message)


def test_patterns_of_the_schema_compile_at_once():
    """A large bound on a Unicode class takes the regex engine a tenth of a second, in each verb."""
    Recipe.model_rebuild(force=True)
    patterns = json.dumps(Recipe.__pydantic_core_schema__, default=str)
    bounds = re.findall(r"\{\d*,(\d+)\}", patterns)
    assert "63" in bounds
    assert max(map(int, bounds)) <= 63


@pytest.mark.parametrize("words", [["a.b", "=", "1"], ["a.b=", "1"], ["seed=2", "a.b", "=1"]])
def test_an_override_with_spaces_is_one_error_that_joins_it(words):
    [problem] = problems_of("ppo_math", *words)
    assert (problem.what, problem.hint) == (
        "an override has no spaces around =",
        "write a.b=1",
    )
    assert problem.excerpt.splitlines()[0].strip() in ("a.b", "a.b=")


@pytest.mark.parametrize("value", ["{dp: 2}", "{a: {b: 1}, c: [2, 3] }", "[a, b]", "[ ]"])
def test_a_value_that_the_shell_has_split_is_one_error_that_quotes_it(value):
    [problem] = problems_of("ppo_math", "seed=2", *f"a.b={value}".split(" "), "train.steps=3")
    assert problem.what == "a value with spaces must be in quotes, or the shell splits it"
    assert problem.hint == f"write 'a.b={value}'"


@pytest.mark.parametrize(
    ("recipe", "hint"),
    [
        ("orpo", "rlcli train dpo learns from pairs"),
        ("lora", "rlcli trains all weights and has no LoRA yet"),
    ],
)
def test_a_method_that_rlcli_lacks_is_not_answered_by_a_list_of_recipes(recipe, hint):
    [problem] = problems_of(recipe)
    assert hint in problem.hint


def test_rows_given_as_a_recipe_propose_to_train_on_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    [problem] = problems_of("rows.jsonl")
    assert problem.what == "rows.jsonl holds rows, not a recipe"
    assert problem.hint == "to train on it: rlcli train sft --model MODEL --data rows.jsonl"


def test_a_recipe_in_words_of_other_tools_gets_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: ppo_math\nmodel: a/b\nalgorithm: ppo\nrewards: [x]\n")
    hints = [problem.hint for problem in problems_of("mine.yaml")]
    assert hints == [
        '"model" is called models.actor.path in rlcli',
        '"algorithm" is called extends in rlcli',
        '"rewards" is called graph.<call>.interface in rlcli',
    ]


@pytest.mark.parametrize(
    ("text", "keys", "hint"),
    [
        (
            "model: a/b\ndataset: rows.jsonl\nalgorithm: grpo\n",
            "model, dataset, algorithm",
            (
                "begin with extends: grpo; write models.actor.path instead of model; "
                "write datasets.<name> instead of dataset"
            ),
        ),
        (
            "algorithm: mine\nlearning_rate: 1e-6\nwarmup_stesp: 3\n",
            "algorithm, learning_rate",
            (
                "begin with extends: NAME (rlcli ls lists the recipes); "
                "write models.actor.backend.args.lr instead of learning_rate"
            ),
        ),
    ],
)
def test_a_recipe_of_another_tool_gets_one_error(tmp_path, monkeypatch, text, keys, hint):
    monkeypatch.chdir(tmp_path)
    Path("flat.yaml").write_text(text)
    [problem] = problems_of("flat.yaml")
    assert problem.code == "R42"
    assert problem.what == f"the recipe extends nothing and has another tool's keys: {keys}"
    assert problem.where == "flat.yaml:1:1"
    assert problem.hint == hint


def test_a_backend_given_as_a_profile_is_said_to_be_one():
    [problem] = problems_of("ppo_math", with_=["fsdp"])
    assert problem.hint == "it is a backend: write models.actor.backend=fsdp"


def test_a_recipe_or_a_folder_of_runs_given_as_a_model_proposes_its_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RlcliError) as caught:
        load_recipe("ppo_math", ["models.actor.path=sft_math"])
    assert caught.value.hint == (
        "the result of the recipe sft_math is written recipe:sft_math#actor"
    )
    for run in ("runs/mine/20260101-000000", "runs/mine/20260102-000000"):
        model = Path(run, "models/actor")
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        Path(run, "status.json").write_text("{}")
    with pytest.raises(RlcliError) as caught:
        load_recipe("ppo_math", ["models.actor.path=runs/mine"])
    assert caught.value.hint.endswith("is in runs/mine/20260102-000000/models/actor")


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("grpo_math", "a command takes one recipe; let one extend the other: rlcli cp"),
        ("gpu8", "to apply that profile on top: --with gpu8"),
        ("steps", "write key.path=value"),
    ],
)
def test_a_second_recipe_or_a_profile_among_the_overrides_is_recognised(word, hint):
    [problem] = problems_of("ppo_math", word)
    assert problem.hint == hint


def test_a_folder_that_is_no_model_is_not_blamed_on_the_runs_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    overrides = ("models.actor.path=runs", "datasets.train.args.path=rows.jsonl")
    with pytest.raises(ModelError, match="runs holds no config"):
        load_recipe("sft", overrides)
    Path("runs", "config.json").write_text("{}")
    [problem] = problems_of("sft", *overrides)
    assert problem.what.endswith("is inside the folder of models.actor.path, which is only read")


def test_a_misspelt_argument_is_not_answered_with_a_key_of_another_section():
    (problem,) = problems_of("sft_math", "datasets.train.args.pth=3")
    assert problem.hint == "valid here: problems, levels, held_out, seed, hasty"


@pytest.mark.parametrize("backend", ["megatron", "deepspeed"])
def test_a_backend_without_muon_names_the_one_that_has_it(backend):
    role = "models.actor.backend"
    [problem] = problems_of("sft_math", f"{role}.type={backend}", f"{role}.args.optimizer=muon")
    assert problem.what == f"unknown key {role}.args.optimizer"
    assert problem.hint == f"this backend trains with AdamW alone; {role}=fsdp has Muon"


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("recipes/ppo_math.yaml", "did you mean ppo_math?"),
        ("../recipes/base/ppo.yaml", "did you mean base/ppo?"),
        ("ppo_math.yml", "did you mean ppo_math?"),
        ("gpu8", "did you mean profiles/gpu8?"),
        ("ppo_math, profiles/gpu8", "write a list: extends: [ppo_math, profiles/gpu8]"),
    ],
)
def test_a_layer_written_in_another_way_gets_its_name(tmp_path, monkeypatch, written, hint):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"extends: {written}\n")
    [problem] = problems_of("mine.yaml")
    assert problem.hint == hint


@pytest.mark.parametrize(
    ("text", "nested"),
    [
        ("ppo.kl_ctl: 0.1", "ppo: {kl_ctl: …}"),
        ("models.actor.path: a/b", "models: {actor: {path: …}}"),
        ("models: {actor: {mesh.tp: 2}}", "mesh: {tp: …}"),
        ("ppo: {generation.top_p: 0.9}", "generation: {top_p: …}"),
    ],
)
def test_keys_joined_by_dots_in_a_file_are_to_be_nested(tmp_path, monkeypatch, text, nested):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(f"extends: ppo_math\n{text}\n")
    [problem] = problems_of("mine.yaml")
    assert problem.hint == f"write {nested}; only the command line joins keys by dots"


def test_a_block_that_is_not_a_mapping_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("extends: ppo_math\nppo:\n  kl_ctl = 0.1\n")
    assert [problem.what for problem in problems_of("mine.yaml")] == [
        "ppo must be a mapping, found text"
    ]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("models.actor.tp=1", "models.actor.mesh.tp"),
        ("models.actor.type=fsdp", "models.actor.backend.type"),
        ("models.actor.backend.attention=auto", "models.actor.backend.args.attention"),
        ("graph.sft_train.offload=true", "graph.sft_train.hooks.offload"),
        ("microbatches=2", "train.microbatches"),
        ("max_tokens_per_microbatch=9999", "train.max_tokens_per_microbatch"),
    ],
)
def test_the_hint_for_a_key_at_another_level_is_a_key_of_this_recipe(override, meant):
    [problem] = problems_of("sft_math", override)
    assert problem.hint == f"did you mean {meant}?"
    load_recipe("sft_math", [f"{meant}={override.partition('=')[2]}"])


def test_the_role_of_a_rollout_is_set_in_the_rollout():
    changed = "models.actor_rollout.devices=0"
    [problem] = problems_of("grpo_math", changed, "models.actor.rollout={}")
    assert problem.hint == "set its keys in models.actor.rollout instead, or rename it"
    assert "models.actor_rollout" in str(problem.excerpt)
