"""The KV cache: its budget bounds what is held, and changes no response."""

import pytest
import torch

from rlcli.backends import _generation
from rlcli.errors import ModelError, UsageError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import prompts
from rlcli.testing.backend.generation import NEW_TOKENS, generate


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
