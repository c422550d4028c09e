"""The contract of generation against SGLang itself, on the CPU: `make test-servers`.

Two servers are started once, as the backend starts its own;
each check then attaches to one of them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from dataclasses import replace

import pytest
import torch
from real_servers import follow, servers_of, small_servers
from safetensors import safe_open
from server_contract import AttachedContract, ServerContract, expected_server, listed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast

from rlcli.backends._server_attach import check_model
from rlcli.errors import ModelError
from rlcli.testing import tiny_models
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.plain import sequences
from rlcli.testing.backend.routing_replay import chosen_by
from rlcli.testing.backend.samples import prompts
from rlcli.testing.tiny_models import tiny_model

BACKEND = "sglang"
PYTHON = os.environ.get("RLCLI_SGLANG_PYTHON")
pytestmark = [
    pytest.mark.skipif(
        PYTHON is None, reason="needs an environment with SGLang: make test-servers"
    ),
    pytest.mark.timeout(1200),
]

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PADDED_TO = 64
"""SGLang pads its matrices of the vocabulary to a multiple of this many rows."""


def weights_in_sglang(lm):
    """Name → weight, as SGLang joins and pads llama's weights before it computes their digests."""
    weights = {name: weight.detach() for name, weight in lm.named_parameters()}
    joined = {}
    for name, weight in weights.items():
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        fused = next((fused for fused, sources in FUSED.items() if kind in sources), kind)
        sources = (
            [weights[f"{prefix}.{source}.weight"] for source in FUSED[fused]]
            if fused in FUSED
            else [weight]
        )
        rows = -len(weight) % PADDED_TO if kind in ("embed_tokens", "lm_head") else 0
        name_there = ".".join(filter(None, (prefix, fused, "weight")))
        joined[name_there] = pad(torch.cat(sources), (0, 0) * (weight.ndim - 1) + (0, rows))
    return joined


def checksums(server):
    answer = server.endpoint.post("/weights_checker", {"action": "checksum"}, 120)
    return answer["ranks"][0]["checksums"]


class TestContract(AttachedContract):
    name = BACKEND
    mixtures = ()  # the servers were started with a llama
    ways = itertools.cycle(("process_group", "process_group", "disk", "disk"))

    def further_args(self):
        return {"update": next(self.ways)}


class TestServers(ServerContract):
    backend = BACKEND

    def test_two_servers_hold_the_last_weights_after_several_updates(self, ours):
        super().test_two_servers_hold_the_last_weights_after_several_updates(ours)
        for server in servers_of(ours):
            require_digests(server, tiny_model("llama", seed=7))

    def test_a_seed_gives_the_same_response_again(self, ours):
        """With enable_deterministic_inference at any concurrency."""
        super().test_a_seed_gives_the_same_response_again(ours)
        settings = {"responses_per_prompt": 4, "max_new_tokens": 20}
        one_by_one = generate(ours, max_concurrent_responses=1, **settings)
        assert listed(one_by_one) == listed(generate(ours, **settings))


def require_digests(server, lm):
    """The weights on a server are those of a model, by the digests that it computes."""
    digests = digests_of(lm)
    digests_there = checksums(server)
    assert {name: digests_there.get(name) for name in digests} == digests


def digests_of(lm):
    """Name → digest of a weight, as SGLang computes it."""
    return {
        name: hashlib.sha256(weight.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[
            :16
        ]
        for name, weight in weights_in_sglang(lm).items()
    }


def test_a_server_in_bfloat16_receives_and_holds_bfloat16(tmp_path, tokenizer):
    with small_servers(tmp_path, 1, BACKEND, tokenizer[0], dtype="bfloat16") as engine:
        follow(engine, 5)
        (file,) = engine._weights.folder.glob("*.safetensors")
        with safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            assert {stored.get_slice(name).get_dtype() for name in names} == {"BF16"}
        require_digests(servers_of(engine)[0], tiny_model("llama", seed=5).bfloat16())


def test_a_server_with_another_tokenizer_is_refused(ours, tokenizer):
    foreign = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"w0": 0, "w2": 1}, unk_token="w0"))
    )
    expected = replace(expected_server(tokenizer[1]), tokenizer=foreign)
    with pytest.raises(ModelError, match="the tokens of 'w2' are"):
        check_model(servers_of(ours)[0], expected)


def test_weights_are_restored_after_an_offload(ours):
    expected = [one.tolist() for one in generate(ours, greedy=True).tokens]
    ours.offload()
    assert [one.tolist() for one in generate(ours, greedy=True).tokens] == expected


def test_additional_stop_tokens_end_responses_exactly(ours):
    """A server stops at the end token of its own configuration: the rest is asked for."""
    answer = generate(ours, greedy=True).tokens[0].tolist()
    with pytest.raises(ModelError, match="min_new_tokens"):
        generate(ours, min_new_tokens=2)
    stopped = generate(ours, greedy=True, stop_token_ids=(answer[3],)).tokens[0].tolist()
    assert stopped == answer[: answer.index(answer[3]) + 1]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_reported_experts_are_those_of_the_model(family, tokenizer, tmp_path, monkeypatch):
    # SGLang gives every layer of this family experts, whatever its configuration says
    monkeypatch.setitem(tiny_models._FAMILIES["qwen3_moe"], "decoder_sparse_step", 1)
    options = {"family": family, "enable_return_routed_experts": True}
    with small_servers(tmp_path, 1, BACKEND, tokenizer[0], **options) as engine:
        responses = [generate(engine, routing_replay=True, max_new_tokens=20) for _ in range(2)]
    model = tiny_model(family)
    texts = sequences(prompts(), "packed_prompts")
    for answer in responses:
        for text, tokens, experts in zip(texts, answer.tokens, answer.routed_experts, strict=True):
            expected = chosen_by(model, torch.cat([text, tokens])[:-1])
            assert torch.equal(experts.long().sort(-1).values, expected)
