"""MasterWorker: unrolls the graph over steps, decides what runs when, and is the one voice of the run.

It holds descriptions of samples, never their tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcli.api.data import SequenceSample
from rlcli.api.dataflow import MFCDef
from rlcli.errors import NumericError
from rlcli.observe.display import Display
from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleRecord, SampleWriter
from rlcli.recipe.graph import eval_graph, train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.buffer import Buffer
from rlcli.runtime.data_order import DataOrder
from rlcli.runtime.messages import Reply, Request
from rlcli.runtime.partition import owners, share_by_rank
from rlcli.runtime.roles import training_length
from rlcli.runtime.scheduler import Scheduler, Task
from rlcli.runtime.transport import Transport
from rlcli.topology import Topology

EVAL_STEP = -1
"""The buffer's name for the samples of an evaluation."""


@dataclass
class Running:
    """A call under way: the ranks that still owe an answer, and the answers so far."""

    task: Task
    mfc: MFCDef
    waiting: set[int]
    replies: dict[int, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outputs:
    """Where the master writes."""

    run: RunDirectory
    metrics: MetricsWriter
    samples: SampleWriter
    display: Display


class MasterWorker:
    """Drives the workers behind a transport through one run."""

    def __init__(self, recipe: Recipe, topology: Topology, transport: Transport, outputs: Outputs,
                 should_stop: Callable[[], bool] = lambda: False, title: str = "step"):  # fmt: skip
        self.recipe = recipe
        self.topology = topology
        self.transport = transport
        self.outputs = outputs
        self.should_stop = should_stop
        self.title = title
        """What the display calls this run's steps."""
        self.mfcs = {mfc.name: mfc for mfc in (*train_graph(recipe), *eval_graph(recipe))}
        self.buffer = Buffer()
        self.rows: dict[str, int] = {}
        self.steps = 0
        self.steps_done = 0
        self.eval_samples: list[list[SampleRecord]] = []
        """Of every evaluation, in order."""
        self._next_number = 0
        self._nonfinite_streak = 0
        self._running: dict[int, Running] = {}
        self._stats: dict[int, dict[str, float]] = {}
        self._step_began = 0.0

    # -- the run ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Everything from reading the data to saving the models."""
        self._start_workers()
        self.outputs.run.write_status("running", 0, self.steps)
        if self.recipe.train.eval.at_start:
            self._evaluate_and_record(0)
        self._train()
        self._save()

    def _start_workers(self) -> None:
        deadline = self.recipe.launch.startup_deadline
        self.outputs.display.phase("reading the data")
        answers = self._ask_all("open_datasets", {}, deadline)
        self.rows = {name: int(rows) for name, rows in answers[0]["rows"].items()}
        self.steps = training_length(self.recipe, self.rows[self.recipe.train.dataset]).total_train_steps
        self.outputs.display.phase("loading the models")
        self._ask_all("build", {}, deadline)
        self.outputs.display.start(self.recipe.name, self.outputs.run.path, self.steps, self.title)

    def _train(self) -> None:
        train = self.recipe.train
        scheduler = Scheduler(train_graph(self.recipe), self.steps, train.max_staleness)
        order = DataOrder(self.rows[train.dataset], train.prompts_per_step, self.recipe.seed, train.shuffle)
        loaded = -1
        self._step_began = time.perf_counter()
        while not scheduler.finished:
            limit = self._next_pause(self.steps_done)
            for step in scheduler.open_steps:
                if loaded < step < limit:
                    self._load(step, train.dataset, self._named_rows(order, step))
                    loaded = step
            for task in scheduler.ready(min(limit, loaded + 1)):
                scheduler.start(task)
                self._dispatch(task, self.buffer.ids(task.step))
            finished = self._await_call()
            if scheduler.finish(finished.task):
                self._finish_step(finished.task.step)
                if self.should_stop():
                    return

    def _next_pause(self, done: int) -> int:
        """Steps from here on wait until the evaluation before them is over."""
        every = self.recipe.train.eval.every_steps
        return self.steps if every is None else min(self.steps, (done // every + 1) * every)

    def _named_rows(self, order: DataOrder, step: int) -> list[tuple[str, int]]:
        """(id, row): a row that comes again in a later epoch is another sample."""
        return [(f"e{epoch}r{row}", row) for epoch, row in order.step(step)]

    def _finish_step(self, step: int) -> None:
        seconds = time.perf_counter() - self._step_began
        ids = self.buffer.ids(step)
        record = self._stats.pop(step, {})
        lengths = self.buffer.sequence_lengths(ids, "packed_input_ids")
        record |= {"time/step": seconds, "tokens_per_second": sum(lengths) / seconds}
        self._record_samples(step + 1, ids[: self.recipe.log.samples_per_step], "train")
        self._forget(step)
        self.steps_done = step + 1
        self._watch_for_nonfinite(record, step + 1)
        ev = self.recipe.train.eval
        last = self.steps_done == self.steps
        if (ev.every_steps and self.steps_done % ev.every_steps == 0 and not last) or (last and ev.at_end):
            record |= self._evaluate(self.steps_done)
        self.outputs.metrics.write(self.steps_done, record)
        self.outputs.display.step({"step": self.steps_done, **record})
        self.outputs.run.write_status("running", self.steps_done, self.steps)
        self._step_began = time.perf_counter()

    def _watch_for_nonfinite(self, record: Mapping[str, float], step: int) -> None:
        bad = [key for key, value in record.items() if key.endswith("/grad_norm") and not math.isfinite(value)]
        self._nonfinite_streak = self._nonfinite_streak + 1 if bad else 0
        limit = self.recipe.train.max_nonfinite_streak
        if bad:
            self.outputs.display.warning(
                f"step {step}: {bad[0]} is not finite, update skipped ({self._nonfinite_streak} of {limit})"
            )
        if self._nonfinite_streak >= limit:
            raise NumericError(
                f"{bad[0]} was not finite for {limit} steps in a row, the last at step {step}; no update was applied",
                hint="lower the learning rate, or look at the samples of these steps in samples.jsonl",
                code="F37",
            )

    # -- evaluation ------------------------------------------------------------------------------------------

    def _evaluate_and_record(self, step: int) -> None:
        if results := self._evaluate(step):
            self.outputs.metrics.write(step, results)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Run the evaluation graph over its whole dataset."""
        ev = self.recipe.train.eval
        if ev.dataset is None:
            return {}
        began = time.perf_counter()
        self.outputs.display.phase(f"evaluating on {ev.dataset}")
        self._load(EVAL_STEP, ev.dataset, [(f"eval-r{row}", row) for row in range(self.rows[ev.dataset])])
        graph = eval_graph(self.recipe)
        scheduler = Scheduler(graph, 1)
        ids = self.buffer.ids(EVAL_STEP)
        while not scheduler.finished:
            for task in scheduler.ready():
                scheduler.start(task)
                self._dispatch(task, ids)
            scheduler.finish(self._await_call().task)
        stats = self._stats.pop(0, {})
        results = {f"eval/{key.rpartition('/')[2]}": v for key, v in stats.items() if not key.startswith("time/")}
        results |= self._eval_totals(graph, ids) | {"time/eval": time.perf_counter() - began}
        self.eval_samples.append(self._record_samples(step, ids[: self.recipe.log.samples_per_step], "eval"))
        self._forget(EVAL_STEP)
        self.outputs.display.evaluation(step, results)
        return results

    def _eval_totals(self, graph: Sequence[MFCDef], ids: Sequence[str]) -> dict[str, float]:
        names = {"rewards": "eval/reward", "solved": "eval/accuracy"}
        made = [key for mfc in graph for key in mfc.produced_keys if key in names]
        sums = {key: [0.0, 0.0] for key in made}
        for rank, held in self._held_by(ids, made).items():
            answer = self._ask(rank, "totals", {"ids": held, "keys": made})
            for key, (total, count) in answer["totals"].items():
                sums[key][0] += total
                sums[key][1] += count
        results = {names[key]: total / count for key, (total, count) in sums.items() if count}
        prompts = self.buffer.sequence_lengths(ids, "packed_prompts")
        lengths = self.buffer.sequence_lengths(ids, "packed_input_ids")
        if prompts and len(prompts) == len(lengths) and any(m.interface_type == "generate" for m in graph):
            results["eval/response_length"] = (sum(lengths) - sum(prompts)) / len(lengths)
        return results

    # -- calls -----------------------------------------------------------------------------------------------

    def _dispatch(self, task: Task, ids: Sequence[str]) -> None:
        """Send a call to the workers of its role, and what they lack to them and to who has it."""
        mfc = self.mfcs[task.call]
        placement = self.topology.placement(mfc.model_name)
        shares = share_by_rank(ids, placement)
        plan = self.buffer.transfers(shares, mfc.input_keys)
        self.buffer.count_transfers(plan)
        involved = set(placement.ranks) | {rank for t in plan for rank in (t.source, t.target)}
        number = self._number()
        self._running[number] = Running(task, mfc, set(involved))
        for rank in sorted(involved):
            mine = [t.as_json() for t in plan if rank in (t.source, t.target)]
            args = {"call": task.call, "ids": shares.get(rank, []), "step": task.step, "transfers": mine}
            self.transport.send(rank, Request(number, "run_call", args))

    def _await_call(self) -> Running:
        """Wait until one of the calls under way is done on all its ranks."""
        while True:
            for number, running in self._running.items():
                if not running.waiting:
                    del self._running[number]
                    self._take_in(running)
                    return running
            names = sorted({running.task.call for running in self._running.values()})
            self._count(self.transport.receive(self.recipe.launch.step_deadline, ", ".join(names)))

    def _count(self, reply: Reply) -> None:
        running = self._running[reply.number]
        running.replies[reply.rank] = _value(reply)
        running.waiting.discard(reply.rank)

    def _take_in(self, running: Running) -> None:
        placement = self.topology.placement(running.mfc.model_name)
        stats = self._stats.setdefault(running.task.step, {})
        for rank in placement.ranks:
            answer = running.replies[rank]
            if answer["batch"] is not None and rank in owners(placement):
                self.buffer.add(rank, SequenceSample.from_json(answer["batch"]))
        told = running.replies[placement.ranks[0]]["stats"]
        stats |= {f"{running.mfc.model_name}/{name}": value for name, value in told.items()}
        stats[f"time/{running.task.call}"] = max(running.replies[rank]["seconds"] for rank in placement.ranks)

    # -- samples ---------------------------------------------------------------------------------------------

    def _load(self, step: int, dataset: str, rows: Sequence[tuple[str, int]]) -> None:
        """Have the workers of the graph's first call take the rows that they will work on."""
        graph = eval_graph(self.recipe) if step == EVAL_STEP else train_graph(self.recipe)
        placement = self.topology.placement(graph[0].model_name)
        named = [(id_, row, place) for place, (id_, row) in enumerate(rows)]
        self.buffer.open_step(step, [id_ for id_, _ in rows])
        for rank, share in share_by_rank(named, placement).items():
            if not share:
                continue
            answer = self._ask(rank, "load_rows", {"dataset": dataset, "rows": share})
            self.buffer.add(rank, SequenceSample.from_json(answer["batch"]))

    def _record_samples(self, step: int, ids: Sequence[str], phase: str) -> list[SampleRecord]:
        """Write the texts of some samples down, for people to read."""
        texts: dict[str, dict[str, Any]] = {}
        for rank, held in self._held_by(ids, ["packed_input_ids"]).items():
            for text in self._ask(rank, "describe", {"ids": held})["samples"]:
                texts[text["id"]] = text
        records = [SampleRecord(step=step, phase=phase, **texts[id_]) for id_ in ids if id_ in texts]
        for record in records:
            self.outputs.samples.write(record)
        return records

    def _held_by(self, ids: Sequence[str], keys: Sequence[str]) -> dict[int, list[str]]:
        """Rank → the samples to ask it about: each sample of one rank that holds all of these keys."""
        by_rank: dict[int, list[str]] = {}
        for id_ in ids:
            holders = [self.buffer.holders(id_, key) for key in keys]
            common = set.intersection(*holders) if holders else set()
            if common:
                by_rank.setdefault(min(common), []).append(id_)
        return by_rank

    def _forget(self, step: int) -> None:
        ids = self.buffer.close_step(step)
        for rank in range(self.topology.world_size):
            self._ask(rank, "clear", {"ids": ids})

    # -- ending ----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        for role in self.recipe.saved_roles:
            self.outputs.display.phase(f"saving {role}")
            folder = str(self.outputs.run.model(role))
            self._ask_all("save", {"role": role, "folder": folder}, ranks=self.topology.placement(role).ranks)

    def shut_down(self) -> None:
        """Let the workers go."""
        self._ask_all("shutdown", {})

    # -- asking ----------------------------------------------------------------------------------------------

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _ask(self, rank: int, op: str, args: dict[str, Any]) -> Mapping[str, Any]:
        return self._ask_all(op, args, ranks=(rank,))[rank]

    def _ask_all(
        self, op: str, args: dict[str, Any], deadline: float | None = None, ranks: Sequence[int] | None = None
    ) -> dict[int, Mapping[str, Any]]:
        """Ask and wait. Answers to calls that come in meanwhile are kept for `_await_call`."""
        asked = range(self.topology.world_size) if ranks is None else ranks
        number = self._number()
        for rank in asked:
            self.transport.send(rank, Request(number, op, args))
        answers: dict[int, Mapping[str, Any]] = {}
        while len(answers) < len(asked):
            missing = sorted(set(asked) - set(answers))
            reply = self.transport.receive(deadline or self.recipe.launch.step_deadline, f"{op} on rank {missing[0]}")
            if reply.number == number:
                answers[reply.rank] = _value(reply)
            else:
                self._count(reply)
        return answers


def _value(reply: Reply) -> Mapping[str, Any]:
    if reply.failure is not None:
        raise reply.failure.as_error()
    return reply.value
