"""Memory estimates: against what the backward pass really saves, and against the memory of a real process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcli.backends._transformers import PackedModel, compute_dtype
from rlcli.ops.logprobs import CHUNK_ELEMENTS
from rlcli.recipe.resolve import load_recipe
from rlcli.topology import footprint
from rlcli.topology.advice import advise
from rlcli.topology.architecture import read_architecture
from rlcli.topology.footprint import ERROR_PERCENT, EngineFootprint, Parts, saved_by_layer
from rlcli.topology.memory import Peak, plan_memory
from rlcli.topology.report import make_plan

MIB = 1 << 20

# -- activations, exactly --------------------------------------------------------------------------------

SIZE = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 97, "num_key_value_heads": 2,
        "intermediate_size": 160, "head_dim": 16, "sliding_window": None}  # fmt: skip
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


def saved_bytes(model_type: str, layers: int, dtype: torch.dtype, lengths: tuple[int, ...]) -> int:
    """What autograd keeps of one forward pass, parameters left out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SIZE, **FAMILIES[model_type], "num_hidden_layers": layers}
    if model_type == "gpt2":
        settings = {key: value for key, value in settings.items() if key not in ("head_dim", "sliding_window")}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings, **ids)).eval()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tokens = torch.randint(3, 97, (sum(lengths),))
        PackedModel(model, dtype)(tokens, lengths, lambda output: output._hidden)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_block_saves_for_its_backward_pass(model_type, dtype):
    lengths = (64, 64, 64, 64)
    one, two = (saved_bytes(model_type, layers, dtype, lengths) for layers in (1, 2))
    settings = {**SIZE, **FAMILIES[model_type], "model_type": model_type, "num_hidden_layers": 2}
    if model_type == "gpt2":
        settings["n_inner"] = 256
    sizes = read_architecture(settings)
    width = 4 if dtype is torch.float32 else 2
    casts = 0 if width == 4 else 2 * sizes.cast // 2
    assert two - one == pytest.approx(sum(lengths) * saved_by_layer(sizes, sizes.layers[0], width) + casts, rel=0.02)


# -- peaks of a process ------------------------------------------------------------------------------------

CONFIG = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 6000,
          "max_position_embeddings": 2048, "tie_word_embeddings": True}  # fmt: skip
SHARDED = {**CONFIG, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
UPDATE = {"phase": "update", "backend": "fsdp", "count": 4, "length": 256}
INFERENCE = {"phase": "inference", "backend": "inference", "count": 4, "length": 256}
GENERATE = {"phase": "generate", "backend": "inference", "count": 8, "length": 160, "group": 4, "slots": 32, "new": 4}
RUNS = {
    ("float32", 1): [UPDATE, {**UPDATE, "micro_batches": 2}, {**UPDATE, "head": "value"},
                     {**UPDATE, "checkpointing": True}, INFERENCE, GENERATE],
    ("bfloat16", 1): [UPDATE, INFERENCE, {**INFERENCE, "head": "value"}, GENERATE],
    ("auto", 2): [{**UPDATE, "length": 128}, {**UPDATE, "length": 128, "micro_batches": 2},
                  {**INFERENCE, "backend": "fsdp", "length": 128}, {**GENERATE, "backend": "fsdp", "length": 32}],
}  # fmt: skip


def config_for(ranks: int) -> dict:
    """Enough parameters that those which are sharded count for more than the noise of two processes."""
    return CONFIG if ranks == 1 else SHARDED


def measured(asked: dict, ranks: int, meeting: Path) -> list[dict[str, int]]:
    """Of rank 0. Large tensors get pages of their own, which go back with them: a process is as large as they are."""
    environment = {
        **os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    script = Path(__file__).with_name("measured_peak.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), json.dumps(asked), str(rank), str(ranks), str(meeting)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, ended[0][1][-2000:]
    return json.loads(ended[0][0])


def estimated(run: dict, dtype: str, ranks: int) -> tuple[int, int]:
    """(held before, held at the peak), in bytes. The first inference or generation is not the one that is measured."""
    engine = EngineFootprint(
        read_architecture(config_for(ranks)), run.get("head", "lm"), run["backend"] == "fsdp", ranks,
        4 if dtype == "float32" else 2, run.get("checkpointing", False),
    )  # fmt: skip
    micro_batches = run.get("micro_batches", 1)
    tokens = run["count"] * run["length"] // micro_batches
    if run["phase"] == "update":
        held = engine.weights + engine.optimizer
        return held, held + engine.update(tokens, micro_batches).total
    held = engine.weights + engine.left_gathered
    if run["phase"] == "inference":
        return held, engine.weights + engine.inference(tokens).total
    added = engine.generate(run["slots"], run["length"], run["new"], run["count"]).total
    return held, held + added + engine.whole_copy


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux' /proc")
@pytest.mark.parametrize(("dtype", "ranks"), RUNS)
def test_peaks_are_within_the_error_that_is_stated(dtype, ranks, tmp_path):
    fastest = str(compute_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    if dtype == "bfloat16" != fastest:
        pytest.skip("this processor does not multiply bfloat16 natively: emulated, it takes minutes")
    runs, dtype = RUNS[dtype, ranks], fastest if dtype == "auto" else dtype
    results = measured({"config": config_for(ranks), "dtype": dtype, "runs": runs}, ranks, tmp_path / "meeting")
    assert len(results) == len(runs)
    for run, found in zip(runs, results, strict=True):
        held, most = estimated(run, dtype, ranks)
        really = held + found["peak"] - found["before"]
        assert most == pytest.approx(really, rel=ERROR_PERCENT / 100), (run, held / MIB, really / MIB)


def test_the_size_of_a_chunk_of_logits_is_the_one_in_use():
    assert footprint.CHUNK_ELEMENTS == CHUNK_ELEMENTS


# -- roles, ranks, phases -----------------------------------------------------------------------------------


def qwen(head: str = "lm", **changes) -> EngineFootprint:
    config = {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
              "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
    settings = {"trained": True, "ranks": 1, "width": 2, **changes}
    return EngineFootprint(read_architecture(config), head, **settings)


def test_sharding_divides_weights_and_optimizer_and_costs_a_whole_copy_to_generate():
    one, eight = qwen(), qwen(ranks=8)
    assert one.parameters == 494032768
    assert (one.weights, one.optimizer, one.whole_copy) == (4 * one.parameters, 8 * one.parameters, 0)
    assert (eight.weights, eight.optimizer) == (one.weights // 8, one.optimizer // 8)
    assert eight.whole_copy == 4 * one.parameters
    assert (one.left_gathered, eight.left_gathered) == (0, 4 * (151936 * 896 + 896))
    inference = qwen(trained=False, ranks=8)
    assert (inference.weights, inference.optimizer) == (one.weights, 0)


def test_more_tokens_slots_and_longer_sequences_take_more_and_checkpointing_less():
    engine = qwen()
    assert engine.update(8192, 1).total < engine.update(16384, 1).total
    assert engine.update(8192, 1).total < engine.update(8192, 2).total
    assert qwen(checkpointing=True).update(8192, 1).total < engine.update(8192, 1).total
    assert engine.generate(64, 512, 512, 16).cache == 2 * engine.generate(32, 512, 512, 16).cache
    assert engine.generate(64, 512, 512, 16).cache == 64 * 1024 * 24 * 128 * (4 + 2)
    assert qwen("value").update(8192, 1).logits < engine.update(8192, 1).logits


def test_the_budget_of_the_kv_cache_bounds_what_is_planned():
    def cache(*overrides):
        peaks = make_plan(load_recipe("ppo_math", list(overrides))).memory.peaks
        return next(peak.parts.cache for peak in peaks if peak.phase == "generate")

    longest = make_plan(load_recipe("ppo_math")).memory.lengths.sequence
    setting = f"models.actor.backend.args.kv_cache_tokens={4 * longest + 1}"
    assert cache(setting) == cache("generation.max_concurrent_responses=4") < cache()


def test_every_call_is_estimated_on_top_of_all_roles_of_its_devices():
    plan = make_plan(load_recipe("ppo_math"))
    held = {one.role: one for one in plan.memory.held}
    assert {role: one.parameters for role, one in held.items()} == {"actor": 1098368, "critic": 1098497, "ref": 1098368}
    assert held["ref"].optimizer == 0
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


def test_an_unknown_role_is_named_and_the_others_are_counted():
    plan = make_plan(load_recipe("ppo_math", ["models.ref={_replace_: true, path: nobody/nothing}"]))
    assert list(plan.memory.unknown) == ["ref"]
    assert {peak.role for peak in plan.memory.peaks} == {"actor", "critic"}
    assert plan.storage.checkpoint == 12 * (1098368 + 1098497)


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
