"""Responses that go on while weights change: each token's version is that of the weights which
sampled it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reading_tokenizer import ReadingTokenizer

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.generation import prompts_of
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.api.timing import recorded
from rlcli.errors import ModelError
from rlcli.interfaces._responses import sample_responses
from rlcli.interfaces.episodes import EpisodesInterface
from rlcli.runtime.pausing import PausingEngine
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.generation import exported
from rlcli.testing.backend.plain import scores_of, sequences
from rlcli.testing.backend.samples import prompts
from rlcli.testing.tiny_models import TinyTokenizer

LONG = GenerationHyperparameters(
    max_new_tokens=100, min_new_tokens=60, temperature=0.7, responses_per_prompt=2
)
PASSES = 8
"""Forward passes between two updates."""
ROUNDING = 5e-4
"""Tolerance for log-probs."""


class Inference(BackendContract):
    name = "inference"
    families = ("llama",)


class Role:
    """A role that generates in a thread while its weights change."""

    def __init__(self, max_segments):
        self.engine, self.source = Inference().engine(seed=1), Inference().engine(seed=2)
        self.model = Model("rollout", self.engine, TinyTokenizer(), torch.device("cpu"))
        self.pausing = PausingEngine(self.model, max_segments, most_prompts=5)
        self.versions = {0: exported(self.engine)}
        """Version → the model with these weights."""

    def respond(self, settings=LONG):
        with self.pausing.in_use() as model:
            return sample_responses(model, prompts(), settings)

    def update(self):
        """New weights, of the next version."""
        with self.pausing.weights_may_change():
            self.engine.take_parameters(self.source, 0.5)
            self.model.version.global_step += 1
            self.versions[self.model.version.global_step] = exported(self.engine)

    def update_while_responding(self, updates):
        """Responses, during which the weights change so many times if they may, each time after a
        few tokens."""
        passes = threading.Semaphore(0)
        opened = self.engine.open
        self.engine.open = lambda *args: watched(opened(*args), passes)
        with ThreadPoolExecutor(1) as lane:
            responding = lane.submit(self.respond)
            responding.add_done_callback(lambda _: passes.release(updates * PASSES))
            for _ in range(updates):
                for _ in range(PASSES):
                    passes.acquire()
                self.update()
            return responding.result()


def watched(stream, passes):
    """A stream that counts its forward passes."""
    collect = stream.collect

    def collect_and_count(until):
        def ask():
            passes.release()
            return until()

        return collect(ask)

    stream.collect = collect_and_count
    return stream


def spans_of(batch):
    """The segments of each response, in the order of the sequences."""
    return [spans for sample in batch.metadata["weight_versions"] for spans in sample]


def test_log_probs_of_each_segment_are_those_of_its_version():
    role = Role(max_segments=9)
    batch = role.update_while_responding(3)
    all_spans = spans_of(batch)
    assert max(map(len, all_spans)) > 1, "no response has tokens from before and after a pause"
    logprobs = batch.data["packed_logprobs"].split(batch.flat_seqlens("packed_logprobs"))
    masks = batch.data["prompt_mask"].split(batch.flat_seqlens("prompt_mask"))
    texts = sequences(batch, "packed_input_ids")
    for text, mask, of_text, spans in zip(texts, masks, logprobs, all_spans, strict=True):
        assert sum(tokens for _, tokens in spans) == int((~mask).sum())
        check_segments(role, text, int(mask.sum()), of_text, spans)


def check_segments(role, text, prompt, logprobs, spans):
    """The log-probs of each segment are those that its version gives for the whole text."""
    versions = [version for version, _ in spans]
    assert versions == sorted(set(versions))
    packed = SequenceSample.from_default(
        ids=["0"], seqlens=[len(text)], data={"packed_input_ids": text}
    )
    first = prompt - 1
    for version, tokens in spans:
        expected = scores_of(role.versions[version], packed, LONG.temperature)[0]
        segment = slice(first, first + tokens)
        torch.testing.assert_close(logprobs[segment], expected[segment], atol=ROUNDING, rtol=0)
        first += tokens


def test_turns_of_episodes_are_of_the_versions_that_sampled_them():
    role = Role(max_segments=9)
    role.model.tokenizer = ReadingTokenizer()
    generation = replace(LONG, max_new_tokens=90, min_new_tokens=20)
    episodes = EpisodesInterface(
        environment="guess", max_turns=3, turn_tokens=20, generation=generation
    )

    def play():
        with role.pausing.in_use() as model:
            return episodes.generate(model, prompts(), MicroBatchSpec())

    role.respond = play
    batch = role.update_while_responding(4)
    all_spans = spans_of(batch)
    assert len({version for spans in all_spans for version, _ in spans}) > 2
    logprobs = batch.data["packed_logprobs"].split(batch.flat_seqlens("packed_logprobs"))
    masks = batch.data["prompt_mask"].split(batch.flat_seqlens("prompt_mask"))
    texts = sequences(batch, "packed_input_ids")
    for text, mask, of_text, spans in zip(texts, masks, logprobs, all_spans, strict=True):
        check_turns(role, text, (~mask[1:]).nonzero()[:, 0], of_text, spans)


SLOW = """
import time
from pathlib import Path

from rlcli.api.environment import register_environment
from rlcli.interfaces.environments.guess import Guess


class Slow(Guess):
    def reset(self, row, seed):
        Path("resetting").touch()
        while not Path("changed").exists():
            time.sleep(0.01)
        return super().reset(row, seed)


register_environment("zz_slow_reset", Slow)
"""


def test_weights_change_while_environments_are_reset(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("[tool.rlcli]\n")
    Path("interfaces/environments").mkdir(parents=True)
    Path("interfaces/environments/zz_slow_reset.py").write_text(SLOW)
    role = Role(max_segments=9)
    role.model.tokenizer = ReadingTokenizer()
    generation = replace(LONG, max_new_tokens=90, min_new_tokens=20)
    episodes = EpisodesInterface(
        environment="zz_slow_reset", max_turns=3, turn_tokens=20, generation=generation
    )

    def play():
        with role.pausing.in_use() as model:
            return episodes.generate(model, prompts(), MicroBatchSpec())

    with ThreadPoolExecutor(1) as lane:
        playing = lane.submit(play)
        while not Path("resetting").exists():
            time.sleep(0.01)
        role.update()
        Path("changed").touch()
        batch = playing.result()
    episodes.pool.close()
    assert {version for spans in spans_of(batch) for version, _ in spans} == {1}


def check_turns(role, text, sampled, logprobs, spans):
    """The log-probs of the sampled actions are those that their versions give for the text."""
    assert len(sampled) == 60
    packed = SequenceSample.from_default(
        ids=["0"], seqlens=[len(text)], data={"packed_input_ids": text}
    )
    of_spans = sampled.split([tokens for _, tokens in spans])
    for (version, _), actions in zip(spans, of_spans, strict=True):
        expected = scores_of(role.versions[version], packed, LONG.temperature)[0]
        torch.testing.assert_close(logprobs[actions], expected[actions], atol=ROUNDING, rtol=0)


def test_responses_without_new_weights_are_those_of_the_engine():
    role = Role(max_segments=9)
    batch = role.respond()
    expected = sample_responses(role.model, prompts(), LONG)
    assert torch.equal(batch.data["packed_input_ids"], expected.data["packed_input_ids"])
    torch.testing.assert_close(batch.data["packed_logprobs"], expected.data["packed_logprobs"])
    assert {version for spans in spans_of(batch) for version, _ in spans} == {0}


@pytest.mark.long
@pytest.mark.parametrize("most", [1, 2])
def test_new_weights_wait_for_responses_that_have_as_many_segments_as_they_may(most):
    role = Role(max_segments=most)
    batch = role.update_while_responding(3)
    assert max(map(len, spans_of(batch))) <= most
    assert role.model.version.global_step == 3
    assert {version for spans in spans_of(role.respond()) for version, _ in spans} == {3}


@pytest.mark.long
def test_calls_run_side_by_side_and_answer_when_their_own_responses_are_finished():
    role = Role(max_segments=9)
    short = replace(LONG, min_new_tokens=0, stop_token_ids=tuple(range(200)))
    settings = [LONG, LONG, LONG, short, LONG]
    expected = [sample_responses(role.model, prompts(), of_call) for of_call in settings]
    with ThreadPoolExecutor(len(settings)) as lane:
        batches = list(lane.map(role.respond, settings))
    for batch, alone in zip(batches, expected, strict=True):
        assert torch.equal(batch.data["packed_input_ids"], alone.data["packed_input_ids"])


def texts_of(responses):
    return [response.tokens.tolist() for response in responses]


@contextmanager
def streamed(role, settings):
    """A call that requests a response whenever it likes: its stream, and how it requests one."""
    (prompt, *_) = prompts_of(prompts())
    with role.pausing.in_use() as model:
        stream = model.module.open(model.tokenizer, settings, len(prompt))
        yield stream, lambda seed: stream.submit(prompt, seed)


def sampled_by(role, settings, seed):
    """The tokens of one response."""
    with streamed(role, settings) as (stream, request):
        request(seed)
        (text,) = texts_of(stream.collect())
    return text


def wait_until(condition):
    while not condition():
        time.sleep(0.001)


def in_thread(work):
    """A thread that is left behind if it hangs."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.long
def test_calls_with_other_settings_do_not_wait_for_each_other_for_ever():
    role, greedy, texts = Role(max_segments=9), replace(LONG, greedy=True), []
    expected = [sampled_by(role, LONG, 1), sampled_by(role, LONG, 2), sampled_by(role, greedy, 3)]

    def sample_greedily():
        texts.append(sampled_by(role, greedy, 3))

    def take_turns():
        with streamed(role, LONG) as (stream, request):
            request(1)
            greedy_call = in_thread(sample_greedily)
            wait_until(lambda: role.pausing._entrance.locked() or texts)
            request(2)
            while stream._numbers:
                texts.extend(texts_of(stream.collect()))
        greedy_call.join()

    in_thread(take_turns).join(60)
    assert sorted(texts) == sorted(expected)


def test_a_call_whose_first_response_is_finished_samples_those_that_new_weights_wait_for():
    role, texts = Role(max_segments=1), []
    settings = replace(LONG, min_new_tokens=0, stop_token_ids=tuple(range(0, 200, 7)))

    def take_turns():
        with streamed(role, settings) as (stream, request):
            for seed in range(8):
                request(seed)
            updates.start()
            wait_until(lambda: role.pausing._has_update)
            while len(texts) < 8:
                texts.extend(texts_of(stream.collect()))

    updates = threading.Thread(target=role.update, daemon=True)
    in_thread(take_turns).join(60)
    assert len({len(text) for text in texts}) > 1, "all responses are finished at once"
    updates.join(60)
    assert role.model.version.global_step == 1


def test_seconds_of_calls_that_run_side_by_side_are_not_counted_twice():
    role = Role(max_segments=9)

    def took(settings):
        with recorded() as timing:
            role.respond(settings)
        return timing.seconds

    began = time.perf_counter()
    with ThreadPoolExecutor(4) as lane:
        seconds = sum(lane.map(took, [LONG] * 4))
    assert seconds < 1.2 * (time.perf_counter() - began)


def test_an_error_of_the_stream_ends_all_calls_that_wait_for_it():
    role = Role(max_segments=9)
    opened = role.engine.open

    def broken(*args):
        stream = opened(*args)
        stream.collect = fail
        return stream

    def fail(until):
        raise ModelError("the stream breaks")

    role.engine.open = broken
    with ThreadPoolExecutor(3) as lane:
        calls = [lane.submit(role.respond) for _ in range(3)]
    assert [call.exception().what for call in calls] == ["the stream breaks"] * 3


def test_new_weights_that_wait_for_responses_end_with_the_error_of_their_stream():
    role = Role(max_segments=1)
    opened, waits = role.engine.open, threading.Event()

    def fail(until):
        waits.wait()
        time.sleep(0.2)
        raise ModelError("the stream breaks")

    def broken(*args):
        stream = opened(*args)
        stream.collect = fail
        return stream

    role.engine.open = broken
    with ThreadPoolExecutor(1) as lane:
        call = lane.submit(role.respond)
        while not role.pausing._begun:
            time.sleep(0.01)
        waits.set()
        with pytest.raises(ModelError, match="the stream breaks"):
            role.update()
    assert call.exception().what == "the stream breaks"


def test_weights_that_do_not_arrive_end_the_calls_under_way():
    role = Role(max_segments=9)
    role.engine.take_parameters = lambda source, eta: 1 / 0
    with pytest.raises(ZeroDivisionError):
        role.update()
    with pytest.raises(ZeroDivisionError):
        role.respond()


def test_a_call_that_fails_leaves_the_engine_to_others():
    role = Role(max_segments=9)
    empty = SequenceSample.from_default(
        ids=["0"], seqlens=[0], data={"packed_prompts": torch.zeros(0, dtype=torch.int64)}
    )
    with pytest.raises(ModelError, match="a prompt has no tokens"), role.pausing.in_use() as model:
        sample_responses(model, empty, LONG)
    role.update()
    assert {version for spans in spans_of(role.respond()) for version, _ in spans} == {1}


def test_a_rank_without_prompts_returns_none():
    role = Role(max_segments=9)
    nothing = SequenceSample(
        ids=[],
        seqlens={"packed_prompts": []},
        data={"packed_prompts": torch.zeros(0, dtype=torch.int64)},
    )
    with role.pausing.in_use() as model:
        batch = sample_responses(model, nothing, LONG)
    assert (batch.bs, len(batch.data["packed_input_ids"])) == (0, 0)
