"""Runs whose weights change while responses are under way."""

import json

import pytest
from fake_server import HashModel
from fake_sglang import FakeSGLang
from fake_vllm import FakeVLLM
from run_results import check_accounting, check_segments, check_staleness

from rlcli.datasets.arithmetic import Arithmetic
from rlcli.observe.critical_path import critical_path, steps_of
from rlcli.observe.trace import read_trace

pytestmark = pytest.mark.timeout(420)

STEPS = 6
TOKEN_S = 0.05
"""Seconds that a server takes for a token."""
APART = (
    "--with",
    "async",
    "launch=local",
    "cluster.devices_per_node=2",
    *(f"models.{role}.devices=0" for role in ("actor", "critic", "ref")),
    "models.actor.rollout.devices=1",
    f"train.steps={STEPS}",
    "train.prompts_per_step=2",
)
LONG = (
    "models.actor.rollout.backend.args.dtype=float32",
    "generation.max_new_tokens=400",
    "generation.min_new_tokens=390",
)
"""Responses that take longer than a training step."""


@pytest.fixture
def run_ahead(train, tiny_ppo):
    tiny = [
        setting.replace("max_position_embeddings: 128", "max_position_embeddings: 512")
        for setting in tiny_ppo
        if not setting.startswith(("train.steps", "generation.", "train.prompts_per_step"))
    ]

    def run(*settings, generation=LONG):
        ended = train("ppo_math", *tiny, *APART, *generation, "train.max_staleness=3", *settings)
        assert ended.code == 0, ended.err
        check_accounting(ended.folder)
        check_staleness(ended.folder)
        return ended

    return run


@pytest.mark.long
def test_responses_go_on_with_new_weights_and_the_ledger_says_with_which(run_ahead):
    run = run_ahead("models.actor.backend.args.lr=1e-3")
    assert check_segments(run.folder) > 1
    check_timeline(run)
    for record in run.steps:
        ages = [value for name, value in record.items() if name.startswith("staleness/tokens_")]
        assert sum(ages) == pytest.approx(1)
        assert 1 <= record["segments/mean"] <= record["segments/max"] <= 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "fake"), [("sglang", FakeSGLang), ("vllm", FakeVLLM)])
def test_responses_of_servers_go_on_with_new_weights(run_ahead, backend, fake):
    size = len(Arithmetic.make_tokenizer())
    with fake(HashModel(size), token_s=TOKEN_S) as server:
        args = {"urls": [server.url], "update": "disk", "on_pause": "retract"}
        described = json.dumps({"type": backend, "args": args})
        settings = (f"models.actor.rollout.backend={described}", "generation.max_new_tokens=60")
        run = run_ahead("models.actor.rollout.transfer=delta", generation=settings)
    assert check_segments(run.folder) > 1
    assert max(record["segments/max"] for record in run.steps) > 1
    sent = [record["bytes/actor_train.copy_to"] for record in run.steps]
    assert max(sent[1:]) < sent[0], "after the first copy only changes are sent"
    loads = [record.get("actor_rollout/servers/running", 0) for record in run.steps]
    assert max(loads) > 0
    check_timeline(run)
    assert states_of_requests(run) == {"queued", "running", "paused"}


def states_of_requests(run):
    """The states of requests to the server that a timeline shows."""
    spans = [each.span for step in steps_of(read_trace(run.folder)) for each in step.traced]
    return {span.kind for span in spans if span.track.startswith("server 0")}


def check_timeline(run):
    """What the ranks of a run do and wait for, and the critical path, fill each step."""
    steps = {step.number: step for step in steps_of(read_trace(run.folder))}
    for record in run.steps:
        step, seconds = steps[record["step"]], record["time/step"]
        path = sum(stretch.seconds for stretch in critical_path(step))
        assert path == pytest.approx(seconds, rel=0.02)
        idle = sum(step.inside(wait.span) for wait in step.waits if wait.process == 1)
        assert idle == pytest.approx(record["time/idle/actor_rollout"], abs=0.02 * seconds)


@pytest.mark.long
def test_with_one_segment_new_weights_wait_for_all_responses(run_ahead):
    assert check_segments(run_ahead("train.max_segments=1").folder) == 1


@pytest.mark.exhaustive
def test_log_probs_of_all_segments_are_close_to_those_of_the_trainer(run_ahead):
    """With a learning rate of 0 all versions are the same weights, and every token's log-prob is
    what the trainer computes for it."""
    run = run_ahead("models.actor.backend.args.lr=0")
    assert check_segments(run.folder) > 1
    drifts = [record["actor/policy_drift"] for record in run.steps if record["staleness/max"]]
    assert max(map(abs, drifts)) < 1e-4
