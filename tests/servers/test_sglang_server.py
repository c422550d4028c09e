"""The contract of generation against SGLang itself, on the CPU: `make test-servers`.

Two servers are started once, as the backend starts its own; each check then attaches to one of them.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from rlcli.errors import ModelError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import prompts
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.plain import greedy_answers
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import tiny_model

PYTHON = os.environ.get("RLCLI_SGLANG_PYTHON")
ON_CPU = Path(__file__).with_name("on_cpu")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="needs an environment with SGLang: make test-servers"),
    pytest.mark.timeout(1200),
]

SETTINGS = {
    "python": PYTHON,
    "servers": 2,
    "options": {
        "device": "cpu", "dtype": "float32", "max_total_tokens": 4096, "max_running_requests": 32,
        "context_length": 128, "mem_fraction_static": 0.1, "skip_server_warmup": True,
    },
    "environment": {"PYTHONPATH": str(ON_CPU), "SGLANG_USE_CPU_ENGINE": "1"},
}  # fmt: skip


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def engine_of(seed=0, tokenizer=None, **args):
    checks = BackendContract()
    checks.name, checks.args = "sglang", args
    return checks.engine("llama", seed=seed, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """An engine with two servers of its own."""
    engine = engine_of(**SETTINGS, weights_folder=str(tmp_path_factory.mktemp("weights")))
    yield engine
    engine.close()


def servers_of(engine):
    return engine._servers.servers


def follow(engine, seed):
    source = HeldSource(tiny_model("llama", seed=seed))
    blocks = [(block, source.read(block.name)) for block in engine.weight_blocks()]
    engine.take_parameters(SimpleNamespace(parameter_blocks=lambda: iter(blocks)), 1.0)


def fused(lm):
    """Name → weight, as SGLang joins those of llama: what it computes digests of."""
    weights = {name: one.detach() for name, one in lm.named_parameters()}
    made = {}
    for name, one in weights.items():
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            if parts[0] in name:
                made[name.replace(parts[0], whole)] = torch.cat(
                    [weights[name.replace(parts[0], part)] for part in parts]
                )
                break
            if any(part in name for part in parts):
                break
        else:
            made[name] = one
    return made


def checksums(server):
    answer = server.endpoint.post("/weights_checker", {"action": "checksum"}, 120)
    return answer["ranks"][0]["checksums"]


class TestContract(BackendContract):
    """Engines that are attached to one of two servers in turn: a check has two at most."""

    name = "sglang"
    families = ("llama",)
    ways = itertools.cycle(("process_group", "process_group", "disk", "disk"))

    @pytest.fixture(autouse=True)
    def _attached(self, ours, tmp_path):
        self.turns = itertools.cycle(servers_of(ours))
        self.tmp_path = tmp_path
        yield
        ours._push()

    def engine(self, family=None, **wanted):
        server = next(self.turns)
        os.environ["RLCLI_TEST_KEY"] = server.endpoint.key
        self.args = {
            "urls": [server.endpoint.url], "api_key_env": "RLCLI_TEST_KEY", "update": next(self.ways),
            "weights_folder": str(self.tmp_path),
        }  # fmt: skip
        return super().engine(family, **wanted)

    def test_sampling_follows_the_distribution(self):
        pytest.skip("4,000 requests")


def test_two_servers_hold_the_weights_at_the_end_of_a_chain_of_updates(ours):
    for seed in (5, 6, 7):
        follow(ours, seed)
        wanted = greedy_answers(tiny_model("llama", seed=seed).double(), prompts(), 12)
        assert [one.tolist() for one in generate(ours, greedy=True).tokens] == wanted
    digests = {
        name: hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest()[:16]
        for name, one in fused(tiny_model("llama", seed=7)).items()
    }
    for server in servers_of(ours):
        held = checksums(server)
        assert {name: held.get(name) for name in digests} == digests


def test_memory_is_given_back_and_the_weights_are_there_again(ours):
    wanted = [one.tolist() for one in generate(ours, greedy=True).tokens]
    ours.offload()
    assert [one.tolist() for one in generate(ours, greedy=True).tokens] == wanted


def test_a_server_that_is_killed_mid_rollout_comes_back_with_the_present_weights(ours):
    follow(ours, seed=3)
    wanted = [one.tolist() for one in generate(ours, greedy=True, max_new_tokens=60).tokens]
    victim = psutil.Process(servers_of(ours)[0].process._guardian.pid).children()[0]
    killer = threading.Timer(0.5, victim.kill)
    killer.start()
    found = generate(ours, greedy=True, max_new_tokens=60, responses_per_prompt=8)
    killer.join()
    assert [one.tolist() for one in found.tokens[::8]] == wanted
    assert len(found.tokens) == 8 * len(wanted)
    again = generate(ours, greedy=True, max_new_tokens=60, responses_per_prompt=2)
    assert [one.tolist() for one in again.tokens[::2]] == wanted
    assert [server.lifes for server in servers_of(ours)] == [2, 1]


def test_a_tokenizer_with_other_ends_is_served_exactly(ours):
    """A server stops at the end token of its own configuration: the rest is asked for."""
    answer = generate(ours, greedy=True).tokens[0].tolist()
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ModelError, match="min_new_tokens"))
        generate(ours, min_new_tokens=2)
    stopped = generate(ours, greedy=True, stop_token_ids=(answer[3],)).tokens[0].tolist()
    assert stopped == answer[: answer.index(answer[3]) + 1]
