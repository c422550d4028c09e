"""The contract of generation against vLLM itself, on the CPU: `make test-servers`.

Two servers are started once, as the backend starts its own;
each check then attaches to one of them.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
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

from rlcli.backends._server_attach import Expected, check_logprobs, check_model
from rlcli.backends._server_http import Endpoint, ServerRefused
from rlcli.errors import ModelError, UsageError
from rlcli.testing import tiny_models
from rlcli.testing.backend.base import prompts
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.plain import greedy_answers
from rlcli.testing.contract import Violation
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import VOCABULARY, tiny_model

PYTHON = os.environ.get("RLCLI_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="needs an environment with vLLM: make test-servers"),
    pytest.mark.timeout(1200),
]

HEAD_SIZE = 32
"""The CPU build has no attention for smaller heads."""


@pytest.fixture(scope="module", autouse=True)
def _wide_heads():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models._FAMILIES["llama"], "head_dim", HEAD_SIZE)
        yield


@pytest.fixture(scope="module")
def ours(tmp_path_factory, tokenizer):
    """An engine with two servers of its own."""
    args = backend_arguments("vllm", skip_tokenizer_init=False, tokenizer=str(tokenizer[0]))
    folder = tmp_path_factory.mktemp("run")
    with own_servers(folder, 2, "vllm", **args) as engine:
        yield engine


@pytest.fixture(autouse=True)
def unprejudiced(ours):
    """The servers of a test, whatever seemed slow in the one before."""
    forget_speeds(ours)


class TestContract(AttachedContract):
    name = "vllm"
    mixtures = ()  # the servers were started with a llama

    def restore(self, engine):
        for server in servers_of(engine):
            server.endpoint.post("/wake_up", {}, 60.0)

    def test_a_pause_changes_no_log_prob(self):
        """Its responses are so short in time that all pauses may miss them: then it tries again."""
        for is_last in (False, False, False, False, True):
            try:
                return super().test_a_pause_changes_no_log_prob()
            except Violation as violation:
                if is_last or "no response has tokens from before and after" not in str(violation):
                    raise


def test_two_servers_hold_the_last_weights_after_several_updates(ours):
    for seed in (5, 6, 7):
        follow(ours, seed)
        expected = greedy_answers(tiny_model("llama", seed=seed).double(), prompts(), 12)
        assert [tokens.tolist() for tokens in generate(ours, greedy=True).tokens] == expected


def test_a_head_that_shares_the_embeddings_follows_them(tmp_path, tokenizer):
    """In vLLM's CPU build it has a packed copy of its matrix."""
    tied = {"head_dim": HEAD_SIZE, "tie_word_embeddings": True}
    args = backend_arguments("vllm", skip_tokenizer_init=False, tokenizer=str(tokenizer[0]))
    with own_servers(tmp_path, 1, "vllm", lm=tiny_model("llama", seed=1, **tied), **args) as engine:
        for seed in (1, 2):
            lm = tiny_model("llama", seed=seed, **tied)
            source = HeldSource(lm)
            blocks = [(block, source.read(block.name)) for block in engine.weight_blocks()]
            engine.take_parameters(SimpleNamespace(parameter_blocks=lambda: iter(blocks)), 1.0)  # noqa: B023
            expected = greedy_answers(lm.double(), prompts(), 12)
            assert [tokens.tolist() for tokens in generate(engine, greedy=True).tokens] == expected


def test_a_seed_gives_the_same_response_again(ours):
    first, again = (
        generate(ours, responses_per_prompt=4, max_new_tokens=20).tokens for _ in range(2)
    )
    assert [tokens.tolist() for tokens in again] == [tokens.tolist() for tokens in first]
    assert len({tuple(tokens.tolist()) for tokens in first[:4]}) == 4


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
    with pytest.raises(ModelError, match="its vocabulary is larger than the 96 ids here"):
        check_model(server, replace(right, ids=VOCABULARY - 1))
    with pytest.raises(ModelError, match="its vocabulary is smaller than the 98 ids here"):
        check_model(server, replace(right, ids=VOCABULARY + 1))
    with pytest.raises(UsageError, match="is 1 processes"):
        check_model(server, replace(right, ranks=2))


@pytest.mark.parametrize(
    "path", ["/v1/models", "/collective_rpc", "/pause?mode=keep", "/update_weight_version"]
)
def test_every_request_needs_the_key(ours, path):
    (url, *_) = [server.endpoint.url for server in servers_of(ours)]
    for key in (None, "another"):
        with pytest.raises(ServerRefused, match="401"):
            Endpoint(url, key).post(path, {}, 30.0)


def test_a_server_killed_during_a_rollout_returns_with_the_current_weights(ours):
    follow(ours, seed=3)
    expected = [tokens.tolist() for tokens in generate(ours, greedy=True, max_new_tokens=60).tokens]
    victim = server_process(servers_of(ours)[0])
    killer = threading.Timer(0.5, victim.kill)
    killer.start()
    rollout = generate(ours, greedy=True, max_new_tokens=60, responses_per_prompt=8)
    killer.join()
    assert [tokens.tolist() for tokens in rollout.tokens[::8]] == expected
    again = generate(ours, greedy=True, max_new_tokens=60, responses_per_prompt=2)
    assert [tokens.tolist() for tokens in again.tokens[::2]] == expected
    assert [server.lives for server in servers_of(ours)] == [2, 1]
