"""Kills processes of runs and resumes them: at random moments, `python kill_anywhere.py KILLS SEED
FOLDER ALGORITHM[:RANKS]…`, or the master once at each failpoint that it passes, `… failpoints SEED
FOLDER …`.

Each run is a fork of this process (see `warm_command`). Prints a JSON object for each algorithm:
which processes were killed, how often a checkpoint existed when a run was resumed, how many runs
played episodes again, and which ended runs differ from one that was never killed; or a failure,
where a row that was drawn is not accounted for, or was trained on twice or with weights that are
too old.
"""

import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flaky_game import FORGETFUL, NAME, make_flaky_project
from run_processes import FATAL, disturb
from run_results import check_accounting, check_staleness, forks, is_free, plays_again, result
from warm_command import ENVIRONMENT, HOME, finish, load_everything, start

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
        f"generation.stop_token_ids={list(range(2, 380, 3))}",
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
GAME = (
    "grpo_guess",
    f"models.actor.scratch={{_replace_: true, {TINY_MODEL[1:]}",
    "models.actor.backend.args.warmup_steps=0",
    f"graph.actor_gen.interface.args={{environment: {NAME}, max_error_fraction: 1.0}}",
    "graph.actor_gen.interface.args.environment_args={pause: 0.02}",
    "graph.actor_gen.output_key_remap={rewards: won}",
    (
        "graph.reward_inf={model: reward, call: inference, interface: {type: weighted_sum, args: "
        "{weights: {won: 1.0, seq_no_eos_mask: -0.5}}}}"
    ),
    "datasets.train={_replace_: true, type: arithmetic, args: {problems: 10}}",
    "datasets.held_out.args.problems=4",
    "generation.responses_per_prompt=4",
    "train.prompts_per_step=4",
    "train.eval.every_steps=3",
)
"""Games of several turns, of which some fail."""
GAME_AND_POOL = (*GAME, "models.reward={backend: cpu_pool}")
WITHOUT_POOL = (*GAME, "models.reward={backend: null}")
GAME_APART = (
    *WITHOUT_POOL,
    "launch=local",
    "cluster.devices_per_node=2",
    "models.actor.rollout.devices=1",
    "models.actor.rollout.backend.args.dtype=float32",
)
STALE = ("--with", "async_grpo", "train.max_staleness=2", "train.prompts_per_draw=1")


def with_forks(settings: tuple[str, ...]) -> tuple[str, ...]:
    """The same games with a chat template that rewrites earlier turns, so that each turn begins
    another row."""
    roomy = (setting.replace("embeddings: 128", "embeddings: 512") for setting in settings)
    return (*roomy, f"models.actor.tokenizer={FORGETFUL}", "generation.max_new_tokens=256")


EPISODES = {
    "guess": GAME_AND_POOL,
    "guess_rollout": GAME_APART,
    "guess_server": WITHOUT_POOL,
    "guess_ahead": (*GAME_AND_POOL, "train.max_staleness=2", "train.prompts_per_draw=1"),
    "guess_async": (*GAME_APART, *STALE),
    "guess_async_server": (*WITHOUT_POOL, *STALE),
    "guess_forks": with_forks(GAME_AND_POOL),
    "guess_forks_async": (*with_forks(GAME_APART), *STALE),
}
"""Runs whose policy plays episodes: in a process with a pool, on ranks of its own, on a server; or
in several rows."""


LIMIT = 400
"""Seconds after which a run of a few seconds hangs."""


def outcomes_of(kills: int, seed: int, folder: Path, *cases: str) -> dict[str, dict[str, Any]]:
    """Case → the outcome of its runs, which another process disturbs."""
    command = [sys.executable, __file__, str(kills), str(seed), str(folder), *cases]
    path = f"{HOME}:{HOME}/tests/fakes"
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {outcome.pop("case"): outcome for outcome in map(json.loads, done.stdout.splitlines())}


def quietly(arguments: list[str]) -> int:
    """Start a run whose messages are collected in log.txt; returns its pid."""
    return start([*arguments, "--quiet"], os.devnull, "log.txt", seconds=LIMIT)


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
    settings: tuple[str, ...],
    folder: Path,
    seconds: float,
    kinds: Counter[str],
    draws: random.Random,
) -> int:
    """A run of which processes are killed at random moments, perhaps again after it was resumed,
    and which finally ends; counts the kinds of these processes, and returns how often a checkpoint
    existed."""
    accounted = 0
    arguments = ["train", *settings, "--run-dir", str(folder)]
    for _ in range(draws.choice([1, 1, 2, 3])):
        pid = quietly(arguments)
        killed = disturb(pid, seconds, kinds, draws)
        code = finish(pid)
        if code and not set(killed) & set(FATAL):
            raise SystemExit(f"{folder} ended with {code} after kills of {killed}: {log_text()}")
        wait_for_ranks(folder)
        kinds.update(killed)
        accounted += check_accounting(folder)
        if (folder / "recipe.resolved.yaml").exists():
            arguments = ["resume", str(folder)]
        else:  # killed before there was a run to resume
            folder = folder.with_name(f"{folder.name}-again")
            arguments = ["train", *settings, "--run-dir", str(folder)]
    end(arguments)
    return accounted


def wait_for_ranks(folder: Path) -> None:
    """They release the lock as they end."""
    late = time.monotonic() + LIMIT
    while not is_free(folder / "lock"):
        if time.monotonic() > late:
            raise SystemExit(f"{folder}: a process of the run is still there: {log_text()}")
        time.sleep(0.01)


def end(arguments: list[str]) -> None:
    """A run, or the rest of one, that nothing interrupts."""
    code = finish(quietly(arguments))
    if code:
        raise SystemExit(f"{arguments} ended with {code}: {log_text()}")


def log_text() -> str:
    """The last messages of runs."""
    return Path("log.txt").read_text()[-6000:]


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
    settings, killed_at = prepare(case, home), {}
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


def prepare(case: str, home: Path) -> tuple[str, ...]:
    """Enter the folder of a case; returns the settings of its runs."""
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    algorithm, _, ranks = case.partition(":")
    settings = (ALGORITHMS | APART | AHEAD | EPISODES)[algorithm]
    if algorithm in EPISODES:
        make_flaky_project(home)
    if algorithm.endswith("_server"):
        settings += (f"models.actor.rollout.backend={json.dumps(fake_server(home))}",)
    if ranks:
        settings += (f"cluster.devices_per_node={ranks}", "launch=local")
    return (*settings, *QUICK)


def fake_server(home: Path) -> dict[str, Any]:
    """The backend that starts a server, which is a fake. Needs `tests/fakes` in PYTHONPATH."""
    from fake_server_path import fake_python_path

    environment = {"PYTHONPATH": fake_python_path(home)}
    args = {"python": sys.executable, "update": "disk", "environment": environment}
    return {"type": "sglang", "args": args}


def is_exact(settings: tuple[str, ...]) -> bool:
    """Whether a disturbed run must end as an undisturbed one does, bit by bit."""
    return not any("async" in setting or "max_staleness" in setting for setting in settings)


def killed(case: str, kills: int, seed: int, home: Path) -> dict[str, Any]:
    """The outcome of the runs of a case."""
    settings = prepare(case, home)
    draws = random.Random(seed)
    seconds, expected = reference_run(settings)
    kinds, accounted, replayed, differing = Counter[str](), 0, 0, []
    numbers = itertools.count()
    while kinds.total() < kills:
        folder = Path(f"run{next(numbers)}")
        accounted += kill_and_resume(settings, folder, seconds, kinds, draws)
        ended = max(Path().glob(f"{folder}*"))
        replayed += plays_again(ended)
        if not is_exact(settings):
            check_accounting(ended)
            check_staleness(ended)
            continue
        wrong = [name for name, digest in result(ended).items() if expected.get(name) != digest]
        if wrong:
            differing.append({"run": str(ended), "differs": wrong})
    return {
        "kills": kinds.total(),
        "killed": dict(kinds),
        "with_a_checkpoint": accounted,
        "replayed": replayed,
        "forks": forks(ended),
        "seconds_of_a_run": round(seconds, 2),
        "differing": differing,
    }


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
