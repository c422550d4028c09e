"""`rlcli migrate` rewrites recipes of format 1: what they mean and what they look like otherwise
stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlcli.errors import UsageError
from rlcli.recipe.authoring.migration import Migration, migrate
from rlcli.recipe.resolve import Resolved, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
FORMAT_1 = Path(__file__).with_name("format_1")
"""Layers as they were shipped with format 1."""

BLOCK_STYLE = """\
# What it does.
# Needs: nothing.
name: mine   # a name

graph:
  # samples
  actor_gen:
    model: actor
    call: generate
    interface:
      type: ppo_actor
      args:
        # of the sampler
        generation:
          top_p: 0.9
        kl_ctl: 0.3   # moved
  # learns
  actor_train:
    model: actor
    call: train_step
    interface:
      type: ppo_actor
      args:
        kl_ctl: 0.3
        generation:
          top_p: 0.9
        # of the loss
        eps_clip: 0.1
    inputs:
      - packed_input_ids
      - rewards
"""

BLOCK_STYLE_TODAY = """\
# What it does.
# Needs: nothing.
format: 2
name: mine   # a name

graph:
  # samples
  actor_gen:
    model: actor
    call: generate
    interface:
      type: ppo_actor
      args:
        # of the sampler
        generation:
          top_p: 0.9
  gae: {model: actor, call: inference, interface: {type: gae, args: {kl_ctl: 0.3}}}
  # learns
  actor_train:
    model: actor
    call: train_step
    interface:
      type: ppo_actor
      args:
        generation:
          top_p: 0.9
        # of the loss
        eps_clip: 0.1
"""


def call(method: str, kind: str, args: str | None) -> str:
    interface = kind if args is None else f"{{type: {kind}, args: {args}}}"
    return f"{{model: actor, call: {method}, interface: {interface}}}"


def graph(**calls: str) -> str:
    return "graph:\n" + "".join(f"  {name}: {text}\n" for name, text in calls.items())


def args_of(migration: Migration) -> dict[str, object]:
    """The arguments of each call."""
    calls = yaml.safe_load(migration.text)["graph"]
    return {name: call["interface"].get("args") for name, call in calls.items()}


def test_block_style_keeps_comments_and_layout():
    migration = migrate(BLOCK_STYLE)
    assert migration.text == BLOCK_STYLE_TODAY
    assert migration.changes == (
        "graph.actor_train does not list its inputs: they are those of its interface",
        "graph.gae is new: it computes once what actor_train learns from",
        "kl_ctl of graph.actor_gen is an argument of graph.gae",
        "kl_ctl of graph.actor_train is an argument of graph.gae",
    )


@pytest.mark.parametrize(
    ("args", "remaining"),
    [
        ("{kl_ctl: 0.3, eps_clip: 0.1, gae_lambda: 0.9}", "{eps_clip: 0.1}"),
        ("{kl_ctl: 0.3, gae_lambda: 0.9, eps_clip: 0.1}", "{eps_clip: 0.1}"),
        ("{eps_clip: 0.1, kl_ctl: 0.3, gae_lambda: 0.9}", "{eps_clip: 0.1}"),
        ("{eps_clip: 0.1, kl_ctl: 0.3, c_clip: 3.0, gae_lambda: 0.9, entropy_coef: 0.1}",
         "{eps_clip: 0.1, c_clip: 3.0, entropy_coef: 0.1}"),
        ("{kl_ctl: 0.3, gae_lambda: 0.9}", "{}"),
    ],
)  # fmt: skip
def test_flow_style_loses_what_has_moved(args: str, remaining: str):
    migration = migrate(graph(actor_train=call("train_step", "ppo_actor", args)))
    assert f"  actor_train: {call('train_step', 'ppo_actor', remaining)}\n" in migration.text
    assert args_of(migration)["gae"] == {"kl_ctl": 0.3, "gae_lambda": 0.9}


def test_a_graph_on_one_line():
    text = f"graph: {{train: {call('train_step', 'ppo_actor', '{kl_ctl: 0.3}')}}}\n"
    migration = migrate(text)
    assert list(yaml.safe_load(migration.text)["graph"]) == ["gae", "train"]
    assert migration.text.count("\n") == 2


@pytest.mark.parametrize("reference", ['"${ppo}"', "'${ppo}'", "${ppo}"])
def test_a_reference_is_given_to_the_new_call_too(reference: str):
    text = graph(
        actor_train=(
            "\n    call: train_step\n    interface:\n      type: "
            f"ppo_actor\n      args: {reference}"
        )
    )
    migration = migrate(text + "ppo: {kl_ctl: 0.3}\n")
    assert args_of(migration) == {"gae": "${ppo}", "actor_train": "${ppo}"}
    assert yaml.safe_load(migration.text)["ppo"] == {"kl_ctl": 0.3}


def test_values_of_any_kind_are_moved_as_they_are():
    values = (
        "{kl_ctl: 1e-3, kl_in: 'loss', adv_norm: no, overlong_limit: "
        "'${generation.max_new_tokens}'}"
    )
    block = graph(
        actor_train="\n    call: train_step\n    interface:\n      type: ppo_actor\n      args:\n"
    )
    entries = (
        values.strip("{}")
        .replace("'${generation.max_new_tokens}'", "${generation.max_new_tokens}")
        .split(", ")
    )
    lines = "".join(f"        {entry}\n" for entry in entries)
    expected = yaml.safe_load(values)
    assert args_of(migrate(block + lines))["gae"] == expected
    assert (
        args_of(migrate(graph(actor_train=call("train_step", "ppo_actor", values))))["gae"]
        == expected
    )


@pytest.mark.parametrize("args", [None, "{}", "{eps_clip: 0.1}", "{loss_aggregation: token}"])
def test_grpo_becomes_a_policy_with_the_default_that_grpo_had(args: str | None):
    migration = migrate(
        graph(gen=call("generate", "grpo", args), train=call("train_step", "grpo", args))
    )
    arguments = yaml.safe_load(args or "{}")
    assert args_of(migration) == {
        "gen": {"loss_aggregation": "sequence", **arguments},
        "group_relative": {},
        "train": {"loss_aggregation": "sequence", **arguments},
    }
    kinds = [call["interface"]["type"] for call in yaml.safe_load(migration.text)["graph"].values()]
    assert kinds == ["ppo_actor", "group_relative", "ppo_actor"]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("{kl_ctl: 0.0}", {"loss_aggregation": "sequence", "kl_ctl": 0.0}),
        ("{}", {"loss_aggregation": "sequence"}),
        ("{loss_aggregation: token}", {"loss_aggregation": "token"}),
    ],
)
def test_a_block_of_grpo_gets_the_default_that_grpo_had(block: str, expected: dict[str, object]):
    text = graph(train=call("train_step", "grpo", '"${grpo}"')) + f"grpo: {block}\n"
    assert yaml.safe_load(migrate(text).text)["grpo"] == expected


def test_a_profile_does_not_set_what_the_layer_below_decides():
    text = (
        graph(actor_inf=call("inference", "grpo", '"${grpo}"'))
        + "grpo: {use_decoupled_loss: true}\n"
    )
    migrated = yaml.safe_load(migrate(text).text)
    assert migrated["grpo"] == {"use_decoupled_loss": True}
    assert list(migrated["graph"]) == ["actor_inf"]
    extending = (
        "extends: base\n"
        + graph(train=call("train_step", "grpo", '"${grpo}"'))
        + "grpo: {kl_ctl: 0.1}\n"
    )
    assert yaml.safe_load(migrate(extending, below=["group_relative"]).text)["grpo"] == {
        "kl_ctl": 0.1
    }


def test_a_recipe_that_says_it_is_of_today_stays():
    text = graph(actor_train=call("train_step", "ppo_actor", "{eps_clip: 0.1}"))
    assert migrate(f"format: 2\n{text}") == Migration(f"format: 2\n{text}")
    assert migrate(f"format: 1\n{text}").text.startswith("format: 2\n")


def test_no_call_is_inserted_where_a_layer_below_has_one():
    text = graph(actor_train=call("train_step", "ppo_actor", '"${ppo}"'))
    assert migrate(text, below=["gae"]) == Migration(text)
    assert migrate(text).changes


@pytest.mark.parametrize(
    ("actor", "critic", "message", "where"),
    [
        (
            "{kl_ctl: 0.1}",
            "{kl_ctl: 0.2}",
            "kl_ctl is 0.1 in actor (mine:2:87) and 0.2 in critic (mine:3:89)",
            "3:89",
        ),
        (
            "{}",
            "{gae_lambda: 0.5}",
            "gae_lambda is 0.5 in critic (mine:3:93) and 1.0 in actor (the default)",
            "3:93",
        ),
        (
            '"${a}"',
            '"${b}"',
            'calls have different arguments for what gae computes once: "${a}", "${b}"',
            "2:3",
        ),
        (
            '"${a}"',
            "{kl_ctl: 0.1}",
            'calls have different arguments for what gae computes once: "${a}", kl_ctl',
            "2:3",
        ),
        (
            "{generation_size: 8}",
            "{}",
            "generation_size of graph.actor has another meaning now",
            "2:79",
        ),
    ],
)
def test_what_has_no_single_meaning_is_refused(actor: str, critic: str, message: str, where: str):
    calls = {
        "actor": call("train_step", "ppo_actor", actor),
        "critic": call("train_step", "ppo_critic", critic),
    }
    with pytest.raises(UsageError) as caught:
        migrate(graph(**calls), "mine")
    assert (caught.value.code, caught.value.where) == ("R71", f"mine:{where}")
    assert message in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["", "name: x\n", "graph: {}\n", "graph: 3\n", "format: 2\n", "- 1\n", "graph: {a: 1}\n"],
)
def test_nothing_changes_without_such_a_call(text: str):
    assert migrate(text) == Migration(text)


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_of_today(path: Path):
    text = path.read_text()
    below = ["gae", "group_relative"] if path.parent.name == "profiles" else []
    assert migrate(text, below=below) == Migration(text)


# -- recipes over the layers of format 1 -----------------------------------------------------------


@pytest.fixture
def older(folder: Path):
    """Write a recipe of format 1: a shipped one over the layers of that time."""
    for file in FORMAT_1.glob("*.yaml"):
        shutil.copy(file, folder / f"old_{file.name}")

    def write(recipe: str) -> Path:
        algorithm = recipe.partition("_")[0]
        text = (RECIPES / f"{recipe}.yaml").read_text()
        assert f"extends: base/{algorithm}\n" in text
        mine = folder / "mine.yaml"
        mine.write_text(text.replace(f"base/{algorithm}", f"old_{algorithm}.yaml"))
        return folder / f"old_{algorithm}.yaml"

    return write


def calls_of(resolved: Resolved) -> list[dict]:
    """The calls in their order; without their names, and without a limit that only counts with
    `overlong_buffer`."""
    calls = [call.model_dump() for call in resolved.recipe.graph.values()]
    for record in calls:
        record["interface"]["args"].pop("overlong_limit", None)
    return calls


@pytest.mark.parametrize(
    ("recipe", "overrides", "profiles"),
    [
        ("ppo_math", [], []),
        ("ppo_math", ["ppo.kl_ctl=0.3", "ppo.gae_lambda=0.9", "ppo.eps_clip=0.1"], []),
        ("grpo_math", [], []),
        ("grpo_math", ["grpo.kl_ctl=0.3"], ["dr_grpo"]),
        ("grpo_math", [], ["rloo"]),
        ("grpo_math", ["grpo.overlong_limit=16"], ["dapo"]),
        ("grpo_math", [], ["gspo"]),
    ],
)
def test_a_migrated_recipe_means_the_shipped_one(
    older, recipe: str, overrides: list[str], profiles: list[str]
):
    layer = older(recipe)
    translated = load_recipe("mine.yaml", overrides, profiles) if recipe == "ppo_math" else None
    migration = migrate(layer.read_text())
    layer.write_text(migration.text)
    migrated = load_recipe("mine.yaml", overrides, profiles)
    assert calls_of(migrated) == calls_of(load_recipe(recipe, overrides, profiles))
    assert translated is None or translated.recipe.graph == migrated.recipe.graph
    assert migrate(migration.text) == Migration(migration.text)
    comments = [
        line.partition("#")[2]
        for line in (FORMAT_1 / layer.name.removeprefix("old_")).read_text().splitlines()
    ]
    assert [line.partition("#")[2] for line in migration.text.splitlines() if "#" in line] == list(
        filter(None, comments)
    )


def test_a_migrated_profile_means_the_shipped_one(older):
    layer = older("grpo_math")
    profile = layer.with_name("old_async_grpo.yaml")
    for file in (layer, profile):
        file.write_text(migrate(file.read_text()).text)
    settings = ["models.actor.rollout.devices='1'", "cluster.devices_per_node=2", "launch=local"]
    migrated = load_recipe("mine.yaml", settings, [str(profile)])
    assert calls_of(migrated) == calls_of(load_recipe("grpo_math", settings, ["async_grpo"]))


ARGUMENTS = {
    "kl_ctl": "0.3",
    "gae_lambda": "0.9",
    "eps_clip": "0.1",
    "kl_estimator": "k2",
    "adv_norm": "false",
}


@given(
    names=st.lists(st.sampled_from(sorted(ARGUMENTS)), unique=True),
    is_flow=st.booleans(),
    comments=st.lists(st.sampled_from(["", "# why"]), min_size=5, max_size=5),
    calls=st.permutations(["a", "b", "c"]),
)
def test_arguments_are_neither_lost_nor_changed(
    names: list[str], is_flow: bool, comments: list[str], calls: list[str]
):
    entries = [f"{name}: {ARGUMENTS[name]}" for name in names]
    block = "".join(
        f"\n        {entry} {comment}" for entry, comment in zip(entries, comments, strict=False)
    )
    args = f"{{{', '.join(entries)}}}" if is_flow or not entries else block
    text = "graph:\n" + "".join(
        f"  {name}:\n    call: train_step\n    interface:\n      type: "
        f"ppo_actor\n      args: {args}\n"
        for name in calls
    )
    migration = migrate(text)
    before = yaml.safe_load(text)["graph"]["a"]["interface"]["args"]
    after = args_of(migration)
    for name in calls:
        assert after[name] == {
            key: before[key] for key in names if key in ("eps_clip", "kl_estimator")
        }
    assert after["gae"] == {key: before[key] for key in names if key != "eps_clip"}
    assert migrate(migration.text) == Migration(migration.text)
