"""Clients of servers: failing servers, attaching to servers, their weights and their memory."""

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from attached_engines import follow
from fake_server import HashModel, log_softmax
from safetensors import safe_open
from server_kinds import KINDS, SGLANG, VLLM
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlcli.api.config import GenerationHyperparameters, ModelBackendAbstraction
from rlcli.api.model import make_backend
from rlcli.api.timing import recorded
from rlcli.backends._server_attach import Expected, check_model
from rlcli.backends._server_http import Endpoint
from rlcli.backends._server_metrics import Meter, read_metrics
from rlcli.backends._server_process import Server
from rlcli.backends.sglang import SGLang
from rlcli.checkpoint.light_tokenizer import LightTokenizer
from rlcli.errors import HangError, ModelError, UsageError, WorkerError
from rlcli.runtime.roles import MESH_ORDER
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.generation import generate
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model

only_sglang = pytest.mark.parametrize("kind", [SGLANG], ids=str, indirect=True)

# -- servers that fail -----------------------------------------------------------------------------

QUICK = {
    "weights_folder": None,
    "start_deadline_s": 20.0,
    "request_deadline_s": 5.0,
    "update_deadline_s": 10.0,
}


@pytest.fixture(params=KINDS, ids=str)
def kind(request):
    return request.param


@pytest.fixture
def attached(tmp_path, kind):
    """Builds an engine with `count` fake servers in this process;
    `prepare` changes the last of them."""
    with ExitStack() as stack:
        lm = tiny_model("llama")

        def make(count=1, prepare=lambda fake: None, tokenizer=None, **args):
            fakes = [
                stack.enter_context(kind.fake(HashModel(lm.config.vocab_size)))
                for _ in range(count)
            ]
            prepare(fakes[-1])
            checks = BackendContract()
            checks.name, checks.args = (
                kind.name,
                {
                    **QUICK,
                    "urls": [fake.url for fake in fakes],
                    "update": "disk",
                    "weights_folder": str(tmp_path),
                    **args,
                },
            )
            engine = checks.engine("llama", lm=lm, tokenizer=tokenizer)
            stack.callback(engine.close)
            return engine, fakes

        yield make


def named_servers(error):
    """The servers that an error names."""
    return {word.strip("',;:)") for word in str(error).split() if word.startswith("http://")}


def test_requests_are_balanced_over_servers(attached, kind):
    engine, fakes = attached(2)
    for fake in fakes:
        fake.token_s = 0.005
        fake.calls.clear()
    generate(engine, responses_per_prompt=4)
    assert sum(fake.count(kind.generate) for fake in fakes) == 20
    assert all(fake.count(kind.generate) >= 6 for fake in fakes)


def test_concurrent_requests_are_limited(attached):
    engine, (fake,) = attached(1, max_concurrent_requests=3)
    fake.token_s = 0.005
    generate(engine, responses_per_prompt=4)
    assert fake.most_at_once == 3
    fake.most_at_once = 0
    generate(engine, responses_per_prompt=2, max_concurrent_responses=2)
    assert fake.most_at_once == 2


@pytest.mark.parametrize("fault", ["reset", "half"])
def test_a_request_is_retried_after_a_broken_connection(attached, fault, kind):
    engine, (fake,) = attached()
    expected = generate(engine)
    fake.fail(kind.generate, fault, fault)
    actual = generate(engine)
    assert [one.tolist() for one in actual.tokens] == [one.tolist() for one in expected.tokens]
    assert fake.count(kind.load) == 1


def break_connections(engine, path):
    """Break those of requests that wait for an answer, as a proxy does that has seen no data for
    too long: the server does not notice at once."""
    for request in tuple(engine._servers.servers[0].endpoint._waits):
        if request._target == path:
            request._socket.shutdown(socket.SHUT_RDWR)


def test_a_request_is_repeated_while_the_server_still_works_on_it(attached, kind):
    engine, (fake,) = attached()
    fake.token_s, fake.most_at_once = 0.2, 0
    fake.calls.clear()
    with engine.open(TinyTokenizer(), GenerationHyperparameters(max_new_tokens=2), 8) as stream:
        stream.submit(torch.tensor([3, 4]), 1)
        while not fake.most_at_once:
            time.sleep(0.001)
        break_connections(engine, kind.generate)
        (response,) = stream.collect()
    assert fake.count(kind.generate) == 2
    assert len(response.tokens) == len(response.logprobs) > 0


def test_many_connections_broken_at_once_do_not_mark_a_server_as_dead(attached, kind):
    engine, (fake,) = attached()
    undisturbed = generate(engine, responses_per_prompt=4)
    fake.fail(kind.generate, *["reset"] * 10)
    repeated = generate(engine, responses_per_prompt=4)
    assert [one.tolist() for one in repeated.tokens] == [one.tolist() for one in undisturbed.tokens]
    assert fake.count(kind.load) == 1


def test_a_server_that_takes_no_more_requests_is_asked_again_later(attached, kind, monkeypatch):
    monkeypatch.setattr("rlcli.backends._server_pool.BUSY_S", 0.05)
    engine, (fake,) = attached()
    undisturbed = generate(engine)
    fake.fail(kind.generate, *["busy"] * 60)
    later = generate(engine)
    assert [one.tolist() for one in later.tokens] == [one.tolist() for one in undisturbed.tokens]
    assert fake.count(kind.load) == 1, "it was started again"


def test_a_server_that_stays_busy_ends_the_call_after_the_deadline(attached, kind, monkeypatch):
    monkeypatch.setattr("rlcli.backends._server_pool.BUSY_S", 0.05)
    engine, (fake,) = attached(request_deadline_s=2.0)
    fake.fail(kind.generate, *["busy"] * 10_000)
    with pytest.raises(WorkerError, match=r"8 times: status 503: .*The request queue is full"):
        generate(engine)


def test_a_request_that_keeps_failing_ends_the_call_and_names_the_server(attached, kind):
    engine, (fake,) = attached()
    fake.fail(kind.generate, *["reset"] * 1000)
    with pytest.raises(
        WorkerError, match=r"is alive, but has not answered one request 8 times: .*reset"
    ) as caught:
        generate(engine)
    assert fake.url in str(caught.value)
    assert fake.count(kind.load) >= 2, "nothing was tried to mend it"


@pytest.mark.parametrize(
    ("fault", "message"),
    [("garbage", "not JSON"), ("huge", "more than 1,.* bytes"), ("refuse", "refuses a request")],
)
def test_an_invalid_answer_ends_the_call_and_names_the_server(attached, fault, message, kind):
    engine, fakes = attached(2)
    fakes[1].fail(kind.generate, *[fault] * 50)
    with pytest.raises((WorkerError, ModelError), match=message) as caught:
        generate(engine)
    assert fakes[1].url in str(caught.value)
    assert fakes[0].url not in str(caught.value)


INVALID_RESPONSES = {
    "too short": lambda answer: {**answer, "output_ids": answer["output_ids"][:-1]},
    "an id beyond the vocabulary": lambda answer: {
        **answer,
        "output_ids": [97] * len(answer["output_ids"]),
    },
    "ids that are no numbers": lambda answer: {
        **answer,
        "output_ids": ["1"] * len(answer["output_ids"]),
    },
    "a NaN": lambda answer: with_logprobs(answer, float("nan")),
    "a log-prob above 0": lambda answer: with_logprobs(answer, 0.5),
    "a log-prob that is text": lambda answer: with_logprobs(answer, "-1"),
    "no log-probs": lambda answer: {
        **answer,
        "meta_info": {**answer["meta_info"], "output_token_logprobs": None},
    },
    "no meta_info": lambda answer: {"output_ids": answer["output_ids"]},
    "a list": lambda answer: [answer],
    "null": lambda answer: None,
    "versions with a gap": lambda answer: with_meta(
        answer, weight_versions=[{"version": "x", "start": 1, "end": 2}]
    ),
    "a log-prob that is no float": lambda answer: with_logprobs(answer, -(10**400)),
    "a log-prob that is infinite": lambda answer: with_logprobs(answer, float("-inf")),
    "a version that starts nowhere": lambda answer: with_version(answer, start=float("inf")),
    "a version that is a number": lambda answer: with_version(answer, version=1),
    "versions of somebody else with many digits": lambda answer: with_version(
        answer, version=f"{answer['meta_info']['weight_version'].partition('-')[0]}-{'9' * 5000}"
    ),
    "an answer to another request": lambda answer: with_meta(answer, id="somebody else's"),
    "many values": lambda answer: {**answer, "text": [{}] * 300_000},
    "deep values": lambda answer: {**answer, "text": json.loads("[" * 500 + "]" * 500)},
    "an unknown end": lambda answer: with_meta(answer, finish_reason={"type": "tired"}),
}


def with_meta(answer, **changes):
    return {**answer, "meta_info": {**answer["meta_info"], **changes}}


def with_version(answer, **changes):
    return with_meta(
        answer, weight_versions=[{**answer["meta_info"]["weight_versions"][0], **changes}]
    )


def with_logprobs(answer, score):
    return with_meta(
        answer, output_token_logprobs=[[score, token, None] for token in answer["output_ids"]]
    )


@only_sglang
@pytest.mark.parametrize("fault", INVALID_RESPONSES)
def test_an_invalid_response_is_refused_and_its_server_named(attached, fault):
    engine, (fake,) = attached()
    fake.spoil = INVALID_RESPONSES[fault]
    with pytest.raises(WorkerError) as caught:
        generate(engine)
    assert caught.value.code == ("F92" if "somebody else with" in fault else "F90")
    assert named_servers(caught.value) == {fake.url}


def test_a_silent_server_is_named_within_the_deadline(attached, kind):
    engine, (fake,) = attached(1, request_deadline_s=0.5)
    fake.fail(kind.generate, *["silence"] * 10)
    began = time.monotonic()
    with pytest.raises(HangError, match=rf"no answer to {kind.generate} within 0.5 s") as caught:
        generate(engine)
    assert time.monotonic() - began < 10
    assert named_servers(caught.value) == {fake.url}


def test_a_stream_is_closed_in_time_even_if_its_server_hangs(attached, kind, monkeypatch):
    monkeypatch.setattr("rlcli.backends._server_pool.ABORT_S", 0.3)
    monkeypatch.setattr("rlcli.backends._server_stream.ENDING_S", 0.3)
    engine, (fake,) = attached(1, request_deadline_s=60.0)
    fake.fail(kind.generate, *["silence"] * 10)
    fake.fail(kind.dialect.abort(None)[0], *["silence"] * 10)
    with engine.open(TinyTokenizer(), GenerationHyperparameters(max_new_tokens=4), 8) as stream:
        stream.submit(torch.tensor([3, 7]), 0)
        while not fake.count(kind.generate):
            time.sleep(0.01)
        began = time.monotonic()
    assert time.monotonic() - began < 5


def test_a_vanished_server_is_noticed_before_the_deadline():
    """In a separate network namespace whose only interface is taken down."""
    alone = ["unshare", "--map-root-user", "--net", sys.executable, "-P", "-c", VANISHES]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone[:3], "ip", "link"], capture_output=True).returncode
    ):
        pytest.skip("not tried: this machine does not allow network namespaces")
    done = subprocess.run(alone, capture_output=True, text=True, timeout=60)
    assert "gone after" in done.stdout, done.stdout + done.stderr
    assert float(done.stdout.split()[-1]) < 20


VANISHES = """
import socket, subprocess, threading, time

from rlcli.api import http_request as http
from rlcli.backends._server_http import Endpoint

http.KEEP_ALIVE.update({"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2})
http.KEEP_ALIVE["TCP_USER_TIMEOUT"] = 3000
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
silent = socket.create_server(("127.0.0.1", 0))
threading.Timer(0.5, subprocess.run, [["ip", "link", "set", "lo", "down"]]).start()
began = time.monotonic()
try:
    Endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}").get("/ready", 50)
except http.ServerGone as problem:
    print(problem, "gone after", time.monotonic() - began)
"""


def test_weights_set_by_another_client_are_detected(attached):
    engine, (fake,) = attached()
    fake.label = "theirs"
    with pytest.raises(WorkerError, match="another client"):
        generate(engine)


# -- attaching -------------------------------------------------------------------------------------


def having(**properties):
    """A function that sets properties of a fake."""

    def prepare(fake):
        vars(fake).update(properties)

    return prepare


def having_vocabulary(size):
    def prepare(fake):
        fake.model.vocabulary = size

    return prepare


def tokenizer(*extra_words):
    """At most 97 ids: each word is a token, and unknown words are `<pad>`."""
    words = {
        word: id_
        for id_, word in enumerate(["<pad>", "<eos>", *extra_words, *(f"w{n}" for n in range(80))])
    }
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return LightTokenizer(model, {"eos_token": "<eos>", "pad_token": "<pad>"})


@pytest.mark.parametrize(
    ("prepare", "error", "code", "message"),
    [
        (
            having_vocabulary(96),
            ModelError,
            "F32",
            "its vocabulary is smaller than the 97 ids here",
        ),
        (having_vocabulary(98), ModelError, "F32", "its vocabulary is larger than the 97 ids here"),
        (
            having(tokenizer=tokenizer("more")),
            ModelError,
            "F32",
            "the tokens of 'w0' are [3] there and [2] here",
        ),
        (having(scales=False), ModelError, "F93", "reports log-probs of a distribution other than"),
        (having(key="secret"), WorkerError, "F91", "rejects the API key"),
        (lambda fake: fake.fail("/server_info", "garbage"), WorkerError, "F90", "not JSON"),
        (
            lambda fake: fake.fail("/server_info", "refuse"),
            WorkerError,
            "F90",
            "refuses a question",
        ),
        (
            lambda fake: fake.fail("/server_info", "half"),
            WorkerError,
            "F91",
            "could not be asked about its model",
        ),
    ],
)
def test_a_server_of_another_model_is_refused_and_named(attached, prepare, error, code, message):
    expected_tokenizer = tokenizer()
    with pytest.raises(error) as caught:
        attached(2, prepare, expected_tokenizer)
    assert caught.value.code == code
    assert message in str(caught.value)
    assert len(named_servers(caught.value)) == 1


@only_sglang
def test_a_server_with_sampling_settings_of_its_own_is_refused(attached):
    with pytest.raises(ModelError, match="sampling settings of its own: min_p") as caught:
        attached(1, having(preferred={"min_p": 0.1, "top_k": 5}))
    assert caught.value.code == "F93"


@pytest.mark.parametrize("kind", [VLLM], ids=str, indirect=True)
def test_a_server_of_vllm_must_report_log_probs_at_the_temperature(attached):
    with pytest.raises(ModelError, match="reports raw_logprobs") as caught:
        attached(1, having(logprobs_mode="raw_logprobs"))
    assert (caught.value.code, caught.value.hint) == (
        "F93",
        "start it with --logprobs-mode processed_logprobs",
    )


@pytest.mark.parametrize("kind", [VLLM], ids=str, indirect=True)
def test_a_server_of_vllm_on_a_cpu_must_renew_a_tied_head(attached):
    with pytest.raises(ModelError, match="keeps its old weights") as caught:
        attached(1, having(worker_extension_cls=""))
    assert caught.value.code == "F93"
    assert "--worker-extension-cls rlcli_tied_head.TiedHead" in caught.value.hint
    attached(1, having(worker_extension_cls="", device="cuda"))


@pytest.mark.parametrize("kind", [VLLM], ids=str, indirect=True)
@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ({"top_p": 0.9}, "set generation.top_p=1"),
        ({"top_k": 5}, "set generation.top_k=0"),
        ({"min_new_tokens": 1}, "set generation.min_new_tokens=0"),
        ({"greedy": True, "temperature": 0.5}, "set generation.temperature=1"),
    ],
)
def test_vllm_refuses_settings_under_which_its_log_probs_differ(attached, setting, hint):
    engine, _ = attached()
    with pytest.raises(ModelError, match="a vllm server reports different log-probs") as caught:
        generate(engine, **setting)
    assert (caught.value.code, caught.value.hint) == ("F93", hint)


def test_tokenizers_are_compared_before_weights_are_sent(attached, kind):
    shared_tokenizer = tokenizer()
    _, (fake,) = attached(1, having(tokenizer=shared_tokenizer), shared_tokenizer)
    asked = [body["prompt"] for path, body in fake.calls if path == "/tokenize"]
    assert (asked[-1] if kind is VLLM else asked[0][-1]) == "w79"
    order = fake.paths()
    assert order.index("/tokenize") < order.index(kind.load)


def test_a_server_with_another_number_of_processes_is_refused(kind):
    expected = Expected("actor", None, 97, ranks=2, seconds=5.0)
    with (
        kind.fake(HashModel(97)) as fake,
        pytest.raises(UsageError, match="is 1 processes") as caught,
    ):
        check_model(Server(0, kind.dialect, Endpoint(fake.url)), expected)
    assert (caught.value.code, caught.value.hint) == ("R49", "models.actor.backend.args.tp=1")


def test_a_server_left_paused_by_an_earlier_run_is_continued(attached):
    engine, _ = attached(1, lambda fake: fake.pause(aborts=False))
    assert len(generate(engine).tokens) == 5


@pytest.mark.parametrize("kind", [VLLM], ids=str, indirect=True)
def test_a_server_left_asleep_by_an_earlier_run_is_woken(attached):
    engine, _ = attached(1, lambda fake: fake.release({"kv_cache", "weights"}))
    assert len(generate(engine).tokens) == 5


@pytest.mark.parametrize(
    "url",
    [
        "localhost:30000",
        "http://h:99999",
        "http://h:x",
        "http://[::1",
        "http://gpu..node:1",
        "ftp://h:1",
        "http://u:p@h:1",
        "http://h/v1",
    ],
)
def test_an_invalid_url_of_a_server_is_refused(kind, url):
    with pytest.raises(UsageError, match="must be like http:"):
        make_backend(ModelBackendAbstraction(kind.name, {"urls": [url]}))


def test_an_unreachable_server_is_named_after_the_start_deadline(attached):
    began = time.monotonic()
    with pytest.raises(WorkerError, match="was not ready within 1 s") as caught:
        attached(1, start_deadline_s=1.0, urls=["http://127.0.0.1:1"])
    assert time.monotonic() - began < 10
    assert (caught.value.code, named_servers(caught.value)) == ("F91", {"http://127.0.0.1:1"})


# -- slow servers ----------------------------------------------------------------------------------

SERVERS, QUICK_TOKEN_S, SLOW_TOKEN_S, LONG = 3, 0.002, 0.2, 60


@pytest.fixture
def one_is_slow(attached, monkeypatch):
    """An engine with three servers, of which the last is a hundred times slower."""
    # responses are short here
    for name, value in (("SHORTEST_S", 0.2), ("SILENCE", 3.0), ("REQUEST", 4)):
        monkeypatch.setattr(f"rlcli.backends._server_balance.{name}", value)
    monkeypatch.setattr("rlcli.backends._server_pool.LOOK_AGAIN_S", 0.05)
    engine, fakes = attached(SERVERS, request_deadline_s=60.0)
    for fake in fakes:
        fake.token_s = QUICK_TOKEN_S
    generate(engine, responses_per_prompt=6, max_new_tokens=20)  # what servers usually take
    fakes[-1].token_s = SLOW_TOKEN_S
    return engine, fakes


def responses_of(engine, count, **settings):
    """Responses of a stream, in order."""
    gconfig = GenerationHyperparameters(max_new_tokens=LONG, **settings)
    finished = {}
    with engine.open(TinyTokenizer(), gconfig, 8) as stream:
        for seed in range(count):
            stream.submit(torch.tensor([seed % 5 + 3, 7]), seed)
        while len(finished) < count:
            finished |= {response.number: response for response in stream.collect()}
    return [finished[number] for number in range(count)]


@pytest.mark.long
def test_responses_under_way_on_a_slow_server_are_continued_on_others(one_is_slow, kind):
    engine, fakes = one_is_slow
    responses = responses_of(engine, 18)
    prompts = [
        tuple(body.get("input_ids", body.get("token_ids")))
        for fake in fakes[:-1]
        for path, body in fake.calls
        if path == kind.generate
    ]
    continued = [prompt for prompt in prompts if len(prompt) > 4]
    assert continued, "what was sampled there was not sent to another server"
    for number, response in enumerate(responses):
        (segment,) = response.segments
        assert (segment.start, segment.end) == (0, len(response.tokens))
        logprobs = logprobs_of(fakes[0].model, (number % 5 + 3, 7), response.tokens.tolist())
        assert response.logprobs.tolist() == pytest.approx(logprobs, abs=1e-5)


def logprobs_of(model, prompt, tokens):
    """What a fake's model gives the tokens of a response."""
    return [
        log_softmax(model.logits((*prompt, *tokens[:place])))[token]
        for place, token in enumerate(tokens)
    ]


@pytest.mark.long
def test_whole_batches_are_the_same_whichever_server_is_slow(one_is_slow):
    """They are sampled again from their beginning, with their seeds."""
    engine, fakes = one_is_slow
    slow = generate(engine, responses_per_prompt=6, max_new_tokens=LONG)
    assert sum("/abort" in path for path in fakes[-1].paths()) > 0
    fakes[-1].token_s = QUICK_TOKEN_S
    quick = generate(engine, responses_per_prompt=6, max_new_tokens=LONG)
    assert [one.tolist() for one in slow.tokens] == [one.tolist() for one in quick.tokens]


@pytest.mark.long
def test_a_slow_server_that_does_not_end_responses_changes_none(one_is_slow, kind):
    engine, fakes = one_is_slow
    fakes[-1].fail(kind.dialect.abort(None)[0], *["refuse"] * 100)
    fakes[-1].token_s = 20 * QUICK_TOKEN_S
    assert len(responses_of(engine, 18)) == 18


# -- metrics of servers ----------------------------------------------------------------------------


def test_servers_report_their_load(attached):
    engine, fakes = attached(2)
    for fake in fakes:
        fake.token_s = 0.02
        fake.cached_tokens = fake.prompt_tokens = fake.preemptions = 1000  # of earlier runs
    engine._servers._read_metrics()
    engine.measured()
    engine._servers._next_reading = 0.0  # while responses are under way
    generate(engine, responses_per_prompt=4, max_new_tokens=40)
    fakes[0].preemptions += 10
    engine._servers._read_metrics()
    measured = {name: total / count for name, (total, count) in engine.measured().items()}
    assert 0 < measured["servers/running"] <= 20
    assert measured["servers/queued"] == 0
    assert 0.5 <= measured["servers/cache_hits"] <= 0.75, "each prompt was read at least once"
    assert measured["servers/preemptions"] == 10 / 20
    assert engine.measured() == {}


def test_readings_of_metrics_that_servers_do_not_answer_do_not_accumulate(attached, monkeypatch):
    servers, begun, end = attached()[0]._servers, [], threading.Event()
    monkeypatch.setattr(servers, "_read_metrics", lambda: (begun.append(True), end.wait()))
    for _ in range(5):
        servers._next_reading = 0.0
        servers.look(slow_only=True)
    end.set()
    servers._aside.shutdown(wait=True)
    assert len(begun) == 1


@pytest.mark.parametrize("fault", ["refuse", "huge", "reset", "garbage"])
def test_servers_without_usable_metrics_only_lack_them(attached, fault):
    engine, (fake,) = attached()
    fake.token_s = 0.01
    fake.fail("/metrics", *[fault] * 3)
    engine._servers._next_reading = 0.0
    assert len(generate(engine).tokens) == 5
    assert not any("running" in name for name in engine.measured())


@pytest.mark.parametrize(
    ("number", "result"),
    [("3", 3), ("3.5e1", 35), ("nan", None), ("+Inf", None), ("-1", None), ("0x1", None)],
)
def test_a_metric_is_a_finite_number_from_0_on(number, result):
    text = f'# TYPE a:b gauge\na:b{{x="}} 5"}} {number}\na:bc 7\n'
    assert read_metrics(text, {"running": "a:b"}).get("running") == result


def test_counters_that_appear_with_their_first_count_are_counted_from_0():
    """Those of a first reading are older than the run: they are of an attached server."""
    meter = Meter()
    meter.read(0, {"running": 0.0})
    for server in (0, 1):
        meter.read(server, {"running": 1.0, "prompt_tokens": 10.0, "cached_tokens": 4.0})
    meter.read(1, {"running": 1.0, "prompt_tokens": 30.0, "cached_tokens": 9.0})
    assert meter.take()["servers/cache_hits"] == (9.0, 30)


def test_metrics_of_several_processes_of_a_server_are_added():
    text = 'a:b{rank="0"} 1.0 1700000000\na:b{rank="1"} 2.0\na:b{rank="2"} nan\na:b{rank="3" 9\n'
    assert read_metrics(text, {"running": "a:b"}) == {"running": 3.0}
    assert read_metrics("a:b 1e308\n" * 3, {"running": "a:b"}) == {}


def test_a_call_records_when_its_requests_were_queued_and_running(attached, kind):
    engine, (fake,) = attached()
    fake.token_s = 0.01
    fake.calls.clear()
    with recorded() as timing:
        generate(engine, responses_per_prompt=2, max_concurrent_responses=3)
    states = Counter(span.kind for span in timing.spans)
    assert states["queued"] == states["running"] == fake.count(kind.generate)
    begins = sorted(span.began for span in timing.spans if span.kind == "running")
    ends = sorted(span.ended for span in timing.spans if span.kind == "running")
    assert all(begin >= end for begin, end in zip(begins[3:], ends, strict=False)), "three at once"


def test_requests_are_paused_while_their_stream_is(attached):
    engine, (fake,) = attached()
    fake.token_s, fake.most_at_once = 0.01, 0
    settings = GenerationHyperparameters(max_new_tokens=8)
    with recorded() as timing, engine.open(TinyTokenizer(), settings, 8) as stream:
        stream.submit(torch.tensor([3, 4]), 1)
        while not fake.most_at_once:
            time.sleep(0.001)
        stream.pause()
        stream.resume()
        while not stream.collect():
            time.sleep(0.001)
    assert {"running", "paused"} <= {span.kind for span in timing.spans}


@only_sglang

# -- updates ---------------------------------------------------------------------------------------


def test_every_update_flushes_cached_prefixes_and_changes_responses(attached):
    engine, (fake,) = attached()
    before = generate(engine, greedy=True).tokens
    follow(engine, seed=7)
    after = generate(engine, greedy=True).tokens
    assert [one.tolist() for one in after] != [one.tolist() for one in before]
    assert all(
        body["flush_cache"] for path, body in fake.calls if path.startswith("/update_weights")
    )


def test_after_a_failed_update_no_server_gets_requests(attached, kind):
    engine, fakes = attached(2)
    fakes[1].fail(kind.load, "refuse", "refuse")
    with pytest.raises(WorkerError, match="did not take the weights") as caught:
        follow(engine, seed=7)
    assert named_servers(caught.value) == {fakes[1].url}
    asked = [fake.count(kind.generate) for fake in fakes]
    with pytest.raises(WorkerError, match="did not take the weights"):
        generate(engine)
    assert [fake.count(kind.generate) for fake in fakes] == asked


def test_a_failed_update_is_retried_once(attached, kind):
    engine, fakes = attached(2)
    fakes[1].fail(kind.load, "reset")
    follow(engine, seed=7)
    assert fakes[0].label == fakes[1].label
    generate(engine)


def test_a_broken_connection_of_a_paused_request_leaves_the_new_weights(attached, kind):
    engine, (fake,) = attached(on_pause="in_place")
    fake.token_s = 0.02
    fake.calls.clear()
    load, settings = fake.load, GenerationHyperparameters(max_new_tokens=20)

    def break_and_load(folder):
        fake.load = load
        break_connections(engine, kind.generate)
        time.sleep(0.2)  # until that is noticed
        load(folder)

    with engine.open(TinyTokenizer(), settings, 8) as stream:
        numbers = {stream.submit(torch.tensor([3, 4]), seed) for seed in range(16)}
        while fake.count(kind.generate) < 16:
            time.sleep(0.001)
        stream.pause()
        fake.load = break_and_load
        follow(engine, seed=7)
        stream.resume()
        assert fake.label == engine._servers.label(engine.weights_number)
        while numbers:
            numbers -= {response.number for response in stream.collect()}
    assert fake.count(kind.load) == 1, "the server was alive"
    assert fake.count(kind.generate) > 16


def test_servers_that_report_different_weights_are_refused(attached):
    engine, fakes = attached(2)
    fakes[1].model.digest = lambda: "other"
    with pytest.raises(WorkerError, match="hold different weights") as caught:
        follow(engine, seed=7)
    assert named_servers(caught.value) == {fake.url for fake in fakes}


# -- memory ----------------------------------------------------------------------------------------


@only_sglang
def test_memory_is_released_and_resumed_in_order_around_an_update(attached):
    engine, (fake,) = attached()
    generate(engine)
    fake.calls.clear()
    engine.offload()
    engine.offload()
    follow(engine, seed=7)
    generate(engine)
    tagged = [
        (path.strip("/").partition("_")[0], *body.get("tags", ()))
        for path, body in fake.calls
        if body is not None
    ]
    order = list(dict.fromkeys(tagged))
    assert order == [
        ("release", "kv_cache"),
        ("release", "weights"),
        ("resume", "weights"),
        ("update",),
        ("weights",),
        ("resume", "kv_cache"),
        ("generate",),
    ]


def test_weights_are_sent_again_after_offloading(attached):
    engine, (fake,) = attached()
    expected = generate(engine, greedy=True).tokens
    engine.offload()
    assert fake.label == "lost"
    actual = generate(engine, greedy=True).tokens
    assert [one.tolist() for one in actual] == [one.tolist() for one in expected]


@pytest.mark.parametrize(("seen", "device", "args", "shares"), [
    (None, 3, {}, ["3"]),
    (None, 2, {"tp": 2, "servers": 2}, ["2,3", "4,5"]),
    ("4,5,6,7", 1, {"tp": 2}, ["5,6"]),
    ("GPU-a,GPU-b", 1, {"environment": {"HF_HOME": "/models"}}, ["GPU-b"]),
])  # fmt: skip
def test_each_server_gets_separate_devices(monkeypatch, seen, device, args, shares):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    backend, model = (
        SGLang(python="python", **args),
        SimpleNamespace(name="actor", device=torch.device("cuda", device)),
    )
    environments = [backend._environment(model, number) for number in range(backend.servers)]
    assert [one.pop("CUDA_VISIBLE_DEVICES") for one in environments] == shares
    assert environments == [dict(backend.environment)] * backend.servers


def test_a_server_without_enough_devices_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    model = SimpleNamespace(name="actor", device=torch.device("cuda", 1))
    with pytest.raises(
        UsageError, match="needs 2 devices, starting at device 1 of the node"
    ) as caught:
        SGLang(python="python", tp=2)._environment(model, 0)
    assert caught.value.code == "R50"


def test_no_devices_are_assigned_on_cpu_or_if_the_recipe_names_them():
    model = SimpleNamespace(name="actor", device=torch.device("cpu"))
    assert SGLang(python="python", tp=2)._environment(model, 0) == {}
    environment = {"CUDA_VISIBLE_DEVICES": "6,7"}
    model = SimpleNamespace(name="actor", device=torch.device("cuda", 0))
    assert (
        SGLang(python="python", tp=2, environment=environment)._environment(model, 0) == environment
    )


@pytest.mark.parametrize(
    ("servers", "reported", "dtype"),
    [
        (1, "bfloat16", torch.bfloat16),
        (1, "half", torch.float16),
        (1, "auto", torch.float32),
        (1, ["bfloat16"], torch.float32),
        (2, "bfloat16", torch.float32),  # the other one reports none
    ],
)
def test_existing_servers_are_sent_weights_in_the_dtype_that_they_report(
    attached, tmp_path, servers, reported, dtype
):
    def report(fake):
        fake.info["dtype"] = reported

    attached(servers, report)
    (file,) = tmp_path.glob("*/weights-*/*.safetensors")
    with safe_open(file, framework="pt") as stored:
        assert {stored.get_tensor(name).dtype for name in stored.keys()} == {dtype}  # noqa: SIM118


@pytest.mark.parametrize(
    ("rank", "expected"), [(2, ["http://a:1", "http://a:3"]), (3, ["http://a:2"])]
)
def test_the_ranks_of_a_role_divide_its_servers_wherever_they_are(rank, expected):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = DeviceMesh("cpu", torch.tensor([2, 3]).view(2, 1, 1, 1), mesh_dim_names=MESH_ORDER)
        backend = SGLang(urls=("http://a:1", "http://a:2", "http://a:3"))
        model = SimpleNamespace(name="rollout", device_mesh=mesh)
        assert [server.endpoint.url for server in backend._at_urls(model)] == expected
    finally:
        dist.destroy_process_group()
