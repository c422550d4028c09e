"""Engines with real servers of their own, started as a run starts them."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rlcli.api.config import GenerationHyperparameters
from rlcli.launch.children import Members, run_environment
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.base import prompts
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.plain import greedy_answers, sequences
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import END, VOCABULARY, TinyTokenizer, tiny_model
from rlcli.topology.groups import Group, process_folder


def save_tokenizer(folder):
    """The tokenizer of the tiny model's 97 tokens, which is also saved into a folder."""
    words = {f"w{id_}": id_ for id_ in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        eos_token=f"w{END}",
        pad_token="w0",
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def own_servers(run_dir, count, backend, family="llama", lm=None, **args):
    """An engine of a backend that starts `count` servers, with these further arguments."""
    group = Group("server", "server", (0,) * count)
    members = Members(run_dir, run_environment(1))
    members.start([group], node=0)
    checks = BackendContract()
    checks.name = backend
    checks.args = {"servers": count, "weights_folder": str(run_dir), **args}
    checks.server_folders = tuple(
        process_folder(run_dir, "server", group.name, index) for index in range(count)
    )
    engine = checks.engine(family, lm=lm)
    try:
        yield engine
    finally:
        engine.close()
        members.stop()


class AttachedContract(BackendContract):
    """Engines that are attached to one of two servers in turn: a check has two at most."""

    families = ("llama",)

    @pytest.fixture(autouse=True)
    def _attached(self, ours, tmp_path):
        self.turns = itertools.cycle(servers_of(ours))
        self.tmp_path = tmp_path
        yield
        self.restore(ours)
        ours._push()

    def restore(self, engine):
        """Undo what a check may have done to the servers of an engine."""

    def further_args(self):
        return {}

    def engine(self, family=None, **settings):
        server = next(self.turns)
        os.environ["RLCLI_TEST_KEY"] = server.endpoint.key
        self.args = {
            "urls": [server.endpoint.url],
            "api_key_env": "RLCLI_TEST_KEY",
            "weights_folder": str(self.tmp_path),
            **self.further_args(),
        }
        return super().engine(family, **settings)

    def test_sampling_follows_the_distribution(self):
        pytest.skip("4,000 requests")


def servers_of(engine):
    return engine._servers.servers


def server_process(server):
    """Its guardian's child; the guardian is its agent's."""
    folder = str(server.launch.slots[0].folder)
    (agent,) = (one for one in psutil.Process().children() if one.cmdline()[-1:] == [folder])
    return agent.children()[0].children()[0]


def follow(engine, seed):
    source = HeldSource(tiny_model("llama", seed=seed))
    blocks = [(block, source.read(block.name)) for block in engine.weight_blocks()]
    engine.take_parameters(SimpleNamespace(parameter_blocks=lambda: iter(blocks)), 1.0)


TRIES, LONG, REPEATS = 8, 100, 6


def forget_speeds(engine):
    """On a busy machine one of two servers may have seemed slow, and would get no requests."""
    for server in engine._servers.servers:
        engine._servers._admission.started(server.number)


def require_that_taken_responses_continue(engine, monkeypatch):
    """Responses that are taken from the first of two servers end on the second as they would have
    ended on the first."""
    follow(engine, seed=9)
    expected = greedy_answers(tiny_model("llama", seed=9).double(), prompts(), LONG) * REPEATS
    servers, served = engine._servers, []
    generate = servers.generate

    def recorded(*args):
        served.append(generate(*args))
        return served[-1]

    monkeypatch.setattr(servers, "generate", recorded)
    for _ in range(TRIES):
        assert _responses_while_taken(engine) == expected
        answers = [one.answer for one in served if one.was_taken]
        if any(answer.is_aborted and answer.tokens for answer in answers):
            return
        engine._push()  # then all may be taken again
    raise AssertionError(f"no response was taken midway in {TRIES} tries")


def _responses_while_taken(engine):
    """The tokens of some greedy responses, while those on the first server are taken from it."""
    forget_speeds(engine)
    servers, finished = engine._servers, {}
    requests = sequences(prompts(), "packed_prompts") * REPEATS
    gconfig = GenerationHyperparameters(max_new_tokens=LONG, greedy=True)
    with engine.open(TinyTokenizer(), gconfig, max(map(len, requests))) as stream:
        for seed, prompt in enumerate(requests):
            stream.submit(prompt, seed)
        deadline = time.monotonic() + 60
        while not servers._admission._balance.count(0):
            assert time.monotonic() < deadline, "the first server got no request"
            time.sleep(0.01)
        time.sleep(0.2)
        with servers._admission._changed:
            flights = servers._admission._balance._loads[0].take()
        servers._take(flights)
        while len(finished) < len(requests):
            finished |= {response.number: response for response in stream.collect()}
    return [finished[number].tokens.tolist() for number in range(len(requests))]


def require_measured_load(engine):
    """Both servers report their load by the names that the client knows."""
    servers = engine._servers
    servers._read_metrics()
    engine.measured()
    _responses_while_taken(engine)
    servers._read_metrics()
    assert not servers._mute
    measured = {name: total / count for name, (total, count) in engine.measured().items()}
    assert measured.keys() == {
        f"servers/{name}" for name in ("running", "queued", "cache_hits", "preemptions")
    }
    assert 0 <= measured["servers/running"] <= len(prompts().ids) * REPEATS
    assert 0 <= measured["servers/cache_hits"] < 1


BINS, CRITICAL = 20, 50.8
"""Intervals of the unit interval, and the value that chi-square with 19 degrees of freedom exceeds
once in 10,000 times."""


def require_that_samples_follow_the_model(engine):
    """Sampled tokens are distributed as transformers says: then the place of each in the cumulative
    distribution of its position, from the likeliest token on, drawn within the token's interval, is
    uniform."""
    follow(engine, seed=4)
    requested, copies, temperature = prompts(), 20, 0.7
    settings = {"responses_per_prompt": copies, "temperature": temperature, "max_new_tokens": 40}
    answers = generate(engine, requested, **settings).tokens
    texts = [text for text in sequences(requested, "packed_prompts") for _ in range(copies)]
    lm, draws = tiny_model("llama", seed=4).double(), torch.Generator().manual_seed(1)
    places = [
        _places(lm, prompt, answer, temperature, draws)
        for prompt, answer in zip(texts, answers, strict=True)
    ]
    counts = torch.histc(torch.cat(places), BINS, 0.0, 1.0)
    expected = counts.sum() / BINS
    assert expected > 50
    assert float(((counts - expected) ** 2 / expected).sum()) < CRITICAL


@torch.no_grad()
def _places(lm, prompt, answer, temperature, draws):
    logits = lm(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    position = (order == answer[:, None]).float().argmax(-1, keepdim=True)
    chosen, above = (
        values.gather(1, position)[:, 0] for values in (probabilities, probabilities.cumsum(-1))
    )
    return above - chosen * torch.rand(len(answer), generator=draws, dtype=torch.float64)
