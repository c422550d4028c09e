"""A thin child resolves to its parent with the same overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcli.errors import UsageError
from rlcli.recipe.authoring.child import check_name, child_of, write_child
from rlcli.recipe.resolve import load_recipe

OVERRIDES = [
    [],
    ["ppo.kl_ctl=0.02", "seed=7"],
    ["models.actor.backend.args.lr=1e-4", "models.critic.backend.args.lr=2.50e-4"],
    ["launch=local", "cluster.devices_per_node=2"],
    ["log.dir=out/${name}", "train.prompts_per_step=${train.steps}"],
    [
        "graph.critic_inf.hooks={offload: false}",
        "graph.ref_inf=null",
        "models.ref=null",
        "ppo.kl_ctl=0.0",
    ],
    ["models.actor.backend={_replace_: true, type: fsdp, args: {lr: 0.5}}"],
    ["datasets.held_out={type: arithmetic, args: {levels: [2, 3], held_out: true}}"],
    ['models.actor.tokenizer="builtin:arithmetic"', "train.eval.every_steps=null"],
    ["log.dir=a: b # c"],
    ["log.dir=$${literal}"],
]


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_a_child_resolves_to_its_parent_except_for_the_name(tmp_path, monkeypatch, overrides):
    monkeypatch.chdir(tmp_path)
    parent = load_recipe("ppo_math", [*overrides, "name=mine"])
    write_child(Path("mine.yaml"), child_of(load_recipe("ppo_math", overrides), Path("mine.yaml")))
    assert load_recipe("mine.yaml").recipe == parent.recipe


def test_a_child_has_the_header_of_its_parent_and_the_overrides(tmp_path, monkeypatch):
    """An override may satisfy the needs of the parent."""
    monkeypatch.chdir(tmp_path)
    parent = load_recipe("ppo_math", ["models.actor.backend.args.lr=1e-4"])
    does, needs = parent.layers[-1].text.splitlines()[:2]
    rest = "extends: ppo_math\n\nmodels:\n  actor:\n    backend:\n      args:\n        lr: 1e-4\n"
    assert child_of(parent, Path("mine.yaml")) == f"{does}\n{rest}"
    assert (
        child_of(load_recipe("ppo_math"), Path("mine.yaml"))
        == f"{does}\n{needs}\nextends: ppo_math\n"
    )


def test_profiles_become_layers_of_the_child(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text("train: {prompts_per_step: 8}\n")
    parent = load_recipe("ppo_math", ["name=mine"], ["small.yaml"])
    write_child(
        Path("mine.yaml"),
        child_of(load_recipe("ppo_math", [], ["small.yaml"]), Path("mine.yaml"), ["small.yaml"]),
    )
    assert load_recipe("mine.yaml").recipe == parent.recipe
    assert "extends: [ppo_math, small.yaml]" in Path("mine.yaml").read_text()


def test_a_child_of_a_file_names_it_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("deep").mkdir()
    Path("deep/one.yaml").write_text("extends: sft_math\n")
    text = child_of(load_recipe("deep/one.yaml"), Path("two.yaml"))
    assert "extends: deep/one.yaml\n" in text
    assert text.startswith("# As one, with what is written below.\n")
    with pytest.raises(UsageError) as caught:
        child_of(load_recipe("deep/one.yaml"), Path("elsewhere/two.yaml"))
    assert caught.value.code == "R55"


def test_a_child_that_would_extend_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        child_of(load_recipe("ppo_math"), Path("ppo_math.yaml"))
    assert "itself" in str(caught.value.hint)


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "a.yaml").write_text("mine")
    with pytest.raises(UsageError):
        write_child(tmp_path / "a.yaml", "new")
    assert (tmp_path / "a.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    ["a b.yaml", "mine", "mine.yml", ".yaml", "-x.yaml", "ä.yaml", "x" * 65 + ".yaml", "a\n.yaml"],
)
def test_invalid_file_names_are_refused(name):
    with pytest.raises(UsageError) as caught:
        check_name(Path(name))
    assert caught.value.code == "R68"
    check_name(Path(str(caught.value.hint).removeprefix("for example ")))
