"""Kills runs and resumes them: at random moments, `python kill_anywhere.py KILLS SEED FOLDER
ALGORITHM[:RANKS]…`, or once at each failpoint that they pass, `… failpoints SEED FOLDER …`.

Each run is a fork of this process (see `warm_command`). Prints a JSON object for each algorithm:
how many kills were made, after how many of them a checkpoint existed, and which ended runs differ
from one that was never killed; or a failure, where a row that was drawn is not accounted for, or
was trained on twice or with weights that are too old.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_results import check_accounting, check_staleness, is_free, result
from warm_command import finish, load_everything, start

TINY_MODEL = (
    "{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, "
    "num_attention_heads: 2, max_position_embeddings: 128, tie_word_embeddings: true}"
)
QUICK = ("log.trackers=[]", "log.plot=false", "checkpoint.every_steps=2", "train.steps=7")
ALGORITHMS = {
    "ppo": (
        "ppo_math",
        "models.actor.path=null",
        f"models.actor.scratch={TINY_MODEL}",
        "models.actor.tokenizer=builtin:arithmetic",
        "datasets.train.args.problems=10",
        "datasets.held_out.args.problems=2",
        "generation.max_new_tokens=4",
        "generation.responses_per_prompt=2",
        "train.prompts_per_step=4",
        "train.eval.every_steps=3",
        "ppo.adaptive_kl_ctl=true",
        "ppo.minibatches=2",
        "graph.actor_train.hooks={copy_to: ref, eta: 0.5}",
        "graph.reward_inf.interface.args.wrong_reward=-1.0",
        "ppo.discount=0.9",
    ),
    "sft": (
        "sft_math",
        f"models.actor.scratch={{_replace_: true, {TINY_MODEL[1:]}",
        "datasets.train.args.problems=10",
        "train.prompts_per_step=4",
    ),
    "dapo": (
        "grpo_math",
        "--with",
        "dapo",
        "models.actor.path=null",
        f"models.actor.scratch={TINY_MODEL}",
        "models.actor.tokenizer=builtin:arithmetic",
        "datasets.train.args.problems=10",
        "datasets.held_out.args.problems=2",
        "train.prompts_per_step=4",
        "train.prompts_per_draw=3",
        "train.eval.every_steps=3",
        "generation.responses_per_prompt=2",
        "generation.max_new_tokens=2",
        f"generation.stop_token_ids={list(range(2, 512, 3))}",
        "grpo.overlong_buffer=null",
        (
            "graph.reward_inf.interface={_replace_: true, type: weighted_sum, args: {weights: "
            "{seq_no_eos_mask: -1.0}}}"
        ),
    ),
    "generation": (
        "base/scored",
        f"models.actor.scratch={TINY_MODEL}",
        "models.actor.tokenizer=builtin:arithmetic",
        "datasets.held_out={type: arithmetic, args: {problems: 28}}",
        "train.eval.dataset=null",
        "train.epochs=null",
        "train.prompts_per_step=4",
        "generation.max_new_tokens=4",
        "generation.responses_per_prompt=2",
    ),
}
"""Name → a recipe and what makes it small. An algorithm joins all tests of resuming by an entry
here."""
ROLLOUT = (
    *(one for one in ALGORITHMS["ppo"] if "copy_to" not in one),
    "launch=local",
    "cluster.devices_per_node=2",
    "models.actor.rollout.devices=1",
    "models.actor.rollout.backend.args.dtype=float32",
)
POOL = "models.reward.backend=cpu_pool"
APART = {
    "ppo_rollout": ROLLOUT,
    "ppo_async": (*ROLLOUT, "--with", "async"),
    "ppo_partial": (
        *(setting.replace("new_tokens=4", "new_tokens=80") for setting in ROLLOUT),
        "--with",
        "async",
        "train.max_staleness=3",
        "train.prompts_per_draw=1",
    ),
    "ppo_pool": (*ALGORITHMS["ppo"], POOL),
    "ppo_async_pool": (*ROLLOUT, "--with", "async", POOL),
}
"""Runs with a separate rank for generation or a separate process for rewards, some ahead of
training; too slow for tests."""
AHEAD = {
    "ppo_ahead_1": (
        *(setting for setting in ALGORITHMS["ppo"] if "adaptive_kl_ctl" not in setting),
        "train.max_staleness=1",
        "train.prompts_per_draw=3",
    ),
    "dapo_ahead_4": (*ALGORITHMS["dapo"], "train.max_staleness=4"),
}
"""Runs that sample ahead of training: after a kill no sample is lost or repeated,
but metrics may differ."""


def quietly(arguments: list[str]) -> int:
    """Start a run whose messages are collected in log.txt; returns its pid."""
    return start([*arguments, "--quiet"], os.devnull, "log.txt")


def frozen(events: Path, process: subprocess.Popen) -> int:
    """Waits until a process of a run has frozen itself at a failpoint; returns its pid. `events`:
    the file of events of failpoints; `process`: the command."""
    while not (met := [json.loads(line) for line in _lines(events) if '"stop"' in line]):
        assert process.poll() is None, "the run ended before its failpoint"
        time.sleep(0.01)
    pid: int = met[0]["pid"]
    while "State:\tT" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)
    return pid


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def kill_and_resume(
    settings: tuple[str, ...], folder: Path, seconds: float, draws: random.Random
) -> tuple[list[float], int]:
    """A run that is killed at a random moment, perhaps again after it was resumed, and finally
    ends; returns the moments, and after how many of them a checkpoint existed."""
    moments, accounted = [], 0
    arguments = ["train", *settings, "--run-dir", str(folder)]
    for _ in range(draws.choice([1, 1, 2, 3])):
        pid, moment = quietly(arguments), draws.uniform(0, seconds)
        time.sleep(moment)
        os.kill(pid, signal.SIGKILL)
        finish(pid)
        wait_for_ranks(folder)
        moments.append(moment)
        accounted += check_accounting(folder)
        if (folder / "recipe.resolved.yaml").exists():
            arguments = ["resume", str(folder)]
        else:  # killed before there was a run to resume
            folder = folder.with_name(f"{folder.name}-again")
            arguments = ["train", *settings, "--run-dir", str(folder)]
    end(arguments)
    return moments, accounted


def wait_for_ranks(folder: Path) -> None:
    """They release the lock as they end."""
    while not is_free(folder / "lock"):
        time.sleep(0.01)


def end(arguments: list[str]) -> None:
    """A run, or the rest of one, that nothing interrupts."""
    code = finish(quietly(arguments))
    if code:
        raise SystemExit(f"{arguments} ended with {code}: {Path('log.txt').read_text()[-2000:]}")


@contextlib.contextmanager
def faults(text: str) -> Iterator[Path]:
    """Runs have these faults at failpoints; gives the file of their events."""
    events = Path("events.jsonl").absolute()
    events.unlink(missing_ok=True)
    variables = {
        "RLCLI_ENABLE_FAILPOINTS": "1",
        "RLCLI_FAILPOINTS": text,
        "RLCLI_FAILPOINT_EVENTS": str(events),
    }
    os.environ.update(variables)
    try:
        yield events
    finally:
        for name in variables:
            del os.environ[name]


def passages(settings: tuple[str, ...]) -> dict[str, int]:
    """Failpoint → how many times the process of a run that passes it most does so."""
    with faults("*:note") as events:
        end(["train", *settings, "--run-dir", "noted"])
    passed = [json.loads(line) for line in _lines(events)]
    counts = Counter((event["pid"], event["failpoint"]) for event in passed)
    most: dict[str, int] = {}
    for (_, point), count in counts.items():
        most[point] = max(count, most.get(point, 0))
    return most


def killed_at_failpoints(case: str, home: Path) -> dict[str, Any]:
    """The outcome of one kill at each failpoint, midway through a run that runs ahead."""
    settings = settings_of(case)
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    killed_at = {}
    for point, count in passages(settings).items():
        folder, passage = Path(point), (count + 1) // 2
        with faults(f"{point}:kill@{passage}") as events:
            finish(quietly(["train", *settings, "--run-dir", str(folder)]))
            wait_for_ranks(folder)
            if not _lines(events):
                raise SystemExit(f"{folder}: was not killed")
        check_accounting(folder)
        end(["resume", str(folder)])
        check_accounting(folder)
        check_staleness(folder)
        killed_at[point] = passage
    return {"killed_at": killed_at}


def reference_run(settings: tuple[str, ...]) -> tuple[float, dict[str, str]]:
    """A run that nothing interrupts, in the folder `reference`: its seconds and its result."""
    began = time.monotonic()
    if finish(quietly(["train", *settings, "--run-dir", "reference"])):
        raise SystemExit(Path("log.txt").read_text())
    return time.monotonic() - began, result(Path("reference"))


def settings_of(case: str) -> tuple[str, ...]:
    algorithm, _, ranks = case.partition(":")
    several = (f"cluster.devices_per_node={ranks}", "launch=local") if ranks else ()
    return (*(ALGORITHMS | APART | AHEAD)[algorithm], *several, *QUICK)


def killed(case: str, kills: int, seed: int, home: Path) -> dict[str, Any]:
    """The outcome of the runs of a case."""
    algorithm, settings = case.partition(":")[0], settings_of(case)
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    draws = random.Random(seed)
    seconds, expected = reference_run(settings)
    kill_count, accounted, differing = 0, 0, []
    while kill_count < kills:
        folder = Path(f"run{kill_count}")
        moments, checkpointed = kill_and_resume(settings, folder, seconds, draws)
        kill_count, accounted = kill_count + len(moments), accounted + checkpointed
        ended = next(path for path in sorted(Path().glob(f"{folder}*"), reverse=True))
        if algorithm in AHEAD or "async" in settings:
            check_accounting(ended)
            check_staleness(ended)
            continue
        wrong = [name for name, digest in result(ended).items() if expected.get(name) != digest]
        if wrong:
            differing.append({"run": str(ended), "differs": wrong})
    summary = {
        "kills": kill_count,
        "with_a_checkpoint": accounted,
        "seconds_of_a_run": round(seconds, 2),
    }
    return {**summary, "differing": differing}


def main(kills: str, seed: int, home: Path, cases: list[str]) -> None:
    load_everything()
    for number, case in enumerate(cases):
        try:
            if kills == "failpoints":
                summary = killed_at_failpoints(case, home / str(number))
            else:
                summary = killed(case, int(kills), seed, home / str(number))
        except SystemExit as failure:
            summary = {"failure": str(failure)}
        print(json.dumps({"case": case, **summary}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]).absolute(), sys.argv[4:])
