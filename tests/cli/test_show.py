"""`rlcli show`: a recipe that loads to the same, with its origins;
and what components can be told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcli.recipe.resolve import load_recipe

WHOLE = ["ppo_math", "sft_math"]


@pytest.mark.parametrize("options", [[], ["--all"], ["--origins"], ["--origins", "--all"]])
@pytest.mark.parametrize("recipe", WHOLE)
def test_a_printed_recipe_loads_to_the_same_recipe(rlcli, recipe, options):
    code, out, _ = rlcli("show", recipe, "seed=4", *options)
    assert code == 0
    Path("again.yaml").write_text(out)
    assert load_recipe("again.yaml").recipe == load_recipe(recipe, ["seed=4"]).recipe


@pytest.mark.parametrize("recipe", WHOLE)
def test_origins_are_aligned_and_fit_the_terminal(rlcli, recipe, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])  # origins are relative to the working directory
    out = rlcli("show", recipe, "--origins")[1]
    lines = [line for line in out.splitlines() if "  # " in line and not line.startswith("#")]
    columns = [line.index("  # ") for line in lines]
    assert columns.count(max(set(columns), key=columns.count)) > 0.9 * len(columns)
    assert sum(len(line) > 80 for line in out.splitlines()) < 0.05 * len(lines)


def test_origins_distinguish_layers_command_line_and_defaults(rlcli):
    Path("mine.yaml").write_text("extends: ppo_math\ntrain:\n  steps: 3\n")
    lines = rlcli("show", "mine.yaml", "seed=2", "--origins", "--all")[1].splitlines()
    origins = {line.partition("#")[0].strip(): line.partition("# ")[2] for line in lines}
    assert origins["steps: 3"] == "mine.yaml:3:10"
    assert origins["seed: 2"] == "command line"
    assert origins["shuffle: true"] == "default"
    assert any(origin.partition(".yaml:")[0].endswith("base/ppo") for origin in origins.values())
    assert any(line.startswith("# layer mine.yaml") for line in lines)


def test_defaults_are_shown_only_with_all(rlcli):
    _, short, talk = rlcli("show", "ppo_math")
    every = rlcli("show", "ppo_math", "--all")[1]
    assert "shuffle" not in short
    assert "shuffle: true" in every
    assert "--all" in talk
    assert json.loads(rlcli("show", "ppo_math", "--json")[1])["recipe"]["train"]["shuffle"] is True


def test_a_profile_is_applied(rlcli):
    Path("small.yaml").write_text("train: {prompts_per_step: 8}\n")
    out = rlcli("show", "ppo_math", "--with", "small.yaml", "--origins")[1]
    assert ["prompts_per_step:", "8", "#", "small.yaml:1:27"] in [
        line.split() for line in out.splitlines()
    ]


@pytest.mark.parametrize("name", ["ppo_actor", "fsdp", "math_prompts", "null", "sft"])
def test_a_component_fits_80_columns(rlcli, name):
    code, out, _ = rlcli("show", name)
    assert code == 0
    assert all(len(line) <= 80 for line in out.splitlines()[1:])


def test_arguments_of_a_component_are_documented(rlcli):
    _, out, err = rlcli("show", "backend", "fsdp")
    lines = out.splitlines()
    at = lines.index("  lr  float >= 0 = 1e-05")
    assert lines[at + 1].strip() == "Peak learning rate of AdamW."
    assert "models.<role>.backend.args.<arg>" in err
    assert "takes no args" in rlcli("show", "null")[1]


@pytest.mark.parametrize(
    "arguments", [["interface", "ppo_actor", "--origins"], ["interface", "a", "b"]]
)
def test_invalid_arguments_are_refused(rlcli, arguments):
    code, out, err = rlcli("show", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[USAGE]")


def test_keys_of_a_list_of_sections_are_listed(rlcli):
    code, out, _ = rlcli("show", "launch.slurm.parts", "--json")
    keys = {described["name"]: described for described in json.loads(out)["keys"]}
    assert (code, next(iter(keys))) == (0, "launch.slurm.parts")
    assert keys["launch.slurm.parts[].nodes"]["type"] == "int >= 1 <= 1000000000"
    assert keys["launch.slurm.parts[].nodes"]["default"] is None  # required
    assert "launch.slurm.parts[].gres" in keys
    assert not any(
        "[]" in described["name"]
        for described in json.loads(rlcli("show", "launch.slurm", "--json")[1])["keys"]
    )


def test_every_metric_has_a_unit_and_a_meaning(rlcli):
    metrics = json.loads(rlcli("show", "metrics", "--json")[1])["metrics"]
    named = {metric["name"]: metric for metric in metrics}
    assert all(metric["unit"] and metric["meaning"] for metric in metrics)
    assert named["<role>/kl"]["interfaces"] == ["ppo_actor"]
    assert named["<role>/kl_coef"]["interfaces"] == ["gae", "group_relative"]
    assert named["<role>/equal_rewards_fraction"]["interfaces"] == ["group_relative"]
    assert named["total/prompts"]["interfaces"] == []
    code, out, _ = rlcli("show", "metrics")
    assert code == 0
    assert "  <role>/kl  nats per token\n" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_metrics_are_filtered_by_a_part_of_their_names(rlcli):
    code, out, _ = rlcli("show", "metrics", "drift", "restarts")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines() if not line.startswith("   ")]
    assert names == ["restarts/<group>", "<role>/policy_drift"]
    code, out, err = rlcli("show", "metrics", "nonsense")
    assert (code, out) == (2, "")
    assert "rlcli show metrics lists all of them" in err
