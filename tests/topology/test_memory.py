"""What `plan` says about memory, made of what the backends say."""

from __future__ import annotations

import json

import pytest

from rlcli.api.memory import Parts
from rlcli.recipe.resolve import load_recipe
from rlcli.topology.advice import advise
from rlcli.topology.memory import Peak, plan_memory
from rlcli.topology.report import make_plan

MIB = 1 << 20

# -- roles, ranks, phases -----------------------------------------------------------------------------------


def test_the_budget_of_the_kv_cache_bounds_what_is_planned():
    def cache(*overrides):
        peaks = make_plan(load_recipe("ppo_math", list(overrides))).memory.peaks
        return next(peak.parts.cache for peak in peaks if peak.phase == "generate")

    longest = make_plan(load_recipe("ppo_math")).memory.lengths.sequence
    setting = f"models.actor.backend.args.kv_cache_tokens={4 * longest + 1}"
    assert cache(setting) == cache("generation.max_concurrent_responses=4") < cache()


def test_the_cache_of_a_judge_is_counted():
    """Its call is an inference, in which its engine generates: a thought, and a line with the score."""

    def of_judge(*overrides):
        given = ["models.judge={init: actor}", "train.prompts_per_step=4", *overrides]
        plan = make_plan(load_recipe("grpo_math", given, ["judge"]))
        peak = next(peak for peak in plan.memory.peaks if peak.call == "reward_inf")
        return plan.memory, peak

    def per_token(memory, peak, thought):
        return peak.parts.cache / (memory.lengths.sequence + 320 + thought + 12)

    memory, peak = of_judge()
    assert peak.phase == "generate"
    _, shorter = of_judge("graph.reward_inf.interface.args.thought_tokens=0")
    keys_and_values = 4 * 128 * (4 + 2)  # of four layers of width 128, keys in float32 and values in bfloat16
    assert per_token(memory, peak, 256) == per_token(memory, shorter, 0) == 4 * 8 * keys_and_values


def test_every_call_is_estimated_on_top_of_all_roles_of_its_devices():
    plan = make_plan(load_recipe("ppo_math"))
    held = {one.role: one for one in plan.memory.held}
    assert {role: one.parameters for role, one in held.items()} == {"actor": 852608, "critic": 852737, "ref": 852608}
    assert held["ref"].kept.optimizer == 0
    assert [peak.call for peak in plan.memory.peaks][1:] == [name for name in plan.recipe.graph if name != "reward_inf"]
    everything = sum(one.total for one in held.values())
    assert {peak.held for peak in plan.memory.peaks if peak.phase != "load"} == {everything}


def test_roles_on_devices_of_their_own_do_not_burden_each_other():
    overrides = ["launch=local", "cluster.devices_per_node=2", "models.critic.devices='1'", "models.actor.devices='0'",
                 "models.ref.devices='0'"]  # fmt: skip
    plan = make_plan(load_recipe("ppo_math", overrides))
    held = {one.role: one.total for one in plan.memory.held}
    peaks = {peak.call: peak.held for peak in plan.memory.peaks}
    assert peaks["critic_train"] == held["critic"]
    assert peaks["actor_train"] == held["actor"] + held["ref"]


def test_an_offloaded_role_is_only_there_in_its_own_calls():
    plan = make_plan(load_recipe("ppo_math", ["graph.ref_inf.hooks.offload=true"]))
    held = {one.role: one.total for one in plan.memory.held}
    peaks = {peak.call: peak.held for peak in plan.memory.peaks}
    assert peaks["ref_inf"] - peaks["actor_train"] == held["ref"]


def test_what_other_roles_find_of_a_trained_role_that_is_offloaded():
    """All of it is away only if every call offloads it; calls that do not train bring back the weights alone."""

    def found(call, role, *offloaded):
        """Beyond the other roles, what a call of another role finds on its device; and all that the role keeps."""
        plan = make_plan(load_recipe("ppo_math", [f"{key}.hooks.offload=true" for key in offloaded]))
        held = {one.role: one for one in plan.memory.held}
        (there,) = [peak.held for peak in plan.memory.peaks if peak.call == call]
        return there - sum(one.total for name, one in held.items() if name != role), held[role].kept

    left, kept = found("actor_train", "critic", "graph.critic_train")
    assert left == kept.weights < kept.total
    assert found("actor_train", "critic", "graph.critic_inf") == (kept.total, kept)
    assert found("actor_train", "critic", "graph.critic_inf", "graph.critic_train") == (0, kept)
    of_actor = ("graph.actor_gen", "graph.actor_train")
    left, kept = found("critic_train", "actor", *of_actor)
    assert left == kept.weights  # after an evaluation
    assert found("critic_train", "actor", *of_actor, "train.eval.graph.eval_gen") == (0, kept)


def test_a_checkpoint_is_a_copy_where_devices_have_the_hosts_memory():
    def copies(*overrides):
        plan = make_plan(load_recipe("ppo_math", [*overrides]))
        peaks = {peak.call: peak for peak in plan.memory.peaks}
        return peaks.get("checkpoint"), max(peak.total for peak in peaks.values() if peak.call != "checkpoint"), plan

    found, busiest, plan = copies("cluster.device=cpu")
    trained = sum(one.total for one in plan.memory.held if one.role != "ref")
    assert (found.held, found.parts.gathered) == (busiest, trained)
    found, _, plan = copies("cluster.device=cpu", "checkpoint.asynchronous=false")
    assert (found.held, found.parts.gathered) == (sum(one.total for one in plan.memory.held), trained)
    never = ["checkpoint.every_seconds=null", "checkpoint.at_end=false", "checkpoint.on_stop=false"]
    assert copies("cluster.device=cpu", *never)[0] is None
    assert copies("cluster.device=cuda")[0] is None


def test_the_models_take_what_their_dtype_takes():
    def saved(*overrides):
        return make_plan(load_recipe("ppo_math", list(overrides))).storage.models

    assert saved() == 4 * (852608 + 852737) == 2 * saved("checkpoint.save_dtype=bfloat16")
    assert saved("checkpoint.save_dtype=float32") == saved()


def test_the_models_take_what_their_source_takes(tmp_path):
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
              "num_attention_heads": 1, "vocab_size": 400}  # fmt: skip
    sizes = []
    for more in ({}, {"dtype": "bfloat16"}, {"torch_dtype": "float16"}, {"dtype": ["?"]}):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        folder = ["models.actor.scratch=null", f"models.actor.path={tmp_path}"]
        sizes.append(make_plan(load_recipe("sft_math", folder)).storage.models)
    assert sizes == [4 * sizes[1] // 2, sizes[1], sizes[1], sizes[0]]


def test_an_unknown_role_is_named_and_the_others_are_counted():
    plan = make_plan(load_recipe("ppo_math", ["models.ref={_replace_: true, path: nobody/nothing}"]))
    assert list(plan.memory.unknown) == ["ref"]
    assert {peak.role for peak in plan.memory.peaks} == {"actor", "critic"}
    assert plan.storage.checkpoint == 12 * (852608 + 852737)


# -- verdicts and advice ------------------------------------------------------------------------------------


def test_a_verdict_counts_with_the_error():
    peak = Peak("x", "actor", "update", 100, Parts())
    assert [peak.verdict(size, 0) for size in (116, 114, 100, 99)] == ["ok", "tight", "tight", "too much"]
    assert peak.verdict(126, 10) == "ok"


@pytest.mark.parametrize("size", [110, 180, 300])
def test_the_advice_really_helps(size):
    recipe = load_recipe("ppo_math", ["cluster.device=cpu"])
    plan = make_plan(recipe, size * MIB)
    too_much = [peak for peak in plan.memory.peaks if plan.verdict(peak) == "too much"]
    assert too_much
    assert set(plan.advice) == {peak.call for peak in too_much}
    for peak in too_much:
        keys = plan.advice[peak.call]
        assert keys
        after = make_plan(load_recipe("ppo_math", ["cluster.device=cpu", *keys]), size * MIB)
        (same,) = [other for other in after.memory.peaks if (other.call, other.role) == (peak.call, peak.role)]
        assert after.verdict(same) != "too much"


def test_where_nothing_is_enough_no_key_is_named():
    plan = make_plan(load_recipe("ppo_math", ["cluster.device=cpu"]))
    (peak,) = [peak for peak in plan.memory.peaks if peak.call == "actor_train"]
    assert advise(plan.recipe, plan.sizes, peak, MIB, 0) == ()


def test_advice_only_names_what_a_sample_allows():
    recipe = load_recipe("ppo_math").recipe
    plan = make_plan(load_recipe("ppo_math"))
    least = 4 * plan.memory.lengths.sequence
    for size in range(20, 400, 20):
        for peak in plan_memory(recipe, plan.topology, plan.sizes).peaks:
            for key in advise(recipe, plan.sizes, peak, size * MIB, 0):
                if key.startswith("train.max_tokens_per_microbatch="):
                    assert int(key.partition("=")[2]) >= least
