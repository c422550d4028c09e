"""What all real servers must do. The file of each kind of server adds what only that one does."""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from reading_tokenizer import ReadingTokenizer
from real_servers import (
    HEAD_SIZE,
    follow,
    forget_speeds,
    server_process,
    servers_of,
    small_servers,
    take,
)

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.backends._server_attach import Expected, check_logprobs, check_model
from rlcli.errors import ModelError, UsageError
from rlcli.interfaces.episodes import EpisodesInterface
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.generation import generate
from rlcli.testing.backend.plain import acting, greedy_answers, scores_of, sequences
from rlcli.testing.backend.samples import prompts
from rlcli.testing.tiny_models import VOCABULARY, TinyTokenizer, tiny_model

TRIES, LONG, REPEATS = 8, 100, 6
BINS, CRITICAL = 20, 50.8
"""Intervals of the unit interval, and the value that chi-square with 19 degrees of freedom exceeds
once in 10,000 times."""
TIED = {"head_dim": HEAD_SIZE, "tie_word_embeddings": True}


class AttachedContract(BackendContract):
    """Engines that are attached to one of two servers in turn: a check has two at most."""

    families = ("llama",)
    draws = 4

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


class ServerContract:
    """Of an engine with two servers of its own, `ours`; transformers says what they should do."""

    backend: str

    @pytest.fixture(autouse=True)
    def _unprejudiced(self, ours):
        """The servers of a test, whatever seemed slow in the one before."""
        forget_speeds(ours)

    def test_two_servers_hold_the_last_weights_after_several_updates(self, ours):
        for seed in (5, 6, 7):
            follow(ours, seed)
            require_greedy_answers(ours, tiny_model("llama", seed=seed))

    def test_a_head_that_shares_the_embeddings_follows_them(self, tmp_path, tokenizer):
        """In vLLM's CPU build it has a packed copy of its matrix."""
        lm = tiny_model("llama", seed=1, **TIED)
        with small_servers(tmp_path, 1, self.backend, tokenizer[0], lm) as engine:
            for seed in (1, 2):
                lm = tiny_model("llama", seed=seed, **TIED)
                take(engine, lm)
                require_greedy_answers(engine, lm)

    def test_a_seed_gives_the_same_response_again(self, ours):
        settings = {"responses_per_prompt": 4, "max_new_tokens": 20}
        first, again = (listed(generate(ours, **settings)) for _ in range(2))
        assert again == first
        assert len({*map(tuple, first[:4])}) == 4

    def test_episodes_are_trained_on_exactly_the_tokens_that_were_sampled(self, ours):
        lm, temperature = follow(ours, seed=4), 0.7
        settings = {"temperature": temperature, "responses_per_prompt": 2, "max_new_tokens": 60}
        episodes = EpisodesInterface(
            environment="guess", max_turns=3, turn_tokens=8, generation=settings
        )
        model = Model("actor", Heard(ours), ReadingTokenizer(), torch.device("cpu"))
        output = episodes.generate(model, prompts(), MicroBatchSpec())
        episodes.pool.close()
        turns = list(turns_of(output))
        assert sorted(turns) == sorted(model.module.turns)
        assert len(turns) > 2 * prompts().bs
        logprobs = output.data["packed_logprobs"][acting(output)]
        expected = scores_of(lm, output, temperature)[0][acting(output)]
        torch.testing.assert_close(logprobs, expected, atol=5e-4, rtol=0)

    def test_sampled_tokens_follow_the_distribution_of_the_model(self, ours):
        """Then the position of each in the cumulative distribution of its predecessors, from the
        likeliest token on, drawn within the token's interval, is uniform."""
        follow(ours, seed=4)
        requested, copies, temperature = prompts(), 20, 0.7
        answers = generate(
            ours,
            requested,
            responses_per_prompt=copies,
            temperature=temperature,
            max_new_tokens=40,
        ).tokens
        texts = [text for text in sequences(requested, "packed_prompts") for _ in range(copies)]
        lm, draws = tiny_model("llama", seed=4).double(), torch.Generator().manual_seed(1)
        positions = [
            _positions(lm, prompt, answer, temperature, draws)
            for prompt, answer in zip(texts, answers, strict=True)
        ]
        counts = torch.histc(torch.cat(positions), BINS, 0.0, 1.0)
        expected = counts.sum() / BINS
        assert expected > 50
        assert float(((counts - expected) ** 2 / expected).sum()) < CRITICAL

    def test_responses_that_are_taken_from_a_server_continue_on_another(self, ours, monkeypatch):
        """They end as they would have ended on the first."""
        follow(ours, seed=9)
        expected = greedy_answers(tiny_model("llama", seed=9).double(), prompts(), LONG) * REPEATS
        servers, served = ours._servers, []
        generate_on = servers.generate

        def recorded(*args):
            served.append(generate_on(*args))
            return served[-1]

        monkeypatch.setattr(servers, "generate", recorded)
        for _ in range(TRIES):
            assert _responses_while_taken(ours) == expected
            answers = [response.answer for response in served if response.was_taken]
            if any(answer.is_aborted and answer.tokens for answer in answers):
                return
            ours._push()  # then all may be taken again
        raise AssertionError(f"no response was taken midway in {TRIES} tries")

    def test_servers_report_their_load(self, ours):
        """By the names that the client knows."""
        servers = ours._servers
        servers._read_metrics()
        ours.measured()
        _responses_while_taken(ours)
        servers._read_metrics()
        assert not servers._mute
        measured = {name: total / count for name, (total, count) in ours.measured().items()}
        names = ("running", "queued", "cache_hits", "preemptions")
        assert measured.keys() == {f"servers/{name}" for name in names}
        assert 0 <= measured["servers/running"] <= len(prompts().ids) * REPEATS
        assert 0 <= measured["servers/cache_hits"] < 1

    def test_a_server_of_another_model_is_refused(self, ours, tokenizer):
        server, expected = servers_of(ours)[0], expected_server(tokenizer[1])
        check_model(server, expected)
        check_logprobs(server, expected)
        with pytest.raises(ModelError, match="its vocabulary is larger than the 96 ids here"):
            check_model(server, replace(expected, ids=VOCABULARY - 1))
        with pytest.raises(ModelError, match="its vocabulary is smaller than the 98 ids here"):
            check_model(server, replace(expected, ids=VOCABULARY + 1))
        with pytest.raises(UsageError, match="is 1 processes"):
            check_model(server, replace(expected, ranks=2))

    def test_a_server_killed_during_a_rollout_returns_with_the_current_weights(self, ours):
        follow(ours, seed=3)
        lives = [server.lives for server in servers_of(ours)]
        expected = listed(generate(ours, greedy=True, max_new_tokens=60))
        killer = threading.Timer(0.5, server_process(servers_of(ours)[0]).kill)
        killer.start()
        rollout = generate(ours, greedy=True, max_new_tokens=60, responses_per_prompt=8)
        killer.join()
        assert listed(rollout)[::8] == expected
        assert len(rollout.tokens) == 8 * len(expected)
        again = generate(ours, greedy=True, max_new_tokens=60, responses_per_prompt=2)
        assert listed(again)[::2] == expected
        assert [server.lives for server in servers_of(ours)] == [lives[0] + 1, lives[1]]


class Heard:
    """An engine whose requests and responses are noted."""

    def __init__(self, engine):
        self._engine = engine
        self.turns = []
        """What a response continues, and its tokens."""

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def open(self, *arguments):
        stream, texts = self._engine.open(*arguments), {}
        submit, collect = stream.submit, stream.collect

        def note_text(text, seed):
            number = submit(text, seed)
            texts[number] = text.tolist()
            return number

        def note_response(until):
            responses = collect(until)
            self.turns += [(texts[each.number], each.tokens.tolist()) for each in responses]
            return responses

        stream.submit, stream.collect = note_text, note_response
        return stream


def turns_of(batch):
    """The sampled parts of texts: what each continues, and its tokens."""
    texts, masks = sequences(batch, "packed_input_ids"), sequences(batch, "prompt_mask")
    for text, mask in zip(texts, masks, strict=True):
        edges = (~mask).int().diff(prepend=torch.zeros(1), append=torch.zeros(1))
        starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            yield text[:start].tolist(), text[start:end].tolist()


def expected_server(tokenizer):
    return Expected("actor", tokenizer, VOCABULARY, ranks=1, seconds=600.0)


def listed(responses):
    return [tokens.tolist() for tokens in responses.tokens]


def require_greedy_answers(engine, lm):
    """An engine's greedy responses are those of transformers, which computes in float64."""
    expected = greedy_answers(lm.double(), prompts(), 12)
    assert listed(generate(engine, greedy=True)) == expected


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


@torch.no_grad()
def _positions(lm, prompt, answer, temperature, draws):
    logits = lm(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    probabilities, order = (logits / temperature).softmax(-1).sort(descending=True)
    position = (order == answer[:, None]).float().argmax(-1, keepdim=True)
    chosen, above = (
        values.gather(1, position)[:, 0] for values in (probabilities, probabilities.cumsum(-1))
    )
    return above - chosen * torch.rand(len(answer), generator=draws, dtype=torch.float64)
