"""Generation: the budget of the KV cache bounds what is held and changes no response; weights are cast once a call."""

import gc
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlcli.backends import _generation
from rlcli.errors import ModelError, UsageError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import prompts
from rlcli.testing.backend.generation import NEW_TOKENS, generate
from rlcli.testing.ranks import mesh_of_ranks, run_on_ranks
from rlcli.testing.tiny_models import tiny_model


@pytest.fixture
def held(monkeypatch):
    """Tokens of the largest KV cache that was made, as its tensors have them."""
    most = [0]

    class Watched(_generation.SlotCache):
        def update(self, *args, **kwargs):
            seen = super().update(*args, **kwargs)
            slots, _, length, _ = self.keys[0].shape
            most[0] = max(most[0], slots * length)
            return seen

    monkeypatch.setattr(_generation, "SlotCache", Watched)
    return most


def engine(backend, **args):
    contract = type("Contract", (BackendContract,), {"name": backend, "families": ("llama",)})
    return contract().engine(**args)


@pytest.mark.parametrize("backend", ["inference", "fsdp"])
def test_responses_do_not_depend_on_the_room_of_the_cache(backend, held):
    longest = max(length for (length,) in prompts().seqlens["packed_prompts"]) + NEW_TOKENS
    wanted = generate(engine(backend), responses_per_prompt=3)
    count = len(wanted.tokens)
    assert held == [count * longest]
    for room, slots in {longest: 1, 3 * longest - 1: 2, 4 * longest: 4, 100 * count * longest: count}.items():
        held[0] = 0
        found = generate(engine(backend, kv_cache_tokens=room), responses_per_prompt=3)
        assert held[0] == slots * longest <= room
        assert all(map(torch.equal, found.tokens, wanted.tokens))
        torch.testing.assert_close(torch.cat(found.logprobs), torch.cat(wanted.logprobs))
        assert torch.equal(found.ended, wanted.ended)


def test_a_cache_without_room_for_one_response_is_refused():
    longest = max(length for (length,) in prompts().seqlens["packed_prompts"]) + NEW_TOKENS
    with pytest.raises(ModelError, match=f"{longest} tokens; its KV cache has room for {longest - 1}") as caught:
        generate(engine("inference", kv_cache_tokens=longest - 1))
    assert "models.actor.backend.args.kv_cache_tokens" in caught.value.hint
    with pytest.raises(UsageError, match="kv_cache_tokens"):
        engine("inference", kv_cache_tokens=0)


class Casts(TorchDispatchMode):
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


def narrow_weights():
    gc.collect()
    return sum(type(one) is torch.nn.Parameter and one.dtype is torch.bfloat16 for one in gc.get_objects())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("backend", "degrees"), [("inference", {}), ("fsdp", {}), ("inference", {"tp": 2}),
                                                  ("fsdp", {"tp": 2})])  # fmt: skip
def test_weights_are_cast_once_per_call(backend, degrees, tied):
    """Those of products, the head's among them; norms are not, nor is an embedding that is nothing else, nor what
    `inference` holds in bfloat16. Afterwards the casts are gone."""

    def work(rank):
        lm = tiny_model("llama", tie_word_embeddings=tied)
        made = engine(backend, lm=lm, mesh=mesh_of_ranks(**degrees), dtype="bfloat16")
        before = narrow_weights()
        with Casts(made.lm) as casts:
            answers = generate(made, greedy=True)
        assert max(map(len, answers.tokens)) > 2
        return {"casts": casts.count, "left": narrow_weights() - before}

    ranks = run_on_ranks(math.prod(degrees.values()), work)
    for rank in ranks:
        assert rank["left"] == 0
        for name, count in rank["casts"].items():
            is_cast = tied if "embed" in name else "norm" not in name and backend == "fsdp"
            assert count == int(is_cast), name
