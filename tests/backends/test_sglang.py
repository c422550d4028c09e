"""sglang: what becomes of servers that fail, of their weights and of their memory."""

import json
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from attached_engines import follow
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rlcli.api.config import ModelBackendAbstraction
from rlcli.api.model import make_backend
from rlcli.backends._sglang_attach import Expected, check_model
from rlcli.backends._sglang_http import Endpoint
from rlcli.backends._sglang_server import Server
from rlcli.backends.sglang import SGLang
from rlcli.checkpoint.light_tokenizer import LightTokenizer
from rlcli.errors import HangError, ModelError, UsageError, WorkerError
from rlcli.testing.backend import BackendContract
from rlcli.testing.backend.generation import generate
from rlcli.testing.fake_sglang import FakeSGLang, HashModel
from rlcli.testing.tiny_models import tiny_model

# -- servers that fail -----------------------------------------------------------------------------------------------

QUICK = {"weights_folder": None, "start_deadline_s": 20.0, "request_deadline_s": 5.0, "update_deadline_s": 10.0}


@pytest.fixture
def attached(tmp_path):
    """engine(n, **args) of n fakes in this process, and these; the last of them is prepared."""
    with ExitStack() as stack:
        lm = tiny_model("llama")

        def make(count=1, prepare=lambda fake: None, tokenizer=None, **args):
            fakes = [stack.enter_context(FakeSGLang(HashModel(lm.config.vocab_size))) for _ in range(count)]
            prepare(fakes[-1])
            checks = BackendContract()
            checks.name, checks.args = "sglang", {
                **QUICK, "urls": [fake.url for fake in fakes], "update": "disk", "weights_folder": str(tmp_path),
                **args,
            }  # fmt: skip
            engine = checks.engine("llama", lm=lm, tokenizer=tokenizer)
            stack.callback(engine.close)
            return engine, fakes

        yield make


def names(error):
    """The servers that an error names."""
    return {word.strip("',;:)") for word in str(error).split() if word.startswith("http://")}


def test_requests_go_to_the_server_with_the_least_to_do(attached):
    engine, fakes = attached(2)
    for fake in fakes:
        fake.token_s = 0.005
        fake.calls.clear()
    generate(engine, responses_per_prompt=4)
    assert sum(fake.count("/generate") for fake in fakes) == 20
    assert all(fake.count("/generate") >= 6 for fake in fakes)


def test_no_more_responses_at_once_than_allowed(attached):
    engine, (fake,) = attached(1, max_concurrent_requests=3)
    fake.token_s = 0.005
    generate(engine, responses_per_prompt=4)
    assert fake.most_at_once == 3
    fake.most_at_once = 0
    generate(engine, responses_per_prompt=2, max_concurrent_responses=2)
    assert fake.most_at_once == 2


@pytest.mark.parametrize("fault", ["reset", "half"])
def test_a_connection_that_breaks_is_tried_again(attached, fault):
    engine, (fake,) = attached()
    wanted = generate(engine)
    fake.fail("/generate", fault, fault)
    found = generate(engine)
    assert [one.tolist() for one in found.tokens] == [one.tolist() for one in wanted.tokens]
    assert fake.count("/update_weights_from_disk") == 1


def test_connections_that_break_at_once_do_not_make_a_server_dead(attached):
    engine, (fake,) = attached()
    undisturbed = generate(engine, responses_per_prompt=4)
    fake.fail("/generate", *["reset"] * 10)
    repeated = generate(engine, responses_per_prompt=4)
    assert [one.tolist() for one in repeated.tokens] == [one.tolist() for one in undisturbed.tokens]
    assert fake.count("/update_weights_from_disk") == 1


def test_a_request_that_breaks_every_connection_ends_the_call_and_names_the_server(attached):
    engine, (fake,) = attached()
    fake.fail("/generate", *["reset"] * 1000)
    with pytest.raises(WorkerError, match=r"lives, but has not answered one request 8 times: .*reset") as caught:
        generate(engine)
    assert fake.url in str(caught.value)
    assert fake.count("/update_weights_from_disk") >= 2, "nothing was tried to mend it"


@pytest.mark.parametrize(
    ("fault", "said"),
    [("garbage", "not JSON"), ("huge", "more than 1,.* bytes"), ("refuse", "refuses a request")],
)
def test_answers_that_no_such_server_gives_end_the_call_and_name_it(attached, fault, said):
    engine, fakes = attached(2)
    fakes[1].fail("/generate", *[fault] * 50)
    with pytest.raises((WorkerError, ModelError), match=said) as caught:
        generate(engine)
    assert fakes[1].url in str(caught.value)
    assert fakes[0].url not in str(caught.value)


SPOILED = {
    "too short": lambda made: {**made, "output_ids": made["output_ids"][:-1]},
    "an id beyond the vocabulary": lambda made: {**made, "output_ids": [97] * len(made["output_ids"])},
    "ids that are no numbers": lambda made: {**made, "output_ids": ["1"] * len(made["output_ids"])},
    "a NaN": lambda made: with_scores(made, float("nan")),
    "a log-prob above 0": lambda made: with_scores(made, 0.5),
    "a log-prob that is text": lambda made: with_scores(made, "-1"),
    "no log-probs": lambda made: {**made, "meta_info": {**made["meta_info"], "output_token_logprobs": None}},
    "no meta_info": lambda made: {"output_ids": made["output_ids"]},
    "a list": lambda made: [made],
    "null": lambda made: None,
    "versions with a gap": lambda made: with_meta(made, weight_versions=[{"version": "x", "start": 1, "end": 2}]),
    "a log-prob that is no float": lambda made: with_scores(made, -(10**400)),
    "a log-prob that is infinite": lambda made: with_scores(made, float("-inf")),
    "a version that starts nowhere": lambda made: with_version(made, start=float("inf")),
    "a version that is a number": lambda made: with_version(made, version=1),
    "versions of somebody else with many digits": lambda made: with_version(
        made, version=f"{made['meta_info']['weight_version'].partition('-')[0]}-{'9' * 5000}"
    ),
    "an answer to another request": lambda made: with_meta(made, id="somebody else's"),
    "many values": lambda made: {**made, "text": [{}] * 300_000},
    "deep values": lambda made: {**made, "text": json.loads("[" * 500 + "]" * 500)},
    "an unknown end": lambda made: with_meta(made, finish_reason={"type": "tired"}),
}


def with_meta(made, **changes):
    return {**made, "meta_info": {**made["meta_info"], **changes}}


def with_version(made, **changes):
    return with_meta(made, weight_versions=[{**made["meta_info"]["weight_versions"][0], **changes}])


def with_scores(made, score):
    return with_meta(made, output_token_logprobs=[[score, token, None] for token in made["output_ids"]])


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_response_is_refused_and_its_server_named(attached, how):
    engine, (fake,) = attached()
    fake.spoil = SPOILED[how]
    with pytest.raises(WorkerError) as caught:
        generate(engine)
    assert caught.value.code == ("F92" if "somebody else with" in how else "F90")
    assert names(caught.value) == {fake.url}


def test_a_silent_server_is_named_within_the_deadline(attached):
    engine, (fake,) = attached(1, request_deadline_s=0.5)
    fake.fail("/generate", *["silence"] * 10)
    began = time.monotonic()
    with pytest.raises(HangError, match=r"no answer to /generate within 0.5 s") as caught:
        generate(engine)
    assert time.monotonic() - began < 10
    assert names(caught.value) == {fake.url}


def test_a_connection_whose_other_end_has_vanished_is_noticed_before_its_deadline():
    """In a network of its own, in which nothing arrives any more from one moment on."""
    alone = ["unshare", "--map-root-user", "--net", sys.executable, "-P", "-c", VANISHES]
    if shutil.which("unshare") is None or subprocess.run([*alone[:3], "ip", "link"], capture_output=True).returncode:
        pytest.skip("not tried: this machine gives no network of one's own")
    done = subprocess.run(alone, capture_output=True, text=True, timeout=60)
    assert "gone after" in done.stdout, done.stdout + done.stderr
    assert float(done.stdout.split()[-1]) < 20


VANISHES = """
import socket, subprocess, threading, time

from rlcli.backends import _sglang_http as http

http.KEEP_ALIVE.update({"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 3000})
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
silent = socket.create_server(("127.0.0.1", 0))
threading.Timer(0.5, subprocess.run, [["ip", "link", "set", "lo", "down"]]).start()
began = time.monotonic()
try:
    http.Endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}").get("/ready", 50)
except http.ServerGone as problem:
    print(problem, "gone after", time.monotonic() - began)
"""


def test_weights_that_somebody_else_gave_a_server_are_noticed(attached):
    engine, (fake,) = attached()
    fake.label = "theirs"
    with pytest.raises(WorkerError, match="somebody else"):
        generate(engine)


# -- attaching -------------------------------------------------------------------------------------------------------


def set_to(**properties):
    """Prepares a fake."""

    def prepare(fake):
        vars(fake).update(properties)

    return prepare


def vocabulary(size):
    def prepare(fake):
        fake.model.vocabulary = size

    return prepare


def tokenizer(*more):
    """Of 97 ids at most: a word is a token, and what it does not know another one."""
    words = {word: id_ for id_, word in enumerate(["<pad>", "<eos>", *more, *(f"w{n}" for n in range(80))])}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return LightTokenizer(made, {"eos_token": "<eos>", "pad_token": "<pad>"})


@pytest.mark.parametrize(
    ("prepare", "error", "code", "said"),
    [
        (vocabulary(96), ModelError, "F32", "its vocabulary is smaller than the 97 ids here"),
        (vocabulary(98), ModelError, "F32", "its vocabulary is larger than the 97 ids here"),
        (set_to(tokenizer=tokenizer("more")), ModelError, "F32", "the tokens of 'w0' are [3] there and [2] here"),
        (set_to(scales=False), ModelError, "F93", "reports log-probs of another distribution"),
        (set_to(preferred={"min_p": 0.1, "top_k": 5}), ModelError, "F93", "sampling settings of its own: min_p"),
        (set_to(key="secret"), WorkerError, "F91", "wants another key"),
        (lambda fake: fake.fail("/server_info", "garbage"), WorkerError, "F90", "not JSON"),
        (lambda fake: fake.fail("/server_info", "refuse"), WorkerError, "F90", "refuses a question"),
        (lambda fake: fake.fail("/model_info", "half"), WorkerError, "F91", "could not be asked about its model"),
    ],
)  # fmt: skip
def test_a_server_of_something_else_is_refused_and_named(attached, prepare, error, code, said):
    made = tokenizer()
    with pytest.raises(error) as caught:
        attached(2, prepare, made)
    assert caught.value.code == code
    assert said in str(caught.value)
    assert len(names(caught.value)) == 1


def test_a_server_of_the_same_model_is_attached_to_with_its_tokenizer(attached):
    made = tokenizer()
    _, (fake,) = attached(1, set_to(tokenizer=made), made)
    ((_, asked),) = [call for call in fake.calls if call[0] == "/tokenize"]
    assert asked["prompt"][-1] == "w79"
    order = fake.paths()
    assert order.index("/tokenize") < order.index("/update_weights_from_disk")


def test_a_server_of_other_processes_would_wait_for_weights_in_vain():
    with FakeSGLang(HashModel(97)) as fake, pytest.raises(UsageError, match="is 1 processes") as caught:
        check_model(Server(0, Endpoint(fake.url)), Expected("actor", None, 97, ranks=2, seconds=5.0))
    assert (caught.value.code, caught.value.hint) == ("R49", "models.actor.backend.args.tp=1")


def test_a_server_that_an_earlier_run_left_paused_continues(attached):
    engine, _ = attached(1, lambda fake: fake.answer("/pause_generation", {"mode": "retract"}))
    assert len(generate(engine).tokens) == 5


@pytest.mark.parametrize(
    "url",
    ["localhost:30000", "http://h:99999", "http://h:x", "http://[::1", "ftp://h:1", "http://u:p@h:1", "http://h/v1"],
)
def test_what_is_no_url_of_a_server_is_refused_before_anything_starts(url):
    with pytest.raises(UsageError, match="must be like http:"):
        make_backend(ModelBackendAbstraction("sglang", {"urls": [url]}))


def test_a_server_that_is_not_there_is_named_once_its_time_is_over(attached):
    began = time.monotonic()
    with pytest.raises(WorkerError, match="was not ready within 1 s") as caught:
        attached(1, start_deadline_s=1.0, urls=["http://127.0.0.1:1"])
    assert time.monotonic() - began < 10
    assert (caught.value.code, names(caught.value)) == ("F91", {"http://127.0.0.1:1"})


# -- updates ---------------------------------------------------------------------------------------------------------


def test_every_update_flushes_the_prefixes_and_changes_the_responses(attached):
    engine, (fake,) = attached()
    before = generate(engine, greedy=True).tokens
    follow(engine, seed=7)
    after = generate(engine, greedy=True).tokens
    assert [one.tolist() for one in after] != [one.tolist() for one in before]
    assert all(body["flush_cache"] for path, body in fake.calls if path.startswith("/update_weights"))


def test_if_one_of_two_servers_does_not_take_an_update_none_is_asked_again(attached):
    engine, fakes = attached(2)
    fakes[1].fail("/update_weights_from_disk", "refuse", "refuse")
    with pytest.raises(WorkerError, match="did not take the weights") as caught:
        follow(engine, seed=7)
    assert names(caught.value) == {fakes[1].url}
    asked = [fake.count("/generate") for fake in fakes]
    with pytest.raises(WorkerError, match="did not take the weights"):
        generate(engine)
    assert [fake.count("/generate") for fake in fakes] == asked


def test_a_server_that_fails_an_update_once_is_given_it_again(attached):
    engine, fakes = attached(2)
    fakes[1].fail("/update_weights_from_disk", "reset")
    follow(engine, seed=7)
    assert fakes[0].label == fakes[1].label
    generate(engine)


def test_servers_that_say_they_hold_different_weights_are_found_out(attached):
    engine, fakes = attached(2)
    fakes[1].model.digest = lambda: "other"
    with pytest.raises(WorkerError, match="hold different weights") as caught:
        follow(engine, seed=7)
    assert names(caught.value) == {fake.url for fake in fakes}


# -- memory ----------------------------------------------------------------------------------------------------------


def test_memory_is_given_back_and_taken_in_order_and_nothing_is_asked_in_between(attached):
    engine, (fake,) = attached()
    generate(engine)
    fake.calls.clear()
    engine.offload()
    engine.offload()
    follow(engine, seed=7)
    generate(engine)
    tagged = [
        (path.strip("/").partition("_")[0], *body.get("tags", ())) for path, body in fake.calls if body is not None
    ]
    order = list(dict.fromkeys(tagged))
    assert order == [
        ("release", "kv_cache"), ("release", "weights"), ("resume", "weights"), ("update",), ("weights",),
        ("resume", "kv_cache"), ("generate",),
    ]  # fmt: skip


def test_a_call_after_offloading_has_the_weights_again(attached):
    engine, (fake,) = attached()
    wanted = generate(engine, greedy=True).tokens
    engine.offload()
    assert fake.label == "lost"
    found = generate(engine, greedy=True).tokens
    assert [one.tolist() for one in found] == [one.tolist() for one in wanted]


@pytest.mark.parametrize(("seen", "device", "args", "shares"), [
    (None, 3, {}, ["3"]),
    (None, 2, {"tp": 2, "servers": 2}, ["2,3", "4,5"]),
    ("4,5,6,7", 1, {"tp": 2}, ["5,6"]),
    ("GPU-a,GPU-b", 1, {"environment": {"HF_HOME": "/models"}}, ["GPU-b"]),
])  # fmt: skip
def test_each_server_gets_devices_of_its_own(monkeypatch, seen, device, args, shares):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    backend, model = SGLang(python="python", **args), SimpleNamespace(name="actor", device=torch.device("cuda", device))
    found = [backend._environment(model, number) for number in range(backend.servers)]
    assert [one.pop("CUDA_VISIBLE_DEVICES") for one in found] == shares
    assert found == [dict(backend.environment)] * backend.servers


def test_a_server_without_enough_devices_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    model = SimpleNamespace(name="actor", device=torch.device("cuda", 1))
    with pytest.raises(UsageError, match="to take 2 devices, from device 1 of the node on") as caught:
        SGLang(python="python", tp=2)._environment(model, 0)
    assert caught.value.code == "R50"


def test_servers_of_ranks_without_gpus_or_with_devices_of_the_recipe_get_none():
    model = SimpleNamespace(name="actor", device=torch.device("cpu"))
    assert SGLang(python="python", tp=2)._environment(model, 0) == {}
    own = {"CUDA_VISIBLE_DEVICES": "6,7"}
    model = SimpleNamespace(name="actor", device=torch.device("cuda", 0))
    assert SGLang(python="python", tp=2, environment=own)._environment(model, 0) == own
