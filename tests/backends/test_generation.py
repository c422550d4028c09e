"""Generation: the budget of the KV cache bounds its size without changing responses; weights are
cast once per call."""

import gc
import math

import pytest
import torch
from heard_work import heard_work
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlcli.api.headway import Count
from rlcli.backends import _generation
from rlcli.errors import ModelError, UsageError
from rlcli.ops.packed_product import can_pack
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.generation import NEW_TOKENS, generate
from rlcli.testing.backend.plain import exact, greedy_answers
from rlcli.testing.backend.samples import prompts
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import END, VOCABULARY, tiny_model


@pytest.fixture
def largest_cache(monkeypatch):
    """The size in tokens of the largest KV cache that was allocated."""
    most = [0]

    class Watched(_generation.SlotCache):
        def update(self, *args, **kwargs):
            result = super().update(*args, **kwargs)
            slots, _, length, _ = self.keys[0].shape
            most[0] = max(most[0], slots * length)
            return result

    monkeypatch.setattr(_generation, "SlotCache", Watched)
    return most


def engine(backend, **args):
    contract = type("Contract", (BackendContract,), {"name": backend, "families": ("llama",)})
    return contract().engine(**args)


@pytest.mark.parametrize("backend", ["inference", "fsdp"])
def test_responses_do_not_depend_on_the_size_of_the_cache(backend, largest_cache):
    longest = max(length for (length,) in prompts().seqlens["packed_prompts"]) + NEW_TOKENS
    expected = generate(engine(backend), responses_per_prompt=3)
    count = len(expected.tokens)
    assert largest_cache == [count * longest]
    for room, slots in {
        longest: 1,
        3 * longest - 1: 2,
        4 * longest: 4,
        100 * count * longest: count,
    }.items():
        largest_cache[0] = 0
        actual = generate(engine(backend, kv_cache_tokens=room), responses_per_prompt=3)
        assert largest_cache[0] == slots * longest <= room
        assert all(map(torch.equal, actual.tokens, expected.tokens))
        torch.testing.assert_close(torch.cat(actual.logprobs), torch.cat(expected.logprobs))
        assert torch.equal(actual.ended, expected.ended)


def test_responses_that_are_over_are_counted():
    with heard_work() as heard:
        count = len(generate(engine("inference"), responses_per_prompt=3).tokens)
    assert heard.counts[-1] == Count(count, count, "responses")


def test_a_cache_without_room_for_one_response_is_refused():
    longest = max(length for (length,) in prompts().seqlens["packed_prompts"]) + NEW_TOKENS
    with pytest.raises(
        ModelError, match=f"{longest} tokens; its KV cache has room for {longest - 1}"
    ) as caught:
        generate(engine("inference", kv_cache_tokens=longest - 1))
    assert "models.actor.backend.args.kv_cache_tokens" in caught.value.hint
    with pytest.raises(UsageError, match="kv_cache_tokens"):
        engine("inference", kv_cache_tokens=0)


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24,
         "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1,
         "eos_token_id": END}  # fmt: skip
UNUSUAL = {
    "phimoe": {"num_hidden_layers": 2, "num_local_experts": 4},
    "gemma4_text": {"num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16,
                    "layer_types": ["sliding_attention", "full_attention"] * 2,
                    "sliding_window": 4, "num_kv_shared_layers": 2,
                    "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
}  # fmt: skip
"""One has routers that are linear layers with a forward pass of their own; the other has layers of
several sizes, some of which take the keys of others."""


@pytest.mark.parametrize("family", UNUSUAL)
def test_unusual_layers_give_the_answers_of_transformers(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **UNUSUAL[family])
    lm = AutoModelForCausalLM.from_config(config).eval()
    actual = generate(engine("fsdp", lm=lm, dtype="float32"), greedy=True)
    expected = greedy_answers(exact(lm), prompts(), NEW_TOKENS)
    assert [tokens.tolist() for tokens in actual.tokens] == expected


class CastCounter(TorchDispatchMode):
    """Counts how often each parameter is cast to bfloat16."""

    def __init__(self, lm):
        self.names = {_memory(parameter): name for name, parameter in lm.named_parameters()}
        self.count = dict.fromkeys(self.names.values(), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is torch.bfloat16:
            name = self.names.get(_memory(args[0]))
            if name is not None:
                self.count[name] += 1
        return func(*args, **(kwargs or {}))


def _memory(tensor):
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


def count_bfloat16_weights():
    gc.collect()
    return sum(
        type(one) is torch.nn.Parameter and one.dtype is torch.bfloat16 for one in gc.get_objects()
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("backend", "degrees"),
    [("inference", {}), ("fsdp", {}), ("inference", {"tp": 2}), ("fsdp", {"tp": 2})],
)
def test_weights_are_cast_once_per_call(backend, degrees, tied):
    """Weights of matrix products, including the head. Norms and untied embeddings are not cast, nor
    are weights that `inference` stores in bfloat16. The casts are freed afterwards."""

    def work(rank):
        lm = tiny_model("llama", tie_word_embeddings=tied)
        built = engine(backend, lm=lm, mesh=mesh_of_ranks(**degrees), dtype="bfloat16")
        before = count_bfloat16_weights()
        with CastCounter(built.lm) as casts:
            answers = generate(built, greedy=True)
        assert max(map(len, answers.tokens)) > 2
        return {"casts": casts.count, "left": count_bfloat16_weights() - before}

    ranks = run_on_ranks(math.prod(degrees.values()), work)
    for rank in ranks:
        assert rank["left"] == 0
        for name, count in rank["casts"].items():
            is_cast = tied if "embed" in name else "norm" not in name and backend == "fsdp"
            assert count == int(is_cast), name


class PackingCounter(TorchDispatchMode):
    """Counts the weights that are packed, and the products with them."""

    count = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.mkldnn._reorder_linear_weight.default
        self.products += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


def matrices_of_llama(lm):
    """Queries, keys and values of a layer count as one, and so do gate and up."""
    return 4 * lm.config.num_hidden_layers + 1


def test_matrices_are_packed_once_per_call_if_it_has_several_responses():
    """As the plan counts them; they are freed afterwards."""
    lm = tiny_model("llama", tie_word_embeddings=True)
    built = engine("fsdp", lm=lm, dtype="float32")
    for count, options in {
        matrices_of_llama(lm): {"responses_per_prompt": 2},
        0: {"responses_per_prompt": 2, "max_new_tokens": 7},
    }.items():
        with PackingCounter() as packing:
            generate(built, **options)
        assert packing.count == count
    with PackingCounter() as packing:
        generate(built, prompts().select_indices([0]), [1], max_new_tokens=32)
    assert packing.count == 0
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.nn.Parameter]
    assert not any(tensor.is_mkldnn for tensor in tensors)


@pytest.mark.parametrize(("new_tokens", "share"), [(31, 0), (32, 1)])
def test_matrices_in_16_bits_are_packed_for_a_single_response_unless_it_is_short(new_tokens, share):
    if not can_pack(torch.device("cpu"), torch.bfloat16):
        pytest.skip("this processor has no products in bfloat16")
    built = engine("fsdp", lm=tiny_model("llama"), dtype="bfloat16")
    with PackingCounter() as packing:
        generate(built, prompts().select_indices([0]), [1], max_new_tokens=new_tokens)
    assert packing.count == share * matrices_of_llama(built.lm)


@pytest.mark.parametrize(
    ("family", "matrices_of_layer"),
    [("llama", 4), ("qwen2", 4), ("qwen3", 4), ("gemma2", 4), ("olmo2", 6), ("gpt_neox", 4)],
)
def test_layers_that_multiply_the_same_input_take_one_product(family, matrices_of_layer):
    """Queries, keys and values, and gate and up, where the plan of the family says so; GPT-NeoX
    comes with such matrices."""
    lm = tiny_model(family)
    built = engine("inference", lm=lm, dtype="float32")
    with PackingCounter() as packing:
        packed = generate(built, responses_per_prompt=2, max_new_tokens=8)
    assert packing.count == matrices_of_layer * lm.config.num_hidden_layers + 1
    assert packing.products == packing.count * max(map(len, packed.tokens))
    stored = generate(built, responses_per_prompt=2, max_new_tokens=7)
    assert [row[:7].tolist() for row in packed.tokens] == [row.tolist() for row in stored.tokens]
    scores = torch.cat([row[:7] for row in packed.logprobs])
    torch.testing.assert_close(scores, torch.cat(stored.logprobs), atol=1e-5, rtol=0)


def test_a_loss_can_be_computed_with_the_logprobs_of_responses():
    responses = generate(engine("inference"), responses_per_prompt=3, max_concurrent_responses=2)
    weight = torch.ones((), requires_grad=True)
    (weight * torch.cat(responses.logprobs)).sum().backward()
    torch.testing.assert_close(weight.grad, torch.cat(responses.logprobs).sum())
