"""How far a run is from the least time that its generation and its training take.

    python tests/bench/bound.py [--servers 64] [--steps 80] [--json]

The master, its admission and its messages are real; the ranks and the servers behind one of them
are simulated on a virtual clock (`scale.py`). The lengths of responses are log-normal, the longest
per cent more than 20 times the median; training takes as long as generating a batch. The client's
own rules (`backends/_server_balance.py`) choose servers and take responses from slow ones; what a
server was working on when it dies is repeated.

`of the least`: virtual seconds over the larger of all training and all generation, above staleness
0; over the critical path of the same lengths at staleness 0. `idle`: share of the time in which the
trainer waits. `cost`: seconds that a fault adds, over those of a server's start: one dies, or
becomes ten times slower. The exit code is 1 if a figure misses its limit.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from scale import SimulatedRanks, prepare

from rlcli.backends._server_balance import Balance, Flight
from rlcli.checkpoint.completion import RunIdentity
from rlcli.messaging.messages import Request
from rlcli.observe.display import PlainDisplay
from rlcli.observe.outputs import open_outputs
from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe.resolve import load_recipe
from rlcli.recipe.schema import Recipe
from rlcli.runtime.master import MasterWorker
from rlcli.topology import plan_topology

SLOTS, GROUP = 2, 4
"""Responses that a server samples at once, and responses to a prompt."""
SIGMA, LONGEST = 1.3, 30.0
"""Of the logarithm of a response's seconds, whose median is 1; and where a response is cut off."""
PROMPTS_PER_SLOT = 2
"""Prompts of a step for each slot of all servers."""
PAUSE_S, START_S = 0.2, 60.0
"""Seconds for which new weights pause all servers, and those that a server takes to start."""
LOOK_S, READ_S = 1.0, 0.1
"""Seconds between looks for silent servers, and those for which a server that continues a response
reads what there is of it."""
TOKENS_PER_S = 100
OF_LEAST, OF_CRITICAL_PATH, FASTER, IDLE, OF_START = 1.05, 1.10, 2.5, 0.05, 2.0
"""Limits."""
RECIPE = """\
models:
  actor: {scratch: {model_type: llama}, tokenizer: "builtin:toy_rows", backend: toy, devices: 0,
          rollout: {backend: inference, devices: 1}}
  reward: {backend: null, devices: 1}
datasets:
  train: {type: toy_rows}
graph:
  gen: {model: actor, call: generate, interface: toy, inputs: [packed_prompts],
        outputs: [packed_input_ids, prompt_mask, packed_logprobs]}
  score: {model: reward, call: inference, interface: toy_reward,
          inputs: [packed_input_ids], outputs: [rewards, solved]}
  train: {model: actor, call: train_step, interface: {type: toy, args: {seconds: 1.0}},
          inputs: [packed_input_ids, prompt_mask, packed_logprobs, rewards, solved]}
train: {eval: {dataset: null}}
cluster: {device: cpu, devices_per_node: 2}
launch: {type: local, startup_deadline: 600}
checkpoint: {save: false, at_end: false, on_stop: false, every_seconds: null}
log: {trackers: [], plot: false, samples_per_step: 0}
"""


@cache
def seconds_of(sample: str) -> tuple[float, ...]:
    """Of each response to a prompt."""
    drawn = random.Random(sample)
    return tuple(min(drawn.lognormvariate(0.0, SIGMA), LONGEST) for _ in range(GROUP))


@dataclass
class Server:
    speed: float = 1.0
    is_ready: bool = True


@dataclass(eq=False)
class Response:
    chunk: Chunk
    sample: str
    seconds: float
    """That are left of it, at full speed."""
    flight: Flight | None = None
    """Its request, once a server has it."""
    can_move: bool = True
    versions: list[tuple[int, float]] = field(default_factory=list)
    """(version, when it was taken) since the response began."""

    def spans(self, end: float) -> list[tuple[int, int]]:
        """(version, tokens) of its segments."""
        ends = [begin for _, begin in self.versions[1:]] + [end]
        return [
            (version, max(1, round((until - begin) * TOKENS_PER_S)))
            for (version, begin), until in zip(self.versions, ends, strict=True)
        ]


@dataclass(eq=False)
class Chunk:
    request: Request
    rank: int
    began: float
    version: int
    missing: int
    segments: dict[str, list[list[tuple[int, int]]]] = field(default_factory=dict)


class SimulatedServers(SimulatedRanks):
    """Rank 1 generates with servers. What happens there has its time in the same heap as the
    answers of ranks."""

    def __init__(self, recipe: Recipe, servers: int, fault: Fault | None = None):
        super().__init__(recipe)
        self.servers = [Server() for _ in range(servers)]
        self.busy = Counter[str]()
        """Call → seconds."""
        self._balance = Balance(servers)
        self._continues = recipe.train.max_staleness > 0
        """Whether responses that are taken from a server are continued, not repeated."""
        self._looks = False
        """Whether a look for silent servers is due."""
        self._version = 0
        self._waiting: deque[Response] = deque()
        self._made: dict[int, Chunk] = {}
        """Chunks whose responses are all finished, by their request."""
        self._ends: dict[Response, float] = {}
        """Response that a server samples → when it will be finished."""
        if fault is not None:
            self._at(fault.at, lambda: fault.act(self))

    def send(self, rank: int, request: Request, limit: float) -> None:
        call = request.args.get("call") if request.op == "run_call" else None
        if call == "gen" and request.args["ids"]:
            self._begin(rank, request)
            return
        if request.op == "copy_weights" and rank == 1:
            self._take_weights()
        if call is not None:
            self.busy[call] += self._seconds[call]
        super().send(rank, request, limit)

    def receive(self, deadline: float, waiting_for: str, limit: float | None = None) -> Any:
        while callable(self._events[0][2]):
            when, _, act, _ = heapq.heappop(self._events)
            self.now = max(self.now, when)
            act()
        return super().receive(deadline, waiting_for, limit)

    # -- servers -----------------------------------------------------------------------------------

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act, -1))

    def _begin(self, rank: int, request: Request) -> None:
        ids = request.args["ids"]
        chunk = Chunk(request, rank, self.now, self._version, len(ids) * GROUP)
        chunk.segments = {id_: [] for id_ in ids}
        for id_ in ids:
            self._waiting += [Response(chunk, id_, seconds) for seconds in seconds_of(id_)]
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting:
            free = filter(self._has_slot, range(len(self.servers)))
            number = self._balance.choose(free, self.now, can_move=self._waiting[0].can_move)
            if number is None:
                return
            self._request(self._waiting.popleft(), number)
        self._look_later()

    def _has_slot(self, number: int) -> bool:
        return self.servers[number].is_ready and self._balance.count(number) < SLOTS

    def _request(self, response: Response, number: int) -> None:
        id_ = str(next(self._order))
        response.flight = self._balance.begin(number, id_, self.now, can_move=response.can_move)
        if not response.versions or response.versions[-1][0] != self._version:
            response.versions.append((self._version, self.now))
        self._end_at(response, self.now + response.seconds / self.servers[number].speed)

    def _end_at(self, response: Response, when: float) -> None:
        self._ends[response] = when

        def end() -> None:
            if self._ends.get(response) == when:  # otherwise it was moved
                self._finish(response)

        self._at(when, end)

    def _finish(self, response: Response) -> None:
        self._end(response)
        chunk = response.chunk
        chunk.segments[response.sample].append(response.spans(self.now))
        chunk.missing -= 1
        if not chunk.missing:
            self._made[chunk.request.number] = chunk
            heapq.heappush(self._events, (self.now, next(self._order), chunk.request, chunk.rank))
        self._dispatch()

    def _end(self, response: Response) -> float:
        """Its server has answered. Returns the seconds that are left of it, at full speed."""
        flight = response.flight
        assert flight is not None
        left = (self._ends.pop(response) - self.now) * self.servers[flight.server].speed
        tokens = round((response.seconds - left) * TOKENS_PER_S)
        self._take(self._balance.end(flight, self.now, tokens=tokens))
        return left

    def _take(self, flights: Sequence[Flight]) -> None:
        """Responses that are taken from slow servers go to others."""
        ids = {flight.id for flight in flights}
        taken = [one for one in self._ends if one.flight is not None and one.flight.id in ids]
        for response in taken:
            left = self._end(response)
            response.can_move = False
            if self._continues:
                response.seconds = left + READ_S
            else:
                response.versions = []
        self._waiting.extendleft(taken)

    def _look_later(self) -> None:
        if not self._looks:
            self._looks = True
            self._at(self.now + LOOK_S, self._look)

    def _look(self) -> None:
        self._looks = False
        self._take(self._balance.overdue(self.now, slow_only=not self._continues))
        if self._ends or self._waiting:
            self._look_later()
        self._dispatch()

    def _take_weights(self) -> None:
        """Pause all servers for new weights."""
        self._version += 1
        self._balance.weights_changed()
        for response in self._waiting:
            response.can_move = True
        for response, when in list(self._ends.items()):
            response.can_move = True
            response.versions.append((self._version, self.now))
            self._end_at(response, when + PAUSE_S)

    def slow_down(self, factor: float = 10.0) -> None:
        """The first server is that much slower from now on."""
        self.servers[0].speed /= factor
        for response, when in self._on_first():
            self._end_at(response, self.now + (when - self.now) * factor)

    def die(self) -> None:
        """The first server dies; its requests are repeated, and it is started again."""
        for response, _ in self._on_first():
            assert response.flight is not None
            del self._ends[response]
            self._balance.end(response.flight, self.now)
            self._waiting.appendleft(response)
        self.servers[0].is_ready = False
        self._at(self.now + START_S, self._started_again)
        self._dispatch()

    def _on_first(self) -> list[tuple[Response, float]]:
        return [
            (response, when)
            for response, when in self._ends.items()
            if response.flight is not None and response.flight.server == 0
        ]

    def _started_again(self) -> None:
        self.servers[0].is_ready = True
        self._balance.started(0)
        self._dispatch()

    def _answer(self, request: Request, rank: int) -> dict[str, Any]:
        answer = super()._answer(request, rank)
        chunk = self._made.pop(request.number, None)
        if chunk is None:
            return answer
        return answer | {
            "version": chunk.version,
            "seconds": self.now - chunk.began,
            "segments": chunk.segments,
        }


@dataclass(frozen=True)
class Fault:
    at: float
    act: Callable[[SimulatedServers], None]


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    seconds: float
    trainer_idle: float
    """Share of the time."""
    ledger: list[dict[str, Any]]
    metrics: list[dict[str, Any]]


def recipe_of(servers: int, steps: int, staleness: int) -> Recipe:
    prompts = PROMPTS_PER_SLOT * servers * SLOTS
    return load_recipe(
        "bound.yaml",
        (
            f"train.prompts_per_step={prompts}",
            f"train.steps={steps}",
            f"train.max_staleness={staleness}",
            *((f"train.prompts_per_draw={GROUP}",) if staleness else ()),
            f"datasets.train.args.rows={prompts * steps}",
            f"graph.train.interface.args.seconds={training_s()}",
        ),
    ).recipe


def training_s() -> float:
    """Of a step: what generating its batch takes at least, on average."""
    drawn = [seconds for number in range(4000) for seconds in seconds_of(f"e0r{number}")]
    return statistics.fmean(drawn) * GROUP * PROMPTS_PER_SLOT


def run(servers: int, steps: int, staleness: int, fault: Fault | None = None) -> Outcome:
    recipe = recipe_of(servers, steps, staleness)
    ranks = SimulatedServers(recipe, servers, fault)
    with (
        RunDirectory.create(None, recipe.name) as folder,
        PlainDisplay(sys.stderr, quiet=True) as display,
    ):
        identity = RunIdentity(folder.run_id, "0", "0")
        master = MasterWorker(recipe, plan_topology(recipe), ranks, folder, display, identity)
        master.start()
        with open_outputs(folder, display.warning) as outputs:
            master.run(outputs)
        ledger, metrics = _records(folder.ledger), _records(folder.metrics)
    return Outcome(ranks.now, 1 - ranks.busy["train"] / ranks.now, ledger, metrics)


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def batches_of(outcome: Outcome) -> dict[int, list[str]]:
    """Step → its samples."""
    batches: dict[int, list[str]] = {}
    for line in outcome.ledger:
        batches.setdefault(line["step"], []).append(line["sample"])
    return batches


def critical_path(outcome: Outcome, servers: int) -> float:
    """Seconds of a run whose steps take turns: each response goes to the slot that is free
    first."""
    total = 0.0
    for samples in batches_of(outcome).values():
        slots = [0.0] * (servers * SLOTS)
        for seconds in (seconds for sample in samples for seconds in seconds_of(sample)):
            heapq.heapreplace(slots, slots[0] + seconds)
        total += max(slots) + training_s()
    return total


def least(outcome: Outcome, servers: int) -> float:
    """The larger of all training and all generation, in seconds."""
    samples = [line["sample"] for line in outcome.ledger]
    generation = sum(sum(seconds_of(sample)) for sample in samples) / (servers * SLOTS)
    return max(training_s() * len(batches_of(outcome)), generation)


def measure(servers: int, steps: int) -> dict[str, float]:
    """All figures."""
    in_turn, ahead = run(servers, steps, 0), run(servers, steps, 4)

    def cost(
        undisturbed: Outcome, staleness: int, act: Callable[[SimulatedServers], None]
    ) -> float:
        """Of a fault in the middle of a run."""
        disturbed = run(servers, steps, staleness, Fault(undisturbed.seconds / 2, act))
        return max(0.0, disturbed.seconds - undisturbed.seconds) / START_S

    return {
        "of_the_least": ahead.seconds / least(ahead, servers),
        "trainer_idle": ahead.trainer_idle,
        "faster_than_in_turn": in_turn.seconds / ahead.seconds,
        "of_the_critical_path": in_turn.seconds / critical_path(in_turn, servers),
        "cost_of_death": cost(ahead, 4, SimulatedServers.die),
        "cost_of_slow_server": cost(ahead, 4, SimulatedServers.slow_down),
        "cost_of_slow_server_in_turn": cost(in_turn, 0, SimulatedServers.slow_down),
    }


def problems(figures: dict[str, float], slack: float = 1.0) -> list[str]:
    """The figures that miss their limits; `slack`: by more than this factor."""
    most = {
        "of_the_least": OF_LEAST * slack,
        "trainer_idle": IDLE * slack,
        "of_the_critical_path": OF_CRITICAL_PATH * slack,
        "cost_of_death": OF_START * slack,
        "cost_of_slow_server": OF_START * slack,
        "cost_of_slow_server_in_turn": OF_START * slack,
    }
    above = [
        f"{name}: {figures[name]:.3g}, at most {limit:.3g} allowed"
        for name, limit in most.items()
        if figures[name] > limit
    ]
    if figures["faster_than_in_turn"] < FASTER / slack:
        above.append(
            f"faster_than_in_turn: {figures['faster_than_in_turn']:.3g}, "
            f"at least {FASTER / slack:.3g} demanded"
        )
    return above


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as home:
        prepare(Path(home))
        Path(home, "bound.yaml").write_text(RECIPE)
        figures = measure(options.servers, options.steps)
    wrong = problems(figures)
    if options.json:
        print(json.dumps({**figures, "above": wrong}))
    else:
        _show(figures.items())
        print("\n".join(wrong) if wrong else "All within their limits.")
    return 1 if wrong else 0


def _show(figures: Iterable[tuple[str, float]]) -> None:
    for name, figure in figures:
        print(f"{name.replace('_', ' '):>27} {figure:8.3f}")


if __name__ == "__main__":
    sys.exit(main())
