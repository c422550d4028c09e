"""The memory that `plan` reports, from the estimates of the backends."""

from __future__ import annotations

import json
import sys

import pytest

from rlcli.api.memory import Parts
from rlcli.recipe.resolve import load_recipe
from rlcli.topology.advice import Fitting
from rlcli.topology.memory import Peak, plan_memory
from rlcli.topology.report import make_plan, plan_json
from rlcli.topology.text import plan_lines
from rlcli.topology.text_format import size as readable

MIB = 1 << 20

# -- roles, ranks, phases --------------------------------------------------------------------------


def test_the_kv_cache_budget_bounds_the_planned_cache():
    def cache(*overrides):
        peaks = make_plan(load_recipe("ppo_math", list(overrides))).memory.peaks
        return next(peak.parts.cache for peak in peaks if peak.phase == "generate")

    longest = make_plan(load_recipe("ppo_math")).memory.lengths.sequence
    setting = f"models.actor.backend.args.kv_cache_tokens={4 * longest + 1}"
    assert cache(setting) == cache("generation.max_concurrent_responses=4") < cache()


def test_the_kv_cache_of_a_judge_is_counted():
    """Its call is an inference, in which its engine generates: a thought,
    and a line with the score."""

    def of_judge(*overrides):
        overrides_with_judge = [
            "models.judge={init: actor}",
            "train.prompts_per_step=4",
            *overrides,
        ]
        plan = make_plan(load_recipe("grpo_math", overrides_with_judge, ["judge"]))
        peak = next(peak for peak in plan.memory.peaks if peak.call == "reward_inf")
        return plan.memory, peak

    def per_token(memory, peak, thought):
        return peak.parts.cache / (memory.lengths.sequence + 320 + thought + 12)

    memory, peak = of_judge()
    assert peak.phase == "generate"
    _, shorter = of_judge("graph.reward_inf.interface.args.thought_tokens=0")
    # of four layers of width 128, in bfloat16
    keys_and_values = 4 * 128 * (2 + 2)
    assert per_token(memory, peak, 256) == per_token(memory, shorter, 0) == 4 * 8 * keys_and_values


def test_every_call_is_estimated_on_top_of_all_roles_of_its_devices():
    plan = make_plan(load_recipe("ppo_math"))
    roles = {one.role: one for one in plan.memory.roles}
    assert {role: one.parameters for role, one in roles.items()} == {
        "actor": 852608,
        "critic": 852737,
        "ref": 852608,
    }
    assert roles["ref"].resident.optimizer == 0
    without_a_model = ("reward_inf", "advantages")
    estimated = [name for name in plan.recipe.graph if name not in without_a_model]
    assert [peak.call for peak in plan.memory.peaks][1:] == estimated
    everything = sum(one.total for one in roles.values())
    assert {peak.resident for peak in plan.memory.peaks if peak.phase != "load"} == {everything}


def test_roles_on_separate_devices_do_not_add_up():
    overrides = [
        "launch=local",
        "cluster.devices_per_node=2",
        "models.critic.devices='1'",
        "models.actor.devices='0'",
        "models.ref.devices='0'",
    ]
    plan = make_plan(load_recipe("ppo_math", overrides))
    totals = {one.role: one.total for one in plan.memory.roles}
    peaks = {peak.call: peak.resident for peak in plan.memory.peaks}
    assert peaks["critic_train"] == totals["critic"]
    assert peaks["actor_train"] == totals["actor"] + totals["ref"]


def test_an_offloaded_role_is_resident_only_in_its_own_calls():
    plan = make_plan(load_recipe("ppo_math", ["graph.ref_inf.hooks.offload=true"]))
    totals = {one.role: one.total for one in plan.memory.roles}
    peaks = {peak.call: peak.resident for peak in plan.memory.peaks}
    assert peaks["ref_inf"] - peaks["actor_train"] == totals["ref"]


def test_memory_remaining_of_an_offloaded_trained_role():
    """All of it is offloaded only if every call offloads it; calls that do not train bring back
    only the weights."""

    def remaining(call, role, *offloaded):
        """Memory of the role on the device during a call of another role,
        and its resident memory in all."""
        plan = make_plan(
            load_recipe("ppo_math", [f"{key}.hooks.offload=true" for key in offloaded])
        )
        roles = {memory.role: memory for memory in plan.memory.roles}
        (resident,) = [peak.resident for peak in plan.memory.peaks if peak.call == call]
        return resident - sum(
            memory.total for name, memory in roles.items() if name != role
        ), roles[role].resident

    left, resident_parts = remaining("actor_train", "critic", "graph.critic_train")
    assert left == resident_parts.weights < resident_parts.total
    assert remaining("actor_train", "critic", "graph.critic_inf") == (
        resident_parts.total,
        resident_parts,
    )
    assert remaining("actor_train", "critic", "graph.critic_inf", "graph.critic_train") == (
        0,
        resident_parts,
    )
    of_actor = ("graph.actor_gen", "graph.actor_train")
    left, resident_parts = remaining("critic_train", "actor", *of_actor)
    assert left == resident_parts.weights  # after an evaluation
    assert remaining("critic_train", "actor", *of_actor, "train.eval.graph.eval_gen") == (
        0,
        resident_parts,
    )


def test_a_checkpoint_on_the_cpu_is_planned_as_a_copy():
    def copies(*overrides):
        plan = make_plan(load_recipe("ppo_math", [*overrides]))
        peaks = {peak.call: peak for peak in plan.memory.peaks}
        return (
            peaks.get("checkpoint"),
            max(peak.total for peak in peaks.values() if peak.call != "checkpoint"),
            plan,
        )

    copy, busiest, plan = copies("cluster.device=cpu")
    trained = sum(one.total for one in plan.memory.roles if one.role != "ref")
    assert (copy.resident, copy.parts.gathered) == (busiest, trained)
    copy, _, plan = copies("cluster.device=cpu", "checkpoint.asynchronous=false")
    assert (copy.resident, copy.parts.gathered) == (
        sum(one.total for one in plan.memory.roles),
        trained,
    )
    never = ["checkpoint.every_seconds=null", "checkpoint.at_end=false", "checkpoint.on_stop=false"]
    assert copies("cluster.device=cpu", *never)[0] is None
    assert copies("cluster.device=cuda")[0] is None


def test_saved_models_are_sized_by_the_dtype_they_are_saved_in():
    def saved(*overrides):
        return make_plan(load_recipe("ppo_math", list(overrides))).storage.models

    assert saved() == 4 * (852608 + 852737) == 2 * saved("checkpoint.save_dtype=bfloat16")
    assert saved("checkpoint.save_dtype=float32") == saved()


def test_saved_models_are_sized_by_the_dtype_of_their_source(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "vocab_size": 400,
    }
    sizes = []
    for dtype in ({}, {"dtype": "bfloat16"}, {"torch_dtype": "float16"}, {"dtype": ["?"]}):
        (tmp_path / "config.json").write_text(json.dumps(config | dtype))
        folder = ["models.actor.scratch=null", f"models.actor.path={tmp_path}"]
        sizes.append(make_plan(load_recipe("sft_math", folder)).storage.models)
    assert sizes == [4 * sizes[1] // 2, sizes[1], sizes[1], sizes[0]]


def test_an_unknown_role_is_named_and_the_others_are_counted():
    plan = make_plan(
        load_recipe("ppo_math", ["models.ref={_replace_: true, path: nobody/nothing}"])
    )
    assert list(plan.memory.unknown) == ["ref"]
    assert {peak.role for peak in plan.memory.peaks} == {"actor", "critic"}
    assert plan.storage.checkpoint == 12 * (852608 + 852737)


# -- verdicts and advice ---------------------------------------------------------------------------


def test_a_verdict_includes_the_error_of_the_estimate():
    peak = Peak("x", "actor", "update", 100, Parts())
    assert [peak.verdict(size, 0) for size in (116, 114, 100, 99)] == [
        "ok",
        "tight",
        "tight",
        "too much",
    ]
    assert peak.verdict(126, 10) == "ok"


@pytest.mark.parametrize("size", [110, 180, 300])
def test_a_recipe_with_the_advised_keys_fits(size):
    recipe = load_recipe("ppo_math", ["cluster.device=cpu"])
    plan = make_plan(recipe, size * MIB)
    too_much = [peak for peak in plan.memory.peaks if plan.verdict(peak) == "too much"]
    assert too_much
    assert set(plan.advice) == {peak.call for peak in too_much}
    for peak in too_much:
        keys = plan.advice[peak.call]
        assert keys
        after = make_plan(load_recipe("ppo_math", ["cluster.device=cpu", *keys]), size * MIB)
        (same,) = [
            again
            for again in after.memory.peaks
            if (again.call, again.role) == (peak.call, peak.role)
        ]
        assert after.verdict(same) != "too much"


def test_no_key_is_advised_where_none_is_enough():
    plan = make_plan(load_recipe("ppo_math", ["cluster.device=cpu"]))
    assert Fitting(plan.recipe, plan.topology, plan.sizes, MIB, 0).advice(["actor_train"]) == {
        "actor_train": ()
    }


def test_advised_micro_batches_hold_at_least_one_sample():
    recipe = load_recipe("ppo_math").recipe
    plan = make_plan(load_recipe("ppo_math"))
    least = 4 * plan.memory.lengths.sequence
    for size in range(20, 400, 20):
        fitting = Fitting(recipe, plan.topology, plan.sizes, size * MIB, 0)
        for peak in plan_memory(recipe, plan.topology, plan.sizes).peaks:
            for key in fitting.advice([peak.call])[peak.call]:
                if key.startswith("train.max_tokens_per_microbatch="):
                    assert int(key.partition("=")[2]) >= least


# -- large models ----------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}
SIZES = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
FSDP = ["models.actor.backend={_replace_: true, type: fsdp}"]
MEGATRON = [
    "models.actor.backend={_replace_: true, type: megatron, args: {dtype: bfloat16}}",
    "models.actor.mesh={dp: 16, tp: 8, pp: 4}",
    "cluster.nodes=64",
    "train.prompts_per_step=1024",
]
SGLANG = f"{{type: sglang, args: {{python: {sys.executable}, tp: 8}}}}"
SERVERS = f'models.actor.rollout={{devices: "0,8", backend: {SGLANG}}}'


@pytest.fixture
def planned(tmp_path):
    """A plan of GRPO, or of PPO, with a large Llama on nodes of eight devices of 80 GiB."""

    def make(
        size: str,
        *overrides: str,
        recipe: str = "grpo_math",
        device_gib: int = 80,
        dtype: str = "float32",
    ):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **SIZES[size], "dtype": dtype}))
        settings = [
            f"models.actor.path={tmp_path}",
            *([] if MEGATRON[0] in overrides else FSDP),
            "models.ref.backend={_replace_: true}",
            "generation.max_new_tokens=512",
            "generation.responses_per_prompt=8",
            *overrides,
        ]
        return make_plan(load_recipe(recipe, settings, ["gpu8"]), device_gib << 30)

    return make


def resident_of(plan, role):
    return next(memory for memory in plan.memory.roles if memory.role == role).total


def test_a_reference_in_bfloat16_takes_about_half(planned):
    full = resident_of(planned("8B"), "ref")
    assert full == 4 * 8_030_261_248
    narrow = resident_of(planned("8B", "models.ref.backend.args.dtype=bfloat16"), "ref")
    assert narrow / full == pytest.approx(0.5, abs=0.04)  # the embedding stays in float32
    assert resident_of(planned("8B", "models.ref.backend.args.dtype=float32"), "ref") == full


def test_an_unsharded_reference_that_does_not_fit_is_advised_to_use_fsdp(planned):
    urls = [f"http://a:{port}" for port in range(1, 17)]
    servers = f"models.actor.rollout.backend={{type: sglang, args: {{urls: {urls}}}}}"
    plan = planned(
        "70B", *MEGATRON, "models.actor.rollout.devices=0-15", "models.actor.devices=0-511", servers
    )
    ((keys,),) = [{*plan.advice.values()}]
    assert "models.ref.backend.type=fsdp" in keys
    assert "models.actor.backend.args.gradient_checkpointing=true" in keys


@pytest.mark.parametrize(
    ("size", "overrides", "device_gib"),
    [
        ("8B", [], 80),
        ("8B", [], 48),
        ("8B", [SERVERS, "cluster.nodes=2", "models.actor.devices=0-15"], 80),
        ("70B", [*MEGATRON, SERVERS, "models.actor.devices=0-511"], 80),
    ],
)
def test_all_advised_keys_together_fit_and_each_is_needed(planned, size, overrides, device_gib):
    plan = planned(size, *overrides, device_gib=device_gib)
    (keys,) = {*plan.advice.values()}
    assert keys
    after = planned(size, *overrides, *keys, device_gib=device_gib)
    assert "too much" not in {after.verdict(peak) for peak in after.memory.peaks}
    needed = [key for key in keys if not key.endswith("recompute=selective")]  # that is milder
    for key in needed:
        fewer = planned(
            size,
            *overrides,
            *(kept_key for kept_key in keys if kept_key != key and not needs(kept_key, key)),
            device_gib=device_gib,
        )
        assert "too much" in {fewer.verdict(peak) for peak in fewer.memory.peaks}, key


def needs(advised, key):
    """Whether an advised setting is refused without another one."""
    role = key.removesuffix("gradient_checkpointing=true")
    return role != key and advised == f"{role}recompute=selective"


def test_a_dtype_that_would_change_numbers_is_advised_last():
    cheap = make_plan(load_recipe("ppo_math", ["cluster.device=cpu"]), 300 * MIB)
    assert not any("dtype" in key for keys in cheap.advice.values() for key in keys)


def test_servers_are_counted_on_their_devices(planned):
    plan = planned("8B", SERVERS, "cluster.nodes=2", "models.actor.devices=0-15")
    (servers,) = plan.memory.servers
    assert (len(servers.placed), servers.placed[1].devices) == (2, tuple(range(8)))
    assert servers.memory.weights == 2 * 8_030_261_248 // 8
    assert servers.memory.total == int(0.87 * (80 << 30))
    peaks = {peak.call: peak for peak in plan.memory.peaks}
    resident = sum(resident_of(plan, role) for role in ("actor", "ref"))
    assert (
        peaks["actor_train"].resident == resident + servers.memory.total
    )  # of ranks 1 to 7, which only their servers share
    half = planned(
        "8B",
        SERVERS.replace("tp: 8", "tp: 8, options: {mem-fraction-static: 0.5}"),
        "cluster.nodes=2",
    )
    assert half.memory.servers[0].memory.total == 40 << 30
    wrong = planned(
        "8B",
        SERVERS.replace("tp: 8", "tp: 8, options: {mem_fraction_static: much}"),
        "cluster.nodes=2",
    )
    assert wrong.memory.servers == plan.memory.servers


def test_where_servers_are_and_how_much_they_work_on_is_shown(planned):
    plan = planned("8B", SERVERS, "cluster.nodes=2")
    longest = plan.memory.lengths.sequence
    text = " ".join(" ".join(plan_lines(plan)).split())
    each = 64 * longest * 2 * 1 * 128 * 32 * 2  # 8 heads of keys and values over tp 8, in 16 bits
    assert "servers of actor_rollout: 2, on devices 0-7 of node 0; devices 0-7 of node 1;" in text
    at_once = "up to 64 responses at once for each rank, whose keys and values take up to"
    assert f"{at_once} {readable(each)} on each device at {longest} tokens" in text
    (servers,) = plan_json(plan)["memory"]["servers"]
    assert servers["responses_at_once"] * servers["cache_per_token"] * longest == each


def test_weight_transfers_to_servers_are_shown(planned):
    plan = planned("8B", SERVERS, "cluster.nodes=2")
    text = " ".join(" ".join(plan_lines(plan)).split())
    assert (
        "weights to actor_rollout: 29.9 GiB to each of 2 servers per update, about 32 s at 1 GB/s"
        in text
    )
    assert "up to 59.8 GiB on disk per rank of actor_rollout" in text
    (servers,) = plan_json(plan)["memory"]["servers"]
    assert (servers["sent_per_update"], servers["servers"], servers["devices_of_each"]) == (
        4 * 8_030_261_248,
        2,
        8,
    )


@pytest.mark.parametrize(
    ("stored", "options", "width"),
    [("bfloat16", "{}", 2), ("bfloat16", "{dtype: float32}", 4), ("float32", "{dtype: half}", 2)],
)
def test_weights_are_sent_in_the_dtype_of_the_servers(planned, stored, options, width):
    plan = planned(
        "8B",
        SERVERS.replace("tp: 8", f"tp: 8, options: {options}"),
        "cluster.nodes=2",
        dtype=stored,
    )
    assert plan.memory.servers[0].memory.sent == width * 8_030_261_248
