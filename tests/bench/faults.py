"""Runs that are disturbed by one fault each, and how they end.

    python tests/bench/faults.py [--seeds 0:100] [--home FOLDER] [--keep]

A seed selects a fault, a mode and a moment, and prints them; the same seed gives the same fault
again. The run is on two emulated nodes with a rank each, a reward in a pool and a sampler with
separate weights: toy components for `staleness 0` and `staleness 2`, a tiny model and two servers
for `servers`. Its supervisor, master, agents, torchrun, ranks, pool and agents of servers are the
real ones, as forks (see `warm_processes`).

A run that the fault ends must do so with the code of `errors.py` and name the culprit, leave no
process behind, and end well once it is resumed. Its metrics, ledger, samples and models must then
be those of an undisturbed run, bit for bit; with `staleness 2`, where they depend on timing, each
sample must have been trained on once and none may be too old.
The exit code is 1 if one of them fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("bench", "e2e", "fakes")]

from fake_server_path import fake_python_path  # noqa: E402
from fault_kinds import KINDS, MODES, STEPS, Fault, Pace  # noqa: E402
from fill_disk import fill  # noqa: E402
from run_results import check_accounting, check_staleness, is_free, result  # noqa: E402
from tcp_proxy import TcpProxy  # noqa: E402
from toy_project import RECIPE, TINY_PPO, make_project  # noqa: E402
from warm_command import load_everything  # noqa: E402
from warm_processes import warm_processes  # noqa: E402

from rlcli.launch.node import FAILED, LOST  # noqa: E402
from rlcli.launch.orphans import adopt_orphans  # noqa: E402
from rlcli.messaging.control import CONTROL_FILE, Control  # noqa: E402
from rlcli.runtime.worker_main import MEETING  # noqa: E402

GONE_WITHIN = 5.0
"""Seconds for the processes of a run that has ended to be gone."""
ENDS_WITHIN = 240.0
"""Seconds for a run to end, on a busy machine."""
FULL_DISK = ("disk", "full")
DISK_MB = 8
HAS_MOUNTS = "RLCLI_FAULTS_MOUNTS"
"""Variable of a bench that is already in a private mount namespace."""
NODES = ("launch=local", "cluster.nodes=2", "models.reward.backend=cpu_pool")
QUICK = ("log.trackers=[]", "log.plot=false", f"train.steps={STEPS}")
TOY = (
    "toy.yaml",
    "models.actor.devices='0'",
    "models.critic.devices='0'",
    "models.reward.devices='0'",
    "models.actor.rollout={backend: toy, devices: '1'}",
)


class Wrong(Exception):
    """A disturbed run misbehaved."""


# -- runs ------------------------------------------------------------------------------------------


def settings(mode: str, home: Path, pace: Pace = Pace.FAST) -> tuple[str, ...]:
    """The arguments of a run."""
    if mode != "servers":
        seconds = f"toy.seconds={pace.call_seconds}"
        return (*TOY, *NODES, *QUICK, seconds, f"train.max_staleness={mode.split()[1]}")
    backend = {
        "type": "sglang",
        "args": {
            "python": sys.executable,
            "update": "disk",
            "servers": 2,
            "options": {"token_s": pace.token_seconds},
            "environment": {"PYTHONPATH": f"{home / 'path'}:{TESTS.parent}:{TESTS / 'fakes'}"},
        },
    }
    rollout = f"models.actor.rollout={json.dumps({'devices': '1', 'backend': backend})}"
    tiny = (setting for setting in TINY_PPO if not setting.startswith(("train.steps", "log.")))
    devices = (f"models.{role}.devices='0'" for role in ("actor", "critic", "ref", "reward"))
    return ("ppo_math", *tiny, *devices, *NODES, *QUICK, rollout)


class Run:
    """`rlcli <arguments>` in a separate process, the supervisor of a run."""

    def __init__(self, folder: Path, *arguments: str, **variables: str):
        self.folder = folder
        self.log = folder.with_suffix(".err")
        with self.log.open("a") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlcli", *arguments],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def errors(self) -> str:
        return self.log.read_text(errors="replace")

    def steps_done(self) -> int:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=-1)

    def is_up(self) -> bool:
        return (self.folder / "procs.json").exists() and (self.folder / "metrics.jsonl").exists()

    def pid_of(self, name: str) -> int:
        """The id of a process, as recorded by the run."""
        return next(
            one["pid"]
            for one in json.loads((self.folder / "procs.json").read_text())
            if one["name"] == name
        )

    def wait_until(self, fault: Fault) -> bool:
        """Wait for the moment of a fault; returns False if the run ends before it."""
        end = time.monotonic() + ENDS_WITHIN
        while not (
            fault.variant == "killed early" or (self.is_up() and self.steps_done() >= fault.step)
        ):
            if self.process.poll() is not None:
                return False
            if time.monotonic() > end:
                raise Wrong(f"does not reach step {fault.step} within {ENDS_WITHIN:g} s")
            time.sleep(0.02)
        time.sleep(fault.delay * (5 if fault.variant == "killed early" else 1))
        return self.process.poll() is None

    def end(self) -> int:
        try:
            code = self.process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            raise Wrong(f"has not ended within {ENDS_WITHIN:g} s") from None
        _wait_until_all_have_ended()
        return code


def _wait_until_all_have_ended() -> None:
    """This process adopts all processes that a run leaves behind."""
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), GONE_WITHIN)
    left = [process for process in alive if process.is_running()]
    for process in left:
        process.kill()
    psutil.wait_procs(left, GONE_WITHIN)
    if left:
        raise Wrong(f"{len(left)} processes are left {GONE_WITHIN:g} s after its end")


# -- faults ----------------------------------------------------------------------------------------


def disturb(fault: Fault, run: Run) -> None:
    """Cause the fault now."""
    number = signal.SIGSTOP if fault.variant == "frozen" else signal.SIGKILL
    processes = {
        "rank": f"rank{fault.victim}",
        "agent": f"node{fault.victim}",
        "pool": "reward-pool0",
        "server": f"actor_rollout-server{fault.victim}",
    }
    with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
        match fault.kind, fault.variant:
            case ("server", "killed"):
                for process in psutil.Process(run.pid_of(processes["server"])).children(True):
                    process.kill()
            case ("supervisor", "its master killed"):
                psutil.Process(run.process.pid).children()[0].kill()
            case ("supervisor", "asked to stop"):
                run.process.terminate()
            case ("supervisor", _):
                run.process.kill()
            case ("disk", "full"):
                fill(run.folder.parent / "filler")
            case (kind, _):
                os.kill(run.pid_of(processes[kind]), number)


def run_disturbed(fault: Fault, arguments: Sequence[str], folder: Path) -> tuple[Run, int, bool]:
    """The run, its exit code, and whether the fault happened."""
    every = 1 if fault.kind == "disk" else 2
    limits = [f"launch.max_restarts={fault.restarts}", f"checkpoint.every_steps={every}"]
    variables: dict[str, str] = {}
    if (fault.kind, fault.variant) == ("rank", "frozen"):
        limits.append("launch.step_deadline=10")
    if fault.kind == "disk":
        limits += ["checkpoint.max_failed_saves=0", "checkpoint.keep_last=1"]
    events = folder.with_suffix(".events")
    if fault.kind == "disk" and fault.variant != "full":
        spec = f"{fault.checkpoint_step}:{fault.variant}@{fault.step + 1}-1000"
        variables = {
            "RLCLI_FAILPOINTS": spec,
            "RLCLI_ENABLE_FAILPOINTS": "1",
            "RLCLI_FAILPOINT_EVENTS": str(events),
        }
    train = ("train", *arguments, *limits, "--run-dir", str(folder))
    if fault.kind == "network":
        return _run_through_proxies(fault, train, folder)
    run = Run(folder, *train, **variables)
    if variables:
        code = run.end()
        return run, code, events.exists()
    happened = run.wait_until(fault)
    if happened:
        disturb(fault, run)
    code = run.end()
    (folder.parent / "filler").unlink(missing_ok=True)
    return run, code, happened


def _run_through_proxies(fault: Fault, train: Sequence[str], folder: Path) -> tuple[Run, int, bool]:
    """The second node is started by hand, and reaches the master through proxies."""
    elsewhere = folder.with_suffix(".elsewhere")
    elsewhere.mkdir()
    run = Run(folder, *train, "launch.by_hand=true")
    with folder.with_suffix(".node1").open("w") as log:
        second = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlcli.launch.node", str(folder), "1"],
            cwd=elsewhere,
            env={**os.environ, MEETING: str(elsewhere)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    while not (folder / "meeting" / CONTROL_FILE).exists():
        if run.process.poll() is not None:
            raise Wrong(f"did not start: {run.errors}")
        time.sleep(0.02)
    control = Control.read(folder / "meeting")
    requests, pulses = (
        TcpProxy(url.removeprefix("tcp://")) for url in (control.requests, control.pulses)
    )
    with requests, pulses:
        replace(
            control, requests=f"tcp://{requests.address}", pulses=f"tcp://{pulses.address}"
        ).write(elsewhere)
        if happened := run.wait_until(fault):
            if fault.variant == "reset":
                requests.reset()
            for proxy in (requests, pulses):
                proxy.is_stalled = fault.variant == "stalled"
        code, expected = run.process.wait(ENDS_WITHIN), (FAILED, LOST) if happened else (0,)
        if second.wait(ENDS_WITHIN) not in expected:
            raise Wrong(f"the second node ended with {second.returncode}")
    return run, run.end() or code, happened


def check_ending(fault: Fault, run: Run, code: int) -> None:
    """Raises Wrong if a disturbed run has not ended as expected."""
    expected = fault.ending
    survives = 0 if fault.restarts else expected.codes[0]
    if code not in (*expected.codes, survives):
        raise Wrong(f"ended with exit code {code}, not {survives}: {run.errors[-1500:]}")
    if expected.names and not re.search(expected.names, run.errors, re.DOTALL):
        raise Wrong(
            f"ended with exit code {code}, but its error is not "
            f"{expected.names!r}: {run.errors[-1500:]}"
        )


def resumed(fault: Fault, run: Run, arguments: Sequence[str]) -> Path:
    """The folder of the run after resuming it, or after starting it again if there was nothing to
    resume."""
    folder = run.folder
    while not is_free(folder / "lock"):
        time.sleep(0.01)
    if (folder / "recipe.resolved.yaml").exists():
        again = ["launch.by_hand=false"] if fault.kind == "network" else []
        second = Run(folder, "resume", str(folder), *again)
    else:
        folder = folder.with_name(f"{folder.name}-again")
        second = Run(folder, "train", *arguments, "--run-dir", str(folder))
    if code := second.end():
        raise Wrong(f"resuming ended with exit code {code}: {second.errors[-1500:]}")
    return folder


# -- the bench -------------------------------------------------------------------------------------


class Bench:
    """Runs in one folder; the undisturbed run of each mode is made when it is first needed."""

    def __init__(self, home: Path):
        self.home = home
        self._results: dict[str, dict[str, str]] = {}

    def undisturbed(self, mode: str) -> dict[str, str]:
        if mode not in self._results:
            run = Run(
                self.home / mode.replace(" ", "-"),
                "train",
                *settings(mode, self.home),
                "--run-dir",
                str(self.home / mode.replace(" ", "-")),
            )
            if code := run.end():
                raise SystemExit(f"the undisturbed run ended with exit code {code}: {run.errors}")
            self._results[mode] = result(run.folder)
        return self._results[mode]

    def outcome(self, fault: Fault) -> str:
        """A summary of how the run of a fault has ended. Raises Wrong."""
        arguments = settings(fault.mode, self.home, fault.pace)
        expected = self.undisturbed(fault.mode)
        with self._folder(fault) as folder_of_runs:
            run, code, happened = run_disturbed(fault, arguments, folder_of_runs / "run")
            if not happened:
                raise Wrong(f"ended with exit code {code} before its fault: {run.errors[-1500:]}")
            check_ending(fault, run, code)
            folder = resumed(fault, run, arguments) if code else run.folder
            try:
                check_accounting(folder)
                check_staleness(folder)
            except SystemExit as problem:
                raise Wrong(str(problem)) from None
            if fault.mode != "staleness 2":
                _compare(result(folder), expected)
        exact = "ledger exact" if fault.mode == "staleness 2" else "bit-equal"
        return f"exit {code}, resumed, {exact}" if code else f"survived, {exact}"

    @contextlib.contextmanager
    def _folder(self, fault: Fault) -> Iterator[Path]:
        """A folder for its runs, on a separate small disk for the fault of a full disk."""
        folder = self.home / f"seed{fault.seed}"
        folder.mkdir()
        is_small = (fault.kind, fault.variant) == FULL_DISK
        if is_small:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(folder)], check=True
            )
        yield folder
        if is_small:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _compare(results: dict[str, str], expected: dict[str, str]) -> None:
    differing = [name for name in {*results, *expected} if results.get(name) != expected.get(name)]
    if differing:
        raise Wrong(f"differs from the undisturbed run in {', '.join(sorted(differing))}")


def measure(
    seeds: Sequence[int], home: Path, keep: bool = False, say: Callable[[str], None] = print
) -> int:
    """How many runs failed. Prints a line for each and a table."""
    home.mkdir(parents=True, exist_ok=True)
    make_project(home)
    (home / "toy.yaml").write_text(RECIPE)
    fake_python_path(home)
    os.environ |= {
        "RLCLI_PROJECT": str(home),
        "PYTHONPATH": str(TESTS.parent),
        "OMP_NUM_THREADS": "1",
    }
    os.chdir(home)
    adopt_orphans()
    bench, counts, failures = Bench(home), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for fault in map(Fault.of, seeds):
        cell, began = (fault.kind, fault.mode), time.monotonic()
        counts[cell] += 1
        try:
            outcome = bench.outcome(fault)
        except Wrong as problem:
            failures[cell] += 1
            outcome = f"FAILED: {problem}"
        seconds = time.monotonic() - began
        say(f"seed {fault.seed:3}  {fault.mode:11}  {fault!s:60}  {outcome}  ({seconds:.0f} s)")
        if not keep and "FAILED" not in outcome:
            shutil.rmtree(home / f"seed{fault.seed}", ignore_errors=True)
    say(f"{'':12}" + "".join(f"{mode:>14}" for mode in MODES))
    for kind in KINDS:
        cells = [(kind, mode) for mode in MODES]
        figures = (
            f"{counts[cell] - failures[cell]}/{counts[cell]}" if counts[cell] else "-"
            for cell in cells
        )
        say(f"{kind:12}" + "".join(f"{figure:>14}" for figure in figures))
    say(f"{sum(counts.values())} runs, {sum(failures.values())} failed")
    return sum(failures.values())


def in_private_mounts(arguments: Sequence[str]) -> None:
    """Continue in a private mount namespace, in which disks may be mounted."""
    if os.environ.get(HAS_MOUNTS) != "1":
        os.environ[HAS_MOUNTS] = "1"
        os.execvp(
            "unshare",
            ["unshare", "-rm", sys.executable, str(Path(__file__).absolute()), *arguments],
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", default="0:100", help="FIRST:END, or numbers with commas between them"
    )
    parser.add_argument("--home", type=Path, help="folder for the runs; by default a temporary one")
    parser.add_argument("--keep", action="store_true", help="keep the folders of runs that passed")
    options = parser.parse_args(arguments)
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end)) if end else [int(seed) for seed in first.split(",")]
    if any((fault.kind, fault.variant) == FULL_DISK for fault in map(Fault.of, seeds)):
        in_private_mounts(sys.argv[1:] if arguments is None else arguments)
    load_everything()
    with tempfile.TemporaryDirectory() as temporary, warm_processes():
        home = options.home or Path(temporary)
        failed = measure(seeds, home.absolute(), options.keep, lambda line: print(line, flush=True))
        os.chdir("/")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
