"""MasterWorker: unrolls the graph over steps, decides what runs when, and is the one voice of the run.

It holds descriptions of samples, never their tensors.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcli.api.dataflow import ModelInterfaceType
from rlcli.errors import NumericError
from rlcli.observe.samples import SampleRecord
from rlcli.recipe.graph import eval_graph, train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.calls import Calls, Running
from rlcli.runtime.data_order import DataOrder
from rlcli.runtime.outputs import Outputs
from rlcli.runtime.requests import Requests
from rlcli.runtime.roles import training_length
from rlcli.runtime.scheduler import Scheduler
from rlcli.runtime.transport import Transport
from rlcli.topology import Topology

EVALUATION = -1
"""The buffer's name for the samples of an evaluation."""


class MasterWorker:
    """Drives the workers behind a transport through one run."""

    def __init__(self, recipe: Recipe, topology: Topology, transport: Transport, outputs: Outputs,
                 should_stop: Callable[[], bool] = lambda: False, title: str = "step"):  # fmt: skip
        self.recipe = recipe
        self.topology = topology
        self.outputs = outputs
        self.should_stop = should_stop
        self.title = title
        """What the display calls this run's steps."""
        self.requests = Requests(transport, topology.world_size, recipe.launch.step_deadline)
        self.calls = Calls(recipe, topology, self.requests, outputs.display.phase)
        self.rows: dict[str, int] = {}
        self.steps = 0
        self.steps_done = 0
        self.eval_samples: list[list[SampleRecord]] = []
        """Of every evaluation, in order."""
        self._opened = 0
        self._loaded: set[int] = set()
        self._finished: deque[Running] = deque()
        self._stats: dict[int, dict[str, float]] = {}
        self._nonfinite: list[tuple[int, list[str]]] = []
        """(step, samples) of the steps in a row whose update was not finite."""
        self._step_began = 0.0

    def run(self) -> None:
        """Everything from reading the data to saving the models."""
        self._start_workers()
        self.outputs.run.write_status("running", 0, self.steps)
        if self.recipe.train.eval.at_start:
            results = self._evaluate(0)
            if results:
                self.outputs.metrics.write(0, results)
        self._train()
        self._save()

    def shut_down(self) -> None:
        """Let the workers go."""
        self.requests.ask_all("shutdown")

    # -- the run ---------------------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        deadline = self.recipe.launch.startup_deadline
        self.outputs.display.phase("reading the data")
        answers = self.requests.ask_all("open_datasets", deadline=deadline)
        self.rows = {name: int(rows) for name, rows in answers[0]["rows"].items()}
        self.steps = training_length(self.recipe, self.rows).total_train_steps
        self.outputs.display.phase("loading the models")
        self.requests.ask_all("build", deadline=deadline)
        self.outputs.display.start(self.recipe.name, self.outputs.run.path, self.steps, self.title)

    def _train(self) -> None:
        """Keep every worker busy until all steps are done, or those that were begun when the run was to stop."""
        train, graph = self.recipe.train, train_graph(self.recipe)
        overlap = len(self.topology.groups) > 1
        scheduler = Scheduler(graph, self.steps, train.max_staleness, overlap=overlap)
        order = DataOrder(self.rows[train.dataset], train.prompts_per_step, self.recipe.seed, train.shuffle)
        self._step_began = time.perf_counter()
        while not scheduler.finished:
            self._open_steps(scheduler, order)
            if self._opened == self.steps_done:
                return
            for task in scheduler.ready():
                if task.step in self._loaded:
                    scheduler.start(task)
                    self.calls.dispatch(task, task.step, self._finished.append)
            if not self._finished:
                self.requests.wait()
                continue
            finished = self._finished.popleft()
            self._take_in(finished)
            if scheduler.finish(finished.task):
                self._finish_step(finished.task.step)

    def _open_steps(self, scheduler: Scheduler, order: DataOrder) -> None:
        """Have rows loaded for the steps that may begin. None before an evaluation that comes first."""
        every = self.recipe.train.eval.every_steps
        pause = self.steps if every is None else (self.steps_done // every + 1) * every
        for step in scheduler.open_steps:
            if self._opened <= step < pause and not self.should_stop():
                rows = [(f"e{epoch}r{row}", row) for epoch, row in order.step(step)]
                self.calls.load(step, train_graph(self.recipe), self.recipe.train.dataset, rows, self._loaded.add)
                self._opened = step + 1

    def _take_in(self, running: Running) -> None:
        stats = self._stats.setdefault(running.batch, {})
        role = running.mfc.model_name
        stats |= {f"{role}/{name}": value for name, value in {**running.averages(), **running.stats()}.items()}
        stats[f"time/{running.mfc.name}"] = running.seconds()

    def _finish_step(self, step: int) -> None:
        seconds = time.perf_counter() - self._step_began
        ids = self.calls.buffer.ids(step)
        tokens = sum(self.calls.buffer.sequence_lengths(ids, "packed_input_ids"))
        record = self._stats.pop(step) | {"time/step": seconds, "tokens_per_second": tokens / seconds}
        if any(mfc.interface_type is ModelInterfaceType.GENERATE for mfc in train_graph(self.recipe)):
            shown = ids[: self.recipe.log.samples_per_step]
            self.calls.describe(shown, lambda texts: self._write_samples(step + 1, "train", texts))
        self.calls.forget(step)
        self._loaded.discard(step)
        self.steps_done = step + 1
        record |= self._evaluate(self.steps_done) if self._is_evaluation_due() else {}
        self.outputs.metrics.write(self.steps_done, record)
        self.outputs.display.step({"step": self.steps_done, **record})
        self.outputs.run.write_status("running", self.steps_done, self.steps)
        self._watch_for_nonfinite(record, ids)
        self._step_began = time.perf_counter()

    def _is_evaluation_due(self) -> bool:
        ev = self.recipe.train.eval
        if self.steps_done == self.steps:
            return ev.at_end
        return ev.every_steps is not None and self.steps_done % ev.every_steps == 0

    def _watch_for_nonfinite(self, record: Mapping[str, float], ids: Sequence[str]) -> None:
        """Engines skip such an update on all ranks; too many in a row end the run before anything is saved."""
        ends = ("/grad_norm", "/loss")
        bad = [key for key, value in record.items() if key.endswith(ends) and not math.isfinite(value)]
        if not bad:
            self._nonfinite.clear()
            return
        self._nonfinite.append((self.steps_done, list(ids)))
        streak, limit = len(self._nonfinite), self.recipe.train.max_nonfinite_streak
        what = f"step {self.steps_done}: {bad[0]} is not finite"
        self.outputs.display.warning(f"[F33] {what}, update skipped ({streak} of {limit})")
        if streak >= limit:
            steps = [{"step": step, "samples": samples} for step, samples in self._nonfinite]
            file = self.outputs.run.write_text("crash/nonfinite.json", json.dumps(steps, indent=2) + "\n")
            raise NumericError(
                f"{what}, for {limit} steps in a row; no model was saved",
                hint=f"lower the learning rate, or look at the samples named in {file}",
                code="F37",
            )

    def _save(self) -> None:
        for role in self.recipe.saved_roles:
            self.outputs.display.phase(f"saving {role}")
            folder = str(self.outputs.run.model(role))
            ranks = self.topology.placement(role).ranks
            self.requests.ask_all("save", {"role": role, "folder": folder}, ranks=ranks)

    # -- evaluation ------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> dict[str, float]:
        """Run the evaluation graph over its whole dataset; nothing else is under way."""
        ev = self.recipe.train.eval
        if ev.dataset is None:
            return {}
        began = time.perf_counter()
        self.outputs.display.phase(f"evaluating on {ev.dataset}")
        graph, loaded = eval_graph(self.recipe), set[int]()
        rows = [(f"eval-r{row}", row) for row in range(self.rows[ev.dataset])]
        self.calls.load(EVALUATION, graph, ev.dataset, rows, loaded.add)
        while not loaded:
            self.requests.wait()
        results: dict[str, float] = {}
        scheduler = Scheduler(graph, 1)
        while not scheduler.finished:
            for task in scheduler.ready():
                scheduler.start(task)
                self.calls.dispatch(task, EVALUATION, self._finished.append)
            while not self._finished:
                self.requests.wait()
            finished = self._finished.popleft()
            named = {**finished.averages(), **finished.stats()}
            results |= {f"eval/{name}": value for name, value in named.items()}
            scheduler.finish(finished.task)
        results |= self._look_at_responses(step) | {"time/eval": time.perf_counter() - began}
        self.calls.forget(EVALUATION)
        self.outputs.display.evaluation(step, {key: v for key, v in results.items() if key.startswith("eval/")})
        return results

    def _look_at_responses(self, step: int) -> dict[str, float]:
        """Writes samples of the evaluation down; returns the length of its responses, if it has any."""
        if not any(mfc.interface_type is ModelInterfaceType.GENERATE for mfc in eval_graph(self.recipe)):
            return {}
        ids = self.calls.buffer.ids(EVALUATION)
        written: list[list[SampleRecord]] = []
        shown = ids[: self.recipe.log.samples_per_step]
        self.calls.describe(shown, lambda texts: written.append(self._write_samples(step, "eval", texts)))
        while not written:
            self.requests.wait()
        self.eval_samples += written
        buffer = self.calls.buffer
        prompts = buffer.sequence_lengths(ids, "packed_prompts")
        lengths = buffer.sequence_lengths(ids, "packed_input_ids")
        group = len(lengths) // max(1, len(prompts))
        return {"eval/response_length": (sum(lengths) - group * sum(prompts)) / len(lengths)} if lengths else {}

    def _write_samples(self, step: int, phase: str, texts: Sequence[Mapping[str, Any]]) -> list[SampleRecord]:
        records = [SampleRecord(step=step, phase=phase, **text) for text in texts]
        for record in records:
            self.outputs.samples.write(record)
        return records
