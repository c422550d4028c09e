"""Whole runs with real servers, on the CPU, whose weights change while responses are under way:
`make test-servers`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_servers import HOME, backend_arguments
from run_results import check_accounting, check_segments, check_staleness

STEPS, MAX_STALENESS, LONGEST = 8, 2, 1024
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
}
AT_ONCE = 3
OPTIONS = {
    "sglang": {
        "context_length": LONGEST,
        "max_total_tokens": 8 * LONGEST,
        "max_running_requests": AT_ONCE,
    },
    "vllm": {"max_model_len": LONGEST, "max_num_seqs": AT_ONCE},
}
"""Responses of hundreds of tokens come in waves: new weights meet some that are under way, however
long a training step takes."""
SETTINGS = (
    "models.actor.path=null",
    f"models.actor.scratch={json.dumps(MODEL)}",
    "models.actor.tokenizer=builtin:arithmetic",
    "models.actor.backend.args.lr=1e-3",
    "datasets.train.args.problems=40",
    "train.eval.dataset=null",
    f"generation.max_new_tokens={LONGEST - 64}",
    "generation.responses_per_prompt=2",
    "checkpoint.every_steps=2",
    "launch=local",
    "cluster.devices_per_node=2",
    *(f"models.{role}.devices=0" for role in ("actor", "critic", "ref")),
    "models.actor.rollout.devices=1",
    f"train.steps={STEPS}",
    f"train.max_staleness={MAX_STALENESS}",
    "train.prompts_per_step=4",
    "train.prompts_per_draw=1",
)
pytestmark = pytest.mark.timeout(1800)


EPISODES = (
    *(setting for setting in SETTINGS if not setting.startswith(("models.critic", "models.ref"))),
    f"graph.actor_gen.interface.args.turn_tokens={LONGEST // 4}",
)


@pytest.mark.parametrize("backend", list(OPTIONS))
def test_responses_go_on_with_new_weights_and_no_row_is_lost(backend, tmp_path):
    folder = train_with(backend, tmp_path, "ppo_math", "--with", "async", *SETTINGS)
    assert 1 < check_segments(folder) <= MAX_STALENESS + 1
    require_reported_load(folder)


@pytest.mark.parametrize("backend", list(OPTIONS))
def test_episodes_go_on_with_new_weights_and_no_row_is_lost(backend, tmp_path):
    folder = train_with(backend, tmp_path, "grpo_guess", "--with", "async_grpo", *EPISODES)
    assert 1 < check_segments(folder, has_turns=True) <= MAX_STALENESS + 1
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert all(record["actor_rollout/turns"] > 1 for record in records)
    assert all(record.get("actor/sampler_gap", 0.0) < 1e-3 for record in records)


def train_with(backend, home, recipe, *settings):
    """The folder of a run that has trained with a server of its own and lost nothing."""
    if not Path(os.environ.get(f"RLCLI_{backend.upper()}_PYTHON", "nowhere")).exists():
        pytest.skip(f"needs an environment with {backend}: make test-servers")
    described = {"type": backend, "args": backend_arguments(backend, **OPTIONS[backend])}
    described["args"] |= {"update": "disk", "on_pause": "retract"}
    folder = home / "run"
    command = [sys.executable, "-m", "rlcli", "train", recipe, *settings]
    command.append(f"models.actor.rollout.backend={json.dumps(described)}")
    ended = subprocess.run(
        [*command, "--run-dir", str(folder)],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(HOME)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert check_accounting(folder)
    check_staleness(folder)
    return folder


def require_reported_load(folder):
    """What servers report about their load is among a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))
    for name in ("running", "queued", "cache_hits", "preemptions"):
        assert any(f"actor_rollout/servers/{name}" in record for record in records), name
