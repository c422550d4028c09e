"""`rlcli diff` compares two recipes, two runs, or a recipe and a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe.resolve import load_recipe


def record(
    path: Path, recipe: str, overrides: list[str], rewards: list[float], torch: str = "2.13.0"
) -> Path:
    """The directory of a finished run, with its files."""
    resolved = load_recipe(recipe, overrides)
    with RunDirectory.create(path, resolved.recipe.name, command=["rlcli", "train", recipe]) as run:
        run.write_text("recipe.resolved.yaml", resolved.to_yaml())
        run.write_text("origins.json", json.dumps(resolved.origins))
        lines = [
            {"step": n, "actor/reward": value, "time/step": 2.0}
            for n, value in enumerate(rewards, start=1)
        ]
        run.write_text("metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        environment = json.loads(run.environment.read_text())
        environment["packages"]["torch"] = torch
        run.write_text("environment.json", json.dumps(environment))
        run.write_status("done", len(rewards), len(rewards), 0)
    return path


@pytest.fixture
def child(rlcli):
    Path("mine.yaml").write_text(
        "extends: ppo_math\nppo:\n  ppo_epochs: 2\ntrain:\n  shuffle: false\n"
    )
    return rlcli


def test_changed_values_are_shown_with_both_origins(child):
    code, out, err = child("diff", "ppo_math", "mine.yaml")
    assert (code, err) == (0, "")
    assert "graph.*.interface.args.ppo_epochs  (4 keys)" in out
    assert "    B  2  mine.yaml:3:15\n" in out
    document = json.loads(child("diff", "ppo_math", "mine.yaml", "--json")[1])
    changed = {difference["key"]: difference for difference in document["recipe"]}
    assert changed["train.shuffle"] == {
        "key": "train.shuffle",
        "kind": "changed",
        "before": True,
        "now": False,
        "origin_before": "default",
        "origin_now": "mine.yaml:5:12",
    }
    assert changed["graph.actor_train.interface.args.ppo_epochs"]["now"] == 2
    assert set(changed) - {key for key in changed if key.endswith("ppo_epochs")} == {
        "name",
        "train.shuffle",
    }


def test_equal_recipes_have_no_difference(child):
    code, out, _ = child("diff", "ppo_math", "ppo_math")
    assert code == 0
    assert "no difference" in out
    assert json.loads(child("diff", "ppo_math", "ppo_math", "--json")[1])["recipe"] == []


def test_an_explicit_default_is_not_a_difference(child):
    Path("same.yaml").write_text("extends: ppo_math\nname: ppo_math\nppo: {eps_clip: 0.2}\n")
    assert "no difference" in child("diff", "ppo_math", "same.yaml")[1]


def test_sections_of_only_one_recipe_are_listed_once(child):
    out = " ".join(child("diff", "ppo_math", "sft_math")[1].split())
    assert "only in A: datasets.held_out, models.critic, models.ref" in out
    assert "only in B: models.actor.scratch, graph.sft_train" in out
    assert "models.critic.backend" not in out


@pytest.mark.parametrize("recipe", ["sft_math", "grpo_math"])
def test_a_diff_fits_80_columns(child, recipe):
    out = child("diff", "ppo_math", recipe)[1].replace(str(Path(__file__).parents[2]) + "/", "")
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_diff_of_two_runs_shows_recipe_environment_and_results(rlcli):
    first = record(Path("a"), "sft_math", ["train.steps=3"], [0.1, 0.2, 0.3])
    second = record(Path("b"), "sft_math", ["train.steps=2", "seed=4"], [0.5, 0.7], torch="2.14.0")
    code, out, _ = rlcli("diff", str(first), str(second))
    assert code == 0
    assert "    B  4  command line\n" in out
    assert "packages.torch  2.13.0 -> 2.14.0" in out
    row = next(line for line in out.splitlines() if "reward in training" in line)
    assert row.split()[-3:] == ["0.200", "0.600", "+0.400"]
    document = json.loads(rlcli("diff", "a", "b", "--json")[1])
    assert {difference["key"] for difference in document["recipe"]} == {"train.steps", "seed"}
    assert {"name": "packages.torch", "a": "2.13.0", "b": "2.14.0"} in document["environment"]
    assert {"name": "steps", "a": 3, "b": 2} in document["results"]
    assert document["a"]["kind"] == document["b"]["kind"] == "run"


def test_a_run_is_compared_with_its_recipe(rlcli):
    record(Path("a"), "sft_math", ["train.steps=3"], [0.1])
    code, out, _ = rlcli("diff", "sft_math", "a")
    assert code == 0
    assert "  train.steps\n" in out
    assert "results" not in out
    document = json.loads(rlcli("diff", "sft_math", "a", "--json")[1])
    assert [difference["key"] for difference in document["recipe"]] == ["train.steps"]


def test_incomplete_runs_are_compared(rlcli):
    record(Path("a"), "sft_math", [], [])
    record(Path("b"), "sft_math", [], [math.inf])
    Path("a/metrics.jsonl").unlink()
    Path("b/environment.json").write_text('{"torn')
    Path("b/origins.json").unlink()
    code, out, _ = rlcli("diff", "a", "b")
    assert code == 0
    assert "no difference" in out
    assert rlcli("diff", "a", "b", "--json")[0] == 0


def test_a_run_without_its_recipe_is_refused(rlcli):
    record(Path("a"), "sft_math", [], [])
    Path("a/recipe.resolved.yaml").unlink()
    code, out, err = rlcli("diff", "a", "sft_math")
    assert (code, out) == (6, "")
    assert err.startswith("error[F72]")


@pytest.mark.parametrize("argument", ["no_such", ".", "a\0b"])
def test_an_argument_that_is_neither_recipe_nor_run_exits_2(rlcli, argument):
    code, out, err = rlcli("diff", "ppo_math", argument)
    assert (code, out) == (2, "")
    assert err.startswith("error[R5")
