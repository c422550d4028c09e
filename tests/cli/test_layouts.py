"""A layout that an engine cannot run is refused with its place and the nearest one that it can."""

import json
from pathlib import Path

import pytest

from rlcli.api.layout import RoleLayout
from rlcli.backends._layouts import problems
from rlcli.errors import RlcliError
from rlcli.recipe.components import declared
from rlcli.recipe.engine_layouts import nearest_layout, possible_meshes
from rlcli.recipe.mesh import Mesh
from rlcli.recipe.resolve import load_recipe
from rlcli.topology.architecture import read_architecture
from rlcli.topology.layouts import layout_errors

FOUR = ["launch=local", "cluster.devices_per_node=4", "train.prompts_per_step=64"]
MIXTURE = "{model_type: mixtral, num_local_experts: 6, num_attention_heads: 8}"
RECIPE = f"""\
extends: sft_math
launch: local
cluster: {{devices_per_node: 4}}
models:
  actor:
    scratch: {MIXTURE}
    mesh: {{ep: 4}}
    backend: {{type: fsdp}}
"""
NEAREST = "the nearest layout that it can run is"
ARGS = "models.actor.backend.args"


@pytest.mark.parametrize("verb", ["validate", "plan"])
def test_a_refused_layout_has_its_place_and_the_nearest_one(rlcli, tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    code, out, err = rlcli(verb, "mine.yaml")
    assert (code, out) == (5, "")
    assert "error[R49] mine.yaml:7:16: " in err
    assert "6 experts, which cannot be" in err
    assert f"{NEAREST} dp4 ep2:" in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (["mesh.tp=2"], "only ep divides experts", f"{NEAREST} dp4: models.actor.mesh.tp=1"),
        (
            ["mesh.cp=2", "backend.args.attention=flash", "backend.args.dtype=auto"],
            "the run may choose a ring",
            f"{ARGS}.context_parallel=ulysses, or {NEAREST} dp4: models.actor.mesh.cp=1",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_said_with_what_it_can(changes, message, hint):
    recipe = [f"models.actor.scratch={MIXTURE}", *(f"models.actor.{change}" for change in changes)]
    try:
        (error,) = layout_errors(load_recipe("sft_math", [*FOUR, *recipe]))
    except RlcliError as refused:
        error = refused
    assert message in error.what
    assert error.hint == hint


LLAMA_3_PADDED = {"model_type": "llama", "vocab_size": 128257}


@pytest.mark.parametrize(
    ("config", "mesh", "arguments", "key"),
    [
        ({"model_type": "gpt2"}, {"tp": 2}, {}, ("mesh", "tp")),
        ({"model_type": "llama"}, {"tp": 2}, {}, None),
        ({"model_type": "qwen2_moe"}, {"tp": 2}, {}, ("mesh", "tp")),
        (
            {"model_type": "llama"}, {"cp": 2},
            {"attention": "flash", "context_parallel": "ulysses"}, None,
        ),
        ({"model_type": "llama"}, {"cp": 3}, {"context_parallel": "ulysses"},
         ("backend", "args", "context_parallel")),
        ({"model_type": "llama"}, {"cp": 3}, {"context_parallel": "auto"}, None),
        # their 128257 rows have halves of 64129 and 64128, their columns three equal parts or not
        ({**LLAMA_3_PADDED, "hidden_size": 3072}, {"dp": 3, "tp": 2}, {"shard_size": None}, None),
        (LLAMA_3_PADDED, {"dp": 3, "tp": 2}, {"shard_size": None}, ("mesh", "tp")),
        (LLAMA_3_PADDED, {"dp": 4, "tp": 2}, {"shard_size": None}, None),
        (LLAMA_3_PADDED, {"dp": 6, "tp": 2}, {"shard_size": 2}, None),
        ({"model_type": "llama"}, {"dp": 2, "cp": 2}, {"shard_size": 3},
         ("backend", "args", "shard_size")),
        ({"model_type": "llama"}, {"dp": 2, "cp": 2}, {"shard_size": 5}, None),
    ],
)  # fmt: skip
def test_rules_follow_from_mesh_arguments_and_sizes(config, mesh, arguments, key):
    degrees = dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), 1) | mesh
    layout = RoleLayout("actor", degrees, arguments, "cuda", read_architecture(config))
    assert [problem.key for problem in problems(layout)] == ([key] if key else [])


@pytest.mark.parametrize(("devices", "value"), [(4, "2"), (5, "null")])
def test_shards_that_do_not_divide_the_ranks_are_refused(devices, value):
    cluster = ["launch=local", f"cluster.devices_per_node={devices}"]
    with pytest.raises(RlcliError, match=f"shard_size 3 does not divide the {devices}") as caught:
        load_recipe("sft_math", [*cluster, f"{ARGS}.shard_size=3"])
    assert caught.value.hint.startswith(f"{ARGS}.shard_size={value}")


def test_the_documentation_has_the_dimensions_of_every_engine():
    rows = (Path(__file__).parents[2] / "docs" / "engines.md").read_text().splitlines()
    cells = [row.split(" | ") for row in rows if row.startswith("| `")]
    written = {row[0].strip("| `"): tuple(row[3].split(", ")) for row in cells}
    for engine in ("fsdp", "inference", "deepspeed", "megatron"):
        assert written[engine] == declared("backends", engine, "DIMENSIONS")


def test_flash_attn_on_processors_is_refused():
    flash = [f"{ARGS}.attention=flash", f"{ARGS}.dtype=auto"]
    with pytest.raises(RlcliError, match="computes on GPUs only") as caught:
        load_recipe("sft_math", ["cluster.device=cpu", *flash])
    assert caught.value.hint.startswith(f"{ARGS}.attention=auto")
    load_recipe("sft_math", flash)


def test_possible_layouts_are_those_of_the_devices_that_the_engine_knows():
    recipe = load_recipe("sft_math", FOUR).recipe
    meshes = {str(mesh) for mesh in possible_meshes(recipe, "actor", 4)}
    assert {"dp4", "dp4 ep2", "dp4 ep4", "dp2 tp2", "dp2 cp2", "dp1 cp4", "dp1 tp2 cp2"} <= meshes
    assert {"dp2 cp2 ep2", "dp1 cp4 ep4"} <= meshes
    assert not [mesh for mesh in meshes if "pp" in mesh]


def test_the_nearest_layout_changes_as_little_as_possible():
    recipe = load_recipe("sft_math", FOUR).recipe
    assert str(nearest_layout(recipe, "actor", Mesh(2, 1, 2, 1, 2))) in ("dp4 ep2", "dp2 cp2 ep2")
    train = recipe.train.model_copy(update={"prompts_per_step": 1})
    fewer = recipe.model_copy(update={"train": train})
    assert str(nearest_layout(fewer, "actor", Mesh(4))) in ("dp1 tp2 cp2", "dp1 cp4")


LARGE = (
    "models.actor.scratch={model_type: mixtral, num_local_experts: 8, num_experts_per_tok: 2, "
    "hidden_size: 1024, intermediate_size: 4096, num_hidden_layers: 8, num_attention_heads: 16, "
    "num_key_value_heads: 8}"
)


def layouts_of(rlcli, *overrides, memory="80"):
    """The rows of the actor by mesh, without dimensions of one rank."""
    arguments = ("--layouts", "--json", "--device-memory", memory)
    _, out, _ = rlcli("plan", "sft_math", *FOUR, "cluster.device=cuda", *overrides, *arguments)
    rows = json.loads(out)["layouts"]["actor"]
    return {title_of(row["mesh"]): row for row in rows}


def title_of(mesh):
    return " ".join(f"{name}{degree}" for name, degree in mesh.items() if degree > 1)


def test_a_plan_lists_what_layouts_take_and_send_and_advises_one(rlcli):
    rows = layouts_of(rlcli, LARGE)
    assert [mesh for mesh, row in rows.items() if row["is_own"]] == ["dp4"]
    assert {"dp4 ep2", "dp4 ep4", "dp2 cp2", "cp4"} < set(rows)
    assert not any("tp" in mesh for mesh in rows)
    assert set(rows["dp4"]["sent"]) == {"all-gather", "reduce-scatter"}
    assert set(rows["dp4 ep4"]["sent"]) == {"all-gather", "reduce-scatter", "all-to-all"}
    assert rows["dp4 ep4"]["sent"]["all-gather"] < rows["dp4"]["sent"]["all-gather"] / 4
    assert [mesh for mesh, row in rows.items() if row["is_advised"]] == ["dp4 ep4"]


def test_the_table_of_layouts_marks_that_of_the_recipe(rlcli):
    _, out, _ = rlcli("plan", "sft_math", *FOUR, LARGE, "--layouts")
    assert "advised: models.actor.mesh.ep=4" in out
    assert "dp4 *" in out
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_the_advised_layout_fits_if_the_memory_of_devices_is_known(rlcli):
    def actor(memory):
        arguments = (
            "ppo_gsm8k",
            "--with",
            "gpu8",
            "--layouts",
            "--json",
            "--device-memory",
            memory,
        )
        _, out, _ = rlcli("plan", *arguments)
        return json.loads(out)["layouts"]["actor"]

    rows = actor("16")
    assert [row["verdict"] for row in rows if row["is_own"]] == ["too much"]
    (advised,) = (row for row in rows if row["is_advised"])
    assert advised["verdict"] == "ok"
    assert advised["memory"] < 15 << 30
    assert advised["mesh"]["cp"] > 1
    assert not any(row["is_advised"] for row in actor("1"))


def test_stages_of_a_pipeline_are_idle_while_it_fills_and_drains(rlcli):
    megatron = ["models.actor.backend={type: megatron}", "models.actor.mesh.pp=2"]
    rows = layouts_of(rlcli, *megatron, "train.max_tokens_per_microbatch=128")
    (chosen,) = (row for row in rows.values() if row["is_own"])
    assert chosen["idle"] == 1 / (32 + 1)  # of 64 sequences, each is a micro-batch of 2 data ranks
    assert rows["dp4"]["idle"] == 0
    assert "pipeline" in chosen["sent"]
    assert set(rows["dp4"]["sent"]) == {"all-gather", "reduce-scatter"}


def test_a_plan_says_what_ranks_of_zero_send(rlcli):
    rows = layouts_of(rlcli, "models.actor.backend={type: deepspeed, args: {zero_stage: 1}}")
    assert set(rows["dp4"]["sent"]) == {"all-gather", "all-reduce"}
