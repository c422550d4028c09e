"""Memory models, compared with what the backward pass really saves and with the memory of a real
process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from estimated_peak import MODELS, estimated, memory

from rlcli.api.memory import Generation, UnknownMemory
from rlcli.backends import _memory
from rlcli.backends._memory import saved_by_layer
from rlcli.backends._transformers import PackedModel
from rlcli.inspect.processor import NATIVE_BFLOAT16, cpu_flags
from rlcli.ops.logprobs import CHUNK_ELEMENTS
from rlcli.topology.architecture import read_architecture

MIB = 1 << 20

# -- activations, exactly --------------------------------------------------------------------------

SIZE = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "head_dim": 16,
    "sliding_window": None,
}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


def saved_bytes(model_type: str, layers: int, dtype: torch.dtype, lengths: tuple[int, ...]) -> int:
    """Bytes that autograd saves in one forward pass, without parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**SIZE, **FAMILIES[model_type], "num_hidden_layers": layers}
    if model_type == "gpt2":
        settings = {
            key: value
            for key, value in settings.items()
            if key not in ("head_dim", "sliding_window")
        }
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **settings, **ids)
    ).eval()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tokens = torch.randint(3, 97, (sum(lengths),))
        PackedModel(model, dtype)(tokens, lengths, lambda output: output._hidden)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_bytes_that_a_block_saves_for_its_backward_pass(model_type, dtype):
    lengths = (64, 64, 64, 64)
    one_layer, two_layers = (saved_bytes(model_type, layers, dtype, lengths) for layers in (1, 2))
    settings = {**SIZE, **FAMILIES[model_type], "model_type": model_type, "num_hidden_layers": 2}
    if model_type == "gpt2":
        settings["n_inner"] = 256
    sizes = read_architecture(settings)
    width = 4 if dtype is torch.float32 else 2
    casts = 0 if width == 4 else 2 * sizes.cast // 2
    in_attention = width if "amx_tile" in cpu_flags() else 4
    assert two_layers - one_layer == pytest.approx(
        sum(lengths) * saved_by_layer(sizes, sizes.layers[0], width, in_attention) + casts, rel=0.02
    )


# -- peaks of a process ----------------------------------------------------------------------------

CONFIG = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 768,
          "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
          "head_dim": 64, "vocab_size": 6000, "max_position_embeddings": 2048,
          "tie_word_embeddings": True}  # fmt: skip
SHARDED = {**CONFIG, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
UPDATE = {"phase": "update", "backend": "fsdp", "count": 4, "length": 128}
CHECKPOINTING = {"args": {"gradient_checkpointing": True}}
SELECTIVE = {"args": {"gradient_checkpointing": True, "recompute": "selective"}}
MUON = {"args": {"optimizer": "muon"}}
INFERENCE = {"phase": "inference", "backend": "inference", "count": 4, "length": 256}
GENERATE = {
    "phase": "generate",
    "backend": "inference",
    "count": 8,
    "length": 160,
    "group": 4,
    "slots": 32,
    "new": 8,
}
RUNS = {
    ("float32", "dp", 1): [
        UPDATE,
        {**UPDATE, "micro_batches": 2},
        {**UPDATE, "head": "value"},
        {**UPDATE, **CHECKPOINTING},
        {**UPDATE, **SELECTIVE},
        {**UPDATE, **MUON, "length": 32},
        INFERENCE,
        GENERATE,
    ],
    ("bfloat16", "dp", 1): [
        UPDATE,
        {**UPDATE, **SELECTIVE},
        INFERENCE,
        {**INFERENCE, "head": "value"},
        GENERATE,
    ],
    ("auto", "dp", 2): [
        {**UPDATE, "length": 64},
        {**UPDATE, "length": 64, "micro_batches": 2},
        {**UPDATE, **MUON, "length": 16},
        {**INFERENCE, "backend": "fsdp", "length": 192},
        {**GENERATE, "backend": "fsdp", "length": 32},
    ],
    ("auto", "tp", 2): [
        {**UPDATE, "length": 64},
        {**UPDATE, "length": 64, **CHECKPOINTING},
        {**INFERENCE, "backend": "fsdp", "length": 128},
        {**GENERATE, "backend": "fsdp", "length": 96},
    ],
    ("auto", "cp", 2): [
        {**UPDATE, "length": 192, "args": {"context_parallel": "ulysses"}},
        {**UPDATE, "length": 192, "args": {"context_parallel": "ring"}},
        {**INFERENCE, "args": {"context_parallel": "ring"}},
        GENERATE,
    ],
}
FASTEST = "bfloat16" if cpu_flags() & NATIVE_BFLOAT16 else "float32"


def config_for(ranks: int) -> dict:
    """Enough parameters that those which are sharded count for more than the noise of two
    processes."""
    return CONFIG if ranks == 1 else SHARDED


@pytest.fixture(scope="module")
def measured():
    """The peaks of the runs of each layout on rank 0. Large tensors get separate pages that are
    returned with them, so that the size of the process is theirs."""
    environment = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    asked = {
        (dtype, dimension, ranks): {
            "config": config_for(ranks),
            "dtype": FASTEST if dtype == "auto" else dtype,
            "dimension": dimension,
            "ranks": ranks,
            "runs": runs,
        }
        for (dtype, dimension, ranks), runs in RUNS.items()
        if dtype != "bfloat16" or dtype == FASTEST
    }
    script = [
        sys.executable,
        str(Path(__file__).with_name("measured_peak.py")),
        json.dumps([*asked.values()]),
    ]
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return dict(zip(asked, json.loads(ended.stdout), strict=True))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux' /proc"
)
@pytest.mark.parametrize(("dtype", "dimension", "ranks"), RUNS)
def test_estimated_peaks_are_within_the_stated_error(dtype, dimension, ranks, measured):
    if (dtype, dimension, ranks) not in measured:
        pytest.skip(
            "this processor does not multiply bfloat16 natively: emulated, it takes minutes"
        )
    runs, results = RUNS[dtype, dimension, ranks], measured[dtype, dimension, ranks]
    for run, result in zip(runs, results, strict=True):
        used = FASTEST if dtype == "auto" else dtype
        before, estimate = estimated(run, config_for(ranks), used, dimension, ranks)
        peak = before + result["peak"] - result["before"]
        within = MODELS[run["backend"]].WITHIN_PERCENT / 100
        assert estimate == pytest.approx(peak, rel=within), (run, before / MIB, peak / MIB)


def test_the_estimate_uses_the_real_size_of_logit_chunks():
    assert _memory.CHUNK_ELEMENTS == CHUNK_ELEMENTS


MEASURED = {
    (0, ()): (284, 1393, 1108, 1692),
    (1, ()): (599, 911, 876, 1182),
    (1, ("optimizer",)): (770, 1343, 1324, 1630),
    (2, ()): (599, 886, 876, 1182),
    (2, ("optimizer",)): (770, 1325, 1323, 1626),
    (3, ()): (493, 987, 913, 1063),
    (3, ("optimizer",)): (630, 1259, 1190, 1339),
    (3, ("optimizer", "parameters")): (632, 1264, 1191, 1339),
}
"""What `tests/bench/memory.py --ranks 2 --megabytes 256 --zero-stage … --offload …` measured on the
fullest rank, in MiB, while loading, training, generating and writing a checkpoint."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "offload"), MEASURED)
def test_estimates_for_zero_match_the_measured_memory_of_two_ranks(stage, offload, monkeypatch):
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "vocab_size": 4096,
        "tie_word_embeddings": False,
    }
    calls = ("train_step", "inference", "generate")
    monkeypatch.setattr("rlcli.backends._deepspeed_memory.BUCKET", 1 << 23)  # as there
    settings = {
        "dtype": "float32",
        "zero_stage": stage,
        **{f"offload_{state}": True for state in offload},
    }
    model = memory("deepspeed", config, calls=calls, dp=2, **settings)
    resident = model.resident()
    planned = (
        resident.weights + resident.buffers + model.load().total,
        resident.total + model.update(32, 1).total,
        resident.total + model.generate(Generation(2, 1, 16, 8, 2)).total,
        resident.total + model.snapshot(),
    )
    assert [size / MIB for size in planned] == pytest.approx(MEASURED[stage, offload], rel=0.15)


# -- ranks, phases ---------------------------------------------------------------------------------


QWEN = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def qwen(head: str = "lm", dp: int = 1, backend: str = "fsdp", **arguments):
    return memory(backend, QWEN, head, ("train_step", "inference", "generate"), dp=dp, **arguments)


def generating(slots: int, **changes) -> Generation:
    return Generation(
        **{
            "prompts": slots,
            "responses": 1,
            "prompt_tokens": 512,
            "new_tokens": 512,
            "at_once": slots,
        }
        | changes
    )


def test_sharding_divides_weights_and_optimizer_but_gathers_to_generate():
    single, sharded = qwen().resident(), qwen(dp=8).resident()
    weights = 4 * 494032768
    assert (single.weights, single.optimizer) == (weights, 2 * weights)
    assert (sharded.weights, sharded.optimizer) == (weights // 8, 2 * weights // 8)
    linear = 494032768 - 151936 * 896
    copy = qwen(dp=8, dtype="float32").generate(generating(1)).gathered
    assert copy == weights
    halved = qwen(dp=8).generate(generating(1)).gathered - 2 * 151936 * 896  # the tied head's cast
    assert weights - 2 * linear == pytest.approx(halved, rel=0.001)  # less norms and biases
    inference = qwen(backend="inference", dp=8).resident()
    assert (inference.weights, inference.optimizer) == (weights, 0)


def test_packed_weights_are_a_second_copy_unless_a_call_makes_one_anyway():
    head, embedded = 151936 * 896, 494032768 - 151936 * 896

    def extra(**arguments):
        model = qwen(dtype="float32", **arguments)
        several, single = generating(2), generating(1)
        return model.generate(several).gathered - model.generate(single).gathered

    assert extra() == pytest.approx(4 * (head + embedded), rel=0.001)  # less norms and biases
    assert extra(dp=2) == 4 * head
    assert extra(tp=2) == extra(device="cuda") == 0


def test_muon_keeps_one_moment_of_the_matrices_of_blocks_and_needs_room_for_the_largest():
    resident = qwen(optimizer="muon").resident()
    outside = 151936 * 896 + 24 * 2 * 896 + 896  # embedding and norms
    assert resident.optimizer == 4 * (494032768 + outside)
    assert resident.weights == qwen().resident().weights
    sharded = qwen(dp=8, optimizer="muon", dtype="float32")
    assert sharded.in_iterations() == 896 * 4864 * 24


def test_memory_grows_with_tokens_and_slots():
    model = qwen()
    assert model.update(8192, 1).total < model.update(16384, 1).total
    assert model.update(8192, 1).total < model.update(8192, 2).total
    assert model.generate(generating(64)).cache == 2 * model.generate(generating(32)).cache
    assert model.generate(generating(64)).cache == 64 * 1024 * 24 * 128 * (2 + 2)
    assert qwen("value").update(8192, 1).logits < model.update(8192, 1).logits


def test_memory_shrinks_with_recomputation_and_with_inputs_in_host_memory():
    recomputed = [
        qwen(device="cuda", gradient_checkpointing=True, **settings).update(1 << 17, 1).total
        for settings in ({"recompute": "selective"}, {}, {"offload_activations": True})
    ]
    totals = [qwen(device="cuda").update(1 << 17, 1).total, *recomputed]
    assert totals == sorted(totals, reverse=True)
    assert len({*totals}) == 4


def test_the_cache_is_limited_by_its_budget():
    assert qwen(kv_cache_tokens=33 * 1024 - 1).generate(generating(64)) == qwen().generate(
        generating(32, prompts=64)
    )
    assert qwen(kv_cache_tokens=1 << 20).generate(generating(64)) == qwen().generate(generating(64))


def test_tensor_parallel_ranks_share_weights_and_cache():
    single, tensor_parallel, both = (
        qwen().resident(),
        qwen(tp=2).resident(),
        qwen(tp=2, dp=4).resident(),
    )
    # norms and biases of rows are whole
    assert tensor_parallel.weights == pytest.approx(single.weights / 2, rel=0.001)
    assert both.weights == tensor_parallel.weights // 4
    assert qwen(tp=2).generate(generating(64)).cache == qwen().generate(generating(64)).cache / 2
    assert qwen(tp=2).generate(generating(64)).logits == qwen().generate(generating(64)).logits
    assert qwen(tp=2).update(8192, 1).total < 0.7 * qwen().update(8192, 1).total
    assert qwen(backend="inference", tp=2).resident().weights == tensor_parallel.weights


def test_context_parallel_ranks_share_tokens_prompts_and_the_sharded_model():
    halved, context_parallel = qwen(dp=2), qwen(cp=2)
    assert context_parallel.resident() == halved.resident()
    exchanged = context_parallel.exchanged(8192)
    assert context_parallel.update(8192, 1) == halved.update(4096, 1)  # the peak is at the head
    in_block = qwen("value", dp=2).inference(4096).activations
    assert qwen("value", cp=2).inference(8192).activations == in_block + exchanged
    assert 0 < exchanged < in_block
    assert context_parallel.generate(generating(64)).cache == halved.generate(generating(32)).cache
    assert qwen(cp=2, dp=4, shard_size=2).resident() == qwen(dp=2).resident()
    alone = qwen(backend="inference").resident()
    assert qwen(backend="inference", cp=2).resident() == alone


def test_context_parallel_ranks_send_heads_or_keys_and_values():
    """For 14 heads of 64 numbers in 16 bits, of which 2 are key heads, and 2048 slots; a ring also
    returns gradients in 32 bits."""
    layers, vector = len(memory("fsdp", QWEN).sizes.layers), 64 * 2048
    expected = {
        "all-to-all": ("ulysses", 2 * 2 * vector * (14 + 2)),
        "ring": ("ring", 2 * 2 * vector * 2 * 2 + 2 * 4 * vector * 2 * 2),
    }
    for kind, (method, count) in expected.items():
        model = memory("fsdp", QWEN, cp=2, context_parallel=method)
        assert model.sent(4096, 3)[kind] == 3 * layers * count
    assert "ring" in memory("fsdp", QWEN, cp=4).sent(4096, 1)  # 4 does not divide 14 heads
    assert memory("fsdp", QWEN).sent(4096, 1) == {}


MIXTURE = {"model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1024,
           "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
           "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000}  # fmt: skip


def mixture(ep: int, **arguments):
    return memory("fsdp", MIXTURE, "lm", ("train_step",), dp=4, ep=ep, **arguments)


def test_experts_over_ranks_are_gathered_in_part_and_exchange_tokens():
    """What is kept does not change: experts are sharded over all ranks either way."""
    undivided, divided = mixture(ep=1), mixture(ep=4)
    assert divided.resident() == undivided.resident()
    experts = 4 * 8 * 3 * 512 * 1024
    gathered = undivided.gathered_in_block() - divided.gathered_in_block()
    assert gathered == 2 * experts * 3 // 4  # two blocks at once
    assert "all-to-all" not in undivided.sent(100, 1)
    # 4 layers, 2 experts, there and back, in 2 passes, 3 of 4 to other ranks, 512 numbers
    assert divided.sent(100, 1)["all-to-all"] == 100 * 4 * 2 * 2 * 2 * 3 * 512
    recomputed = mixture(ep=4, gradient_checkpointing=True)
    assert recomputed.sent(100, 1)["all-to-all"] == 100 * 4 * 2 * 2 * 3 * 3 * 512


def test_messages_of_many_micro_batches_are_multiplied_instead_of_added_up():
    model, many = memory("fsdp", QWEN, "lm", ("train_step",), tp=2), 10**12
    single, double = (model.sent(100, count)["all-reduce"] for count in (1, 2))
    assert model.sent(100, many)["all-reduce"] == single + (many - 1) * (double - single)


def test_replicas_and_deferred_reductions_need_more_memory():
    sharded, hybrid = qwen(dp=8), qwen(dp=8, shard_size=2)
    assert (
        hybrid.resident().weights == qwen(dp=2).resident().weights == 4 * sharded.resident().weights
    )
    assert qwen(dp=2, shard_size=2).resident() == qwen(dp=2).resident()
    deferred = qwen(dp=8, defer_reduction=True)
    assert deferred.update(8192, 1) == sharded.update(8192, 1)
    difference = deferred.update(8192, 2).gradients - sharded.update(8192, 2).gradients
    assert difference == pytest.approx(4 * 494032768 * 7 / 8, rel=0.001)


# -- stages of ZeRO --------------------------------------------------------------------------------

WHOLE = 4 * 494032768
BUCKET = 4 * 151936 * 896
"""Bytes of the largest parameter, which is more than the 256 MiB that a bucket has at least."""


def zero(stage: int, device: str = "cuda", **arguments):
    return qwen(backend="deepspeed", dp=4, device=device, zero_stage=stage, **arguments)


def test_memory_between_calls_by_stage_of_zero():
    resident = [zero(stage).resident() for stage in range(4)]
    assert [one.weights for one in resident] == [WHOLE, WHOLE, WHOLE, WHOLE // 4]
    assert [one.optimizer for one in resident] == [2 * WHOLE, WHOLE // 2, WHOLE // 2, WHOLE // 2]
    # this rank's gradients, and a bucket
    assert [one.buffers for one in resident] == [0, 0, 0, WHOLE // 4 + BUCKET]
    assert qwen(backend="deepspeed", dp=4, zero_stage=2).resident() == zero(2, "cpu").resident()
    alone = memory("deepspeed", QWEN, calls=("inference",), zero_stage=1)
    assert alone.resident().optimizer == 0


def test_memory_of_gradients_by_stage_of_zero():
    at_end = [zero(stage).gradients(several=False)[2] for stage in range(4)]
    assert at_end[0] == 2 * WHOLE  # laid end to end to be reduced
    assert at_end[1] == WHOLE + BUCKET + WHOLE // 4
    assert at_end[2] == WHOLE // 4 + 2 * BUCKET
    # of earlier micro-batches
    before = [zero(stage).gradients(several=True)[0] for stage in range(4)]
    assert before == [WHOLE, WHOLE, WHOLE // 4, 0]
    for stage in range(3):
        assert (
            zero(stage).update(8192, 2).total - zero(stage).update(8192, 1).total == before[stage]
        )


def test_stage_3_gathers_two_buckets_and_a_full_copy_to_generate():
    assert [zero(stage, dtype="float32").update(8192, 1).gathered for stage in (0, 3)] == [
        0,
        4 * BUCKET,
    ]
    # autocast keeps what it made
    assert zero(3).update(8192, 1).gathered == 4 * BUCKET + 2 * zero(3).sizes.cast
    assert zero(3, dtype="float32").generate(generating(1)).gathered == WHOLE
    assert zero(2).generate(generating(1)) == qwen().generate(generating(1))
    assert (
        memory("deepspeed", QWEN, zero_stage=3, dtype="float32").update(8192, 1).gathered == 0
    )  # one rank has everything


def test_offloading_frees_the_memory_of_a_separate_device():
    assert zero(2, offload_optimizer=True).resident().optimizer == 0
    # through which gradients go to the host
    assert zero(2, offload_optimizer=True).resident().buffers == BUCKET
    away = zero(3, offload_optimizer=True, offload_parameters=True).resident()
    assert (away.weights, away.optimizer, away.buffers) == (0, 0, BUCKET)
    here = zero(2, "cpu", offload_optimizer=True).resident()  # copies in the same memory
    assert here.total > zero(2, "cpu").resident().total + 2 * (WHOLE // 4)


def test_an_unsupported_mesh_is_not_estimated():
    with pytest.raises(UnknownMemory, match="pp2"):
        qwen(dp=2, pp=2)
