"""A user who has only the wheel: a project, a dataset, an interface and a recipe of their own,
tested and trained."""

from __future__ import annotations

import json
import sys

import pytest

RECIPE = """\
# Samples answers, and learns from them by the loss of my-loss.
# Needs: nothing but this folder.
models:
  actor:
    scratch: {model_type: llama, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
              num_attention_heads: 2, max_position_embeddings: 64}
    tokenizer: builtin:arithmetic
    backend: {args: {lr: 1e-2}}
datasets:
  train: {type: my-rows, args: {path: rows.jsonl}}
generation: {max_new_tokens: 4}
graph:
  sample:
    model: actor
    call: generate
    interface: {type: ppo_actor, args: {generation: "${generation}"}}
  learn:
    model: actor
    call: train_step
    interface: {type: my-loss, args: {entropy_bonus: 0.1}}
train: {steps: 3, prompts_per_step: 4}
"""
"""Replaces the thin child that `rlcli new recipe` writes."""


@pytest.fixture
def rlcli(site, tmp_path, run):
    """The command of the wheel, in a folder outside any checkout."""
    project = tmp_path / "mine"

    def command(*words):
        cwd = project if project.is_dir() else tmp_path
        return run(
            [sys.executable, "-m", "rlcli", *words],
            cwd=cwd,
            PYTHONPATH=str(site),
            PYTHONSAFEPATH="1",
        )

    return command


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_new_project_trains_with_its_own_components(rlcli, tmp_path, site):
    rlcli("new", "project", "mine")
    project = tmp_path / "mine"
    for kind, name in (("dataset", "my-rows"), ("interface", "my-loss"), ("recipe", "my-recipe")):
        command = json.loads(rlcli("new", kind, name, "--json"))["next"]
        assert command == f"rlcli test {kind} {name}"
    rows = [{"prompt": f"{n}+{n}", "answer": str(n + n)} for n in range(10, 30)]
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "recipes" / "my-recipe.yaml").write_text(RECIPE)

    for kind, name in (("dataset", "my-rows"), ("interface", "my-loss"), ("recipe", "my-recipe")):
        report = rlcli("test", kind, name)
        assert report.startswith(
            f"{kind} {name} ({kind}s/{name.replace('-', '_') if kind != 'recipe' else name}."
        )
        assert "FAIL" not in report
        assert " passed" in report.splitlines()[-1]
    assert not list(project.rglob("*pytest*/")), "nothing is left behind"

    done = json.loads(rlcli("train", "my-recipe", "--run-dir", "out", "--quiet", "--json"))
    assert (done["ok"], done["steps"]) == (True, 3)
    assert (project / "out" / "models" / "actor" / "model.safetensors").is_file()
    assert str(site) in rlcli("show", "interface", "sft")
