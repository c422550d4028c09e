"""The cost of the master, from a few ranks to very many,
and how close a run is to its critical path.

    python tests/bench/scale.py [--ranks 64 256 1024] [--samples 100000] [--real 16]
                                [--staleness 1] [--json]

The ranks are simulated: they stand behind the transport's protocol, on a virtual clock, and answer
what real ones would after the seconds that a call takes, which are in proportion to a rank's
samples. What the master does is real, packing and reading messages included, and the virtual clock
advances meanwhile, except while other processes keep it from running. The graph generates on one
half of the ranks, and scores and trains on the other. `ms per call` is the time that the master
takes for one call of the graph, whether it computes or waits; its limit grows with ranks and
samples. `bytes per sample` is what it keeps of a sample that waits, `of critical path` the virtual
duration of the run over the least that the graph allows. With `--real` the same graph also runs in
that many processes that only sleep, which shows how far the simulation can be trusted. The exit
code is 1 if a figure is above its limit.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import MEANINGS, PROMPTS
from rlcli.checkpoint.completion import RunIdentity
from rlcli.messaging.messages import LARGEST, Reply, Report, Request, pack, unpack
from rlcli.observe.display import PlainDisplay
from rlcli.observe.outputs import open_outputs
from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe.graph import train_graph
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Recipe
from rlcli.runtime.master import MasterWorker
from rlcli.topology import Topology, plan_topology

TESTS = Path(__file__).parents[1]
MS_PER_CALL, MS_PER_RANK, MS_PER_SAMPLE = 20.0, 0.5, 0.05
"""Limits of what a call costs the master: about three times what it took on one core of a small
machine in 2026."""
BYTES_PER_SAMPLE, OF_CRITICAL_PATH = 2048, 1.15
"""Limits: what is kept of a sample, how long a run takes."""
SECONDS_PER_SAMPLE = 1.0
"""Of generating one on a simulated rank: 2,400 tokens, as of a large model.
Values and training take half each."""
TOKEN = b"0" * 32
PROMPT, RESPONSE, GROUP = 100, 300, 8
"""Tokens of a prompt and of each of its responses, and how many of these there are."""
RECIPE = """\
models:
  actor: {scratch: {model_type: llama}, tokenizer: "builtin:toy_rows", backend: toy}
  critic: {init: actor, head: value, backend: toy}
  reward: {backend: null}
datasets:
  train: {type: toy_rows}
graph:
  gen: {model: actor, call: generate, interface: {type: toy, args: {seconds: 1.0}},
        inputs: [packed_prompts], outputs: [packed_input_ids, prompt_mask, packed_logprobs]}
  score: {model: reward, call: inference, interface: toy_reward,
          inputs: [packed_input_ids], outputs: [rewards, solved]}
  value: {model: critic, call: inference, interface: {type: toy, args: {seconds: 0.5}},
          inputs: [packed_input_ids, packed_logprobs], outputs: [values]}
  train: {model: critic, call: train_step, interface: {type: toy, args: {seconds: 0.5}},
          inputs: [packed_input_ids, prompt_mask, packed_logprobs, rewards, solved, values]}
train: {eval: {dataset: null}}
cluster: {device: cpu}
launch: {type: local, startup_deadline: 600}
checkpoint: {save: false, at_end: false, on_stop: false, every_seconds: null}
log: {trackers: [], plot: false, samples_per_step: 0}
"""


def settings_of(ranks: int, prompts: int, steps: int, staleness: int = 0) -> tuple[str, ...]:
    half = ranks // 2
    first, second = f"0-{half - 1}", f"{half}-{ranks - 1}"
    return (
        f"cluster.devices_per_node={ranks}",
        f"models.actor.devices={first}",
        f"models.critic.devices={second}",
        f"models.reward.devices={second}",
        f"train.prompts_per_step={prompts}",
        f"train.steps={steps}",
        f"datasets.train.args.rows={prompts}",
        f"train.max_staleness={staleness}",
    )


def recipe_of(ranks: int, prompts: int, steps: int, staleness: int = 0) -> Recipe:
    return load_recipe("scale.yaml", settings_of(ranks, prompts, steps, staleness)).recipe


def simulated_recipe(ranks: int, prompts: int, steps: int, staleness: int) -> Recipe:
    """The same with calls that take as long as this many samples."""
    duration = SECONDS_PER_SAMPLE * prompts / (ranks // 2)
    durations = {"gen": duration, "value": duration / 2, "train": duration / 2}
    takes = (
        f"graph.{call}.interface.args.seconds={seconds}" for call, seconds in durations.items()
    )
    return load_recipe(
        "scale.yaml", (*settings_of(ranks, prompts, steps, staleness), *takes)
    ).recipe


def seconds_of(recipe: Recipe) -> dict[str, float]:
    """Call → its seconds."""
    return {
        mfc.name: float(mfc.interface_impl.args.get("seconds", 0.0)) for mfc in train_graph(recipe)
    }


class Stopwatch:
    """A clock of this thread that stands still while the thread could run but other processes have
    the processors."""

    def __init__(self) -> None:
        self._waits: int | None = None
        with suppress(OSError):
            self._waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def now(self) -> float:
        """Seconds. What is read before and after a wait does not belong together."""
        before = self._waited()
        while True:
            seconds, after = time.perf_counter(), self._waited()
            if after == before:
                return seconds - after
            before = after

    def _waited(self) -> float:
        """Seconds for which the thread has waited for a processor; 0 where this is unknown."""
        if self._waits is None:
            return 0.0
        _, nanoseconds, _ = os.pread(self._waits, 100, 0).split()
        return int(nanoseconds) / 1e9


class SimulatedRanks:
    """A transport that simulates all ranks of a run. Each rank and each data lane handles one
    request at a time."""

    def __init__(self, recipe: Recipe, counts_master: bool = False):
        """`counts_master`: the virtual clock advances while the master works,
        or waits for anything but a rank."""
        self.on_report: Callable[[Report], None] = lambda report: None
        self.now = 0.0
        """Virtual seconds."""
        self.of_master = 0.0
        """Seconds of the master, without those of the simulated ranks."""
        self.calls = 0
        """Calls of the graph, each counted once."""
        self.largest = 0
        """Bytes of the largest message."""
        self.before_call: Callable[[str], None] = lambda call: None
        """Called with the name of a call of the graph when it is first sent."""
        self._counts_master = counts_master
        self._stopwatch = Stopwatch()
        self._looked = self._stopwatch.now()
        self._recipe = recipe
        self._mfcs = {mfc.name: mfc for mfc in train_graph(recipe)}
        self._seconds = seconds_of(recipe)
        self._free: dict[tuple[int, str], float] = {}
        self._events: list[tuple[float, int, Request, int]] = []
        self._order = itertools.count()
        self._seen: set[int] = set()

    def send(self, rank: int, request: Request, limit: float) -> None:
        self._weigh(pack(request, TOKEN))
        with self._ranks_side():
            if request.op == "run_call" and request.number not in self._seen:
                self._seen.add(request.number)
                self.calls += 1
                self.before_call(request.name)
            who = rank, request.lane
            took = self._seconds[request.args["call"]] if request.op == "run_call" else 0.0
            done = max(self.now, self._free.get(who, 0.0)) + took
            self._free[who] = done
            heapq.heappush(self._events, (done, next(self._order), request, rank))

    def receive(self, deadline: float, waiting_for: str, limit: float | None = None) -> Reply:
        with self._ranks_side():
            done, _, request, rank = heapq.heappop(self._events)
            self.now = max(self.now, done)
            answer = pack(Reply(request.number, rank, self._answer(request, rank)), TOKEN)
        self._weigh(answer)
        reply: Reply = unpack([answer], TOKEN, Reply, Report)
        return reply

    def clock(self) -> float:
        return self.now

    def close(self) -> None:
        pass

    def _weigh(self, message: bytes) -> None:
        self.largest = max(self.largest, len(message))
        if len(message) > LARGEST:
            raise SystemExit(
                f"a message of {len(message)} bytes, and at most {LARGEST} can be sent"
            )

    def begin(self) -> None:
        """Count the master's time from now on."""
        self.of_master, self._looked = 0.0, self._stopwatch.now()

    @contextmanager
    def _ranks_side(self) -> Iterator[None]:
        """Everything between two of these is the master's time."""
        took = self._stopwatch.now() - self._looked
        self.of_master += took
        self.now += took if self._counts_master else 0.0
        yield
        self._looked = self._stopwatch.now()

    def _answer(self, request: Request, rank: int) -> dict[str, Any]:
        args = request.args
        if request.op == "open_datasets":
            rows = self._recipe.datasets["train"].args["rows"]
            return {"rows": {"train": rows}, "digests": {"train": "0"}} if rank == 0 else {}
        if request.op == "build":
            return {"without_state": [], "bytes": 0}
        if request.op == "load_rows":
            ids = [id_ for id_, _, _ in args["rows"]]
            metadata = {
                "answer": [1] * len(ids),
                "batch_index": [place for *_, place in args["rows"]],
            }
            batch = _described(ids, {PROMPTS: [[PROMPT]] * len(ids)}, metadata)
            names = {id_: f"row-{row}" for id_, row, _ in args["rows"]}
            return {"batch": batch.as_json(), "names": names, "missing": [], "length": None}
        if request.op == "run_call":
            return self._computed(args["call"], args["ids"])
        return {"bytes": 0} if request.op == "copy_weights" else {}

    def _computed(self, call: str, ids: list[str]) -> dict[str, Any]:
        """Answers differ in length, as those of a model do."""
        keys = self._mfcs[call].output_keys
        totals = [
            [PROMPT + RESPONSE + (len(id_) * 31 + number) % 97 for number in range(GROUP)]
            for id_ in ids
        ]
        lengths = {
            key: [[MEANINGS[key].rows(n) for n in group] for group in totals] for key in keys
        }
        batch = _described(ids, lengths).as_json() if keys else None
        return {
            "batch": batch,
            "stats": {} if keys else {"loss": 1.0, "grad_norm": 1.0},
            "scores": {},
            "counts": {},
            "dropped": {},
            "segments": {},
            "tokens": 0,
            "operations": 0.0,
            "rate": 0.0,
            "version": 0,
        }


def _described(
    ids: list[str],
    lengths: Mapping[str, list[list[int]]],
    metadata: Mapping[str, list[Any]] | None = None,
) -> SequenceSample:
    dtypes, rows = dict.fromkeys(lengths, torch.float32), dict.fromkeys(lengths, ())
    return SequenceSample(
        ids=list(ids),
        seqlens=dict(lengths),
        dtypes=dtypes,
        trailing_shapes=rows,
        metadata=dict(metadata or {}),
    )


def critical_path(recipe: Recipe, topology: Topology) -> float:
    """The minimum of seconds for any order of calls: the busier half works without a pause, after
    the other half has produced its first input or before it uses the last output."""
    seconds = seconds_of(recipe)
    work = dict.fromkeys(range(topology.world_size), 0.0)
    for mfc in train_graph(recipe):
        for rank in topology.placement(mfc.model_name).ranks:
            work[rank] += seconds[mfc.name]
    return max(work.values()) * (recipe.train.steps or 0) + min(work.values())


@dataclass(frozen=True)
class Figures:
    """Of one simulated run."""

    ranks: int
    samples: int
    """That wait at once."""
    milliseconds_per_call: float
    largest_message: int
    """Bytes."""
    of_critical_path: float


@contextmanager
def simulated(
    ranks: int, samples: int, steps: int, staleness: int = 0
) -> Iterator[tuple[MasterWorker, SimulatedRanks, Callable[[], None]]]:
    """A run that is ready to begin, whose master will hold `samples` at once;
    the function runs it."""
    recipe = simulated_recipe(ranks, samples // 2, steps, staleness)  # two steps are open at a time
    transport = SimulatedRanks(recipe, counts_master=True)
    with (
        RunDirectory.create(None, recipe.name) as run,
        PlainDisplay(sys.stderr, quiet=True) as display,
    ):
        identity = RunIdentity(run.run_id, "0", "0")
        master = MasterWorker(recipe, plan_topology(recipe), transport, run, display, identity)
        master.start()
        with open_outputs(run, display.warning) as outputs:
            yield master, transport, lambda: master.run(outputs)


def simulate(ranks: int, samples: int, staleness: int, steps: int = 3) -> Figures:
    with simulated(ranks, samples, steps, staleness) as (master, transport, run):
        began = transport.now
        transport.begin()
        run()
    least, took = critical_path(master.recipe, master.topology), transport.now - began
    return Figures(
        ranks, samples, 1e3 * transport.of_master / transport.calls, transport.largest, took / least
    )


def limit_of_a_call(run: Figures) -> float:
    """The limit of the master's time for a call, in milliseconds."""
    return MS_PER_CALL + MS_PER_RANK * run.ranks + MS_PER_SAMPLE * run.samples


def bytes_per_sample(samples: int = 4000) -> float:
    """Bytes that the master keeps of a sample, on average, when the first training step begins:
    half of the samples are about to be trained on, and the other half has just been generated."""
    with simulated(ranks=16, samples=samples, steps=2) as (master, transport, run):
        resident: list[float] = []

        def note(call: str) -> None:
            if call == "train" and not resident:
                gc.collect()
                resident.append(tracemalloc.get_traced_memory()[0] / len(master.calls.buffer))

        transport.before_call = note
        tracemalloc.start()
        run()
        tracemalloc.stop()
    return resident[0]


def seconds_of_a_real_step(ranks: int, steps: int = 12) -> float:
    """Seconds of a step in processes that sleep: the median over the later half of a run."""
    settings = settings_of(ranks, 4 * ranks, steps)
    command = [
        sys.executable,
        "-m",
        "rlcli",
        "train",
        "scale.yaml",
        *settings,
        "--run-dir",
        "real",
        "--quiet",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in Path("real/metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["time/step"] for record in records[steps // 2 :])


def prepare(home: Path) -> None:
    """A project with the toy components, which sleep for as long as the recipe says."""
    (home / "pyproject.toml").write_text("[tool.rlcli]\n")
    (home / "scale.yaml").write_text(RECIPE)
    for source in (TESTS / "launch" / "toy").glob("*.txt"):
        kind, _, name = source.stem.partition("-")
        (home / kind).mkdir(exist_ok=True)
        shutil.copy(source, home / kind / f"{name}.py")
    os.environ["RLCLI_PROJECT"] = str(home)
    os.environ["PYTHONPATH"] = str(TESTS.parent)
    os.chdir(home)


def measure(
    ranks: Sequence[int], samples: int, real: int, staleness: int
) -> tuple[dict[str, Any], list[str]]:
    """All figures, and what is above its limit."""
    runs = [simulate(number, samples, staleness) for number in ranks]
    figures: dict[str, Any] = {
        "runs": [asdict(run) for run in runs],
        "bytes_per_sample": bytes_per_sample(),
    }
    above = [
        (
            f"{run.ranks} ranks: a call costs {run.milliseconds_per_call:.0f} ms, "
            f"{limit_of_a_call(run):.0f} allowed"
        )
        for run in runs
        if run.milliseconds_per_call > limit_of_a_call(run)
    ]
    if figures["bytes_per_sample"] > BYTES_PER_SAMPLE:
        above.append(
            f"a sample takes {figures['bytes_per_sample']:.0f} bytes, {BYTES_PER_SAMPLE} allowed"
        )
    paths = {f"{run.ranks} simulated ranks": run.of_critical_path for run in runs}
    if real:
        least = max(seconds_of(recipe_of(real, 4 * real, 1)).values())
        figures["real"] = {
            "ranks": real,
            "seconds_per_step": seconds_of_a_real_step(real),
            "least": least,
        }
        paths[f"{real} real ranks"] = figures["real"]["seconds_per_step"] / least
    above += [
        f"{name}: {ratio:.2f} of the critical path"
        for name, ratio in paths.items()
        if ratio > OF_CRITICAL_PATH
    ]
    return figures, above


def table(figures: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{'ranks':>6} {'samples':>8} {'ms per call':>12} {'largest message':>16} "
        f"{'of critical path':>17}"
    )
    for run in figures["runs"]:
        yield (
            f"{run['ranks']:>6} {run['samples']:>8} {run['milliseconds_per_call']:>12.0f} "
            f"{run['largest_message'] / 1e6:>13.2f} MB {run['of_critical_path']:>17.3f}"
        )
    yield f"bytes per sample: {figures['bytes_per_sample']:.0f}"
    if "real" in figures:
        real = figures["real"]
        yield (
            f"{real['ranks']} real processes: {real['seconds_per_step']:.2f} s a step; at least "
            f"{real['least']:.2f} s"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--real", type=int, default=0, help="also run in so many processes")
    parser.add_argument(
        "--staleness", type=int, default=0, help="train.max_staleness: samples are made ahead"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        prepare(Path(home))
        figures, above = measure(options.ranks, options.samples, options.real, options.staleness)
    print(
        json.dumps(figures | {"above": above})
        if options.json
        else "\n".join([*table(figures), *above])
    )
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
