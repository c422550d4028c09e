"""The contract of generation against SGLang itself, on the CPU: `make test-servers`.

Two servers are started once, as the backend starts its own;
each check then attaches to one of them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from cpu_servers import backend_arguments
from real_servers import (
    AttachedContract,
    follow,
    forget_speeds,
    own_servers,
    require_measured_load,
    require_that_samples_follow_the_model,
    require_that_taken_responses_continue,
    server_process,
    servers_of,
)
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast

from rlcli.backends._server_attach import Expected, check_logprobs, check_model
from rlcli.errors import ModelError, UsageError
from rlcli.testing import tiny_models
from rlcli.testing.backend.base import prompts
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.plain import greedy_answers, sequences
from rlcli.testing.backend.routing_replay import chosen_by
from rlcli.testing.tiny_models import VOCABULARY, tiny_model

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


def sglang_servers(run_dir, count, family="llama", **options):
    return own_servers(
        run_dir,
        count,
        "sglang",
        family,
        **backend_arguments("sglang", skip_tokenizer_init=False, **options),
    )


@pytest.fixture(scope="module")
def ours(tmp_path_factory, tokenizer):
    """An engine with two servers of its own."""
    folder = tmp_path_factory.mktemp("run")
    with sglang_servers(folder, 2, tokenizer_path=str(tokenizer[0])) as engine:
        yield engine


@pytest.fixture(autouse=True)
def unprejudiced(ours):
    """The servers of a test, whatever seemed slow in the one before."""
    forget_speeds(ours)


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
    name = "sglang"
    mixtures = ()  # the servers were started with a llama
    ways = itertools.cycle(("process_group", "process_group", "disk", "disk"))

    def further_args(self):
        return {"update": next(self.ways)}


def test_two_servers_hold_the_last_weights_after_several_updates(ours):
    for seed in (5, 6, 7):
        follow(ours, seed)
        expected = greedy_answers(tiny_model("llama", seed=seed).double(), prompts(), 12)
        assert [one.tolist() for one in generate(ours, greedy=True).tokens] == expected
    digests = digests_of(tiny_model("llama", seed=7))
    for server in servers_of(ours):
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
    with sglang_servers(tmp_path, 1, dtype="bfloat16", tokenizer_path=str(tokenizer[0])) as engine:
        follow(engine, 5)
        (file,) = engine._weights.folder.glob("*.safetensors")
        with safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            assert {stored.get_slice(name).get_dtype() for name in names} == {"BF16"}
        digests = digests_of(tiny_model("llama", seed=5).bfloat16())
        digests_there = checksums(servers_of(engine)[0])
        assert {name: digests_there.get(name) for name in digests} == digests


def test_a_seed_gives_the_same_response_at_any_concurrency(ours):
    """With enable_deterministic_inference, that is; other seeds give other responses."""
    first, again = (
        generate(ours, responses_per_prompt=4, max_new_tokens=20).tokens for _ in range(2)
    )
    assert [one.tolist() for one in again] == [one.tolist() for one in first]
    one_by_one = generate(
        ours, responses_per_prompt=4, max_new_tokens=20, max_concurrent_responses=1
    ).tokens
    assert [one.tolist() for one in one_by_one] == [one.tolist() for one in first]
    assert len({tuple(one.tolist()) for one in first[:4]}) == 4


def test_responses_that_are_taken_from_a_server_continue_on_another(ours, monkeypatch):
    require_that_taken_responses_continue(ours, monkeypatch)


def test_sampled_tokens_follow_the_distribution_of_the_model(ours):
    require_that_samples_follow_the_model(ours)


def test_servers_report_their_load(ours):
    require_measured_load(ours)


def test_a_server_of_another_model_is_refused(ours, tokenizer):
    server, (_, tokenizer_of_servers) = servers_of(ours)[0], tokenizer
    right = Expected("actor", tokenizer_of_servers, VOCABULARY, ranks=1, seconds=600.0)
    check_model(server, right)
    check_logprobs(server, right)
    foreign = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"w0": 0, "w2": 1}, unk_token="w0"))
    )
    for wrong, message in (
        (replace(right, tokenizer=foreign), "the tokens of 'w2' are"),
        (replace(right, ids=VOCABULARY - 1), "its vocabulary is larger than the 96 ids here"),
        (replace(right, ids=VOCABULARY + 1), "its vocabulary is smaller than the 98 ids here"),
    ):
        with pytest.raises(ModelError, match=message):
            check_model(server, wrong)
    with pytest.raises(UsageError, match="is 1 processes"):
        check_model(server, replace(right, ranks=2))


def test_weights_are_restored_after_an_offload(ours):
    expected = [one.tolist() for one in generate(ours, greedy=True).tokens]
    ours.offload()
    assert [one.tolist() for one in generate(ours, greedy=True).tokens] == expected


def test_a_server_killed_during_a_rollout_returns_with_the_current_weights(ours):
    follow(ours, seed=3)
    expected = [one.tolist() for one in generate(ours, greedy=True, max_new_tokens=60).tokens]
    victim = server_process(servers_of(ours)[0])
    killer = threading.Timer(0.5, victim.kill)
    killer.start()
    rollout = generate(ours, greedy=True, max_new_tokens=60, responses_per_prompt=8)
    killer.join()
    assert [one.tolist() for one in rollout.tokens[::8]] == expected
    assert len(rollout.tokens) == 8 * len(expected)
    again = generate(ours, greedy=True, max_new_tokens=60, responses_per_prompt=2)
    assert [one.tolist() for one in again.tokens[::2]] == expected
    assert [server.lives for server in servers_of(ours)] == [2, 1]


def test_additional_stop_tokens_end_responses_exactly(ours):
    """A server stops at the end token of its own configuration: the rest is asked for."""
    answer = generate(ours, greedy=True).tokens[0].tolist()
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ModelError, match="min_new_tokens"))
        generate(ours, min_new_tokens=2)
    stopped = generate(ours, greedy=True, stop_token_ids=(answer[3],)).tokens[0].tolist()
    assert stopped == answer[: answer.index(answer[3]) + 1]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_reported_experts_are_those_of_the_model(family, tokenizer, tmp_path, monkeypatch):
    # SGLang gives every layer of this family experts, whatever its configuration says
    monkeypatch.setitem(tiny_models._FAMILIES["qwen3_moe"], "decoder_sparse_step", 1)
    options = {"tokenizer_path": str(tokenizer[0]), "enable_return_routed_experts": True}
    with sglang_servers(tmp_path, 1, family, **options) as engine:
        responses = [generate(engine, routing_replay=True, max_new_tokens=20) for _ in range(2)]
    model = tiny_model(family)
    texts = sequences(prompts(), "packed_prompts")
    for answer in responses:
        for text, tokens, experts in zip(texts, answer.tokens, answer.routed_experts, strict=True):
            expected = chosen_by(model, torch.cat([text, tokens])[:-1])
            assert torch.equal(experts.long().sort(-1).values, expected)
