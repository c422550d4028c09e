"""MasterWorker: unrolls the graph over steps, decides what runs when, and does all of the run's reporting.

It holds descriptions of samples, never their tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcli.api.dataflow import ModelInterfaceType
from rlcli.errors import DataError, ResourceError, Stopped
from rlcli.garbage import collect_as_usual
from rlcli.observe.display import Display
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleRecord
from rlcli.recipe.components import sources_of
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.admission import Ready
from rlcli.runtime.answered import Answered
from rlcli.runtime.calls import Calls
from rlcli.runtime.checkpoints import Checkpoints, RunState, Schedule, Start
from rlcli.runtime.commits import RunIdentity
from rlcli.runtime.evaluation import evaluate
from rlcli.runtime.finished_step import FinishedStep
from rlcli.runtime.flows import Flows, make_flows
from rlcli.runtime.lanes import lanes_of
from rlcli.runtime.nonfinite import NonfiniteSteps
from rlcli.runtime.outputs import Outputs
from rlcli.runtime.rank_warnings import RankWarnings
from rlcli.runtime.requests import Requests
from rlcli.runtime.restarts import Restarts
from rlcli.runtime.roles import training_steps
from rlcli.runtime.sample_flow import Draw
from rlcli.runtime.scheduler import Task
from rlcli.runtime.totals import Totals
from rlcli.runtime.transport import Transport
from rlcli.topology import Topology

GENERATE = ModelInterfaceType.GENERATE
LAST_WAIT = 30.0
"""Seconds that a run ending with an error waits for the files of a checkpoint."""
SHORT_WAIT = 0.5
"""The same for a run that was asked to stop at once: enough to read the reports that have already arrived."""


class MasterWorker:
    """Drives the workers behind a transport through one run: `start`, `run`, `shut_down`."""

    outputs: Outputs
    flows: Flows

    def __init__(self, recipe: Recipe, topology: Topology, transport: Transport, directory: RunDirectory,
                 display: Display, identity: RunIdentity, start: Start | None = None,
                 should_stop: Callable[[], bool] = lambda: False, title: str = "step"):  # fmt: skip
        self.recipe = recipe
        self.topology = topology
        self.directory = directory
        self.display = display
        self.should_stop = should_stop
        self.title = title
        """What the display calls this run's steps."""
        self.requests = Requests(transport, topology.world_size, recipe.launch.step_deadline)
        self.calls = Calls(recipe, topology, self.requests, display.phase)
        self.checkpoints = Checkpoints(directory, identity, recipe, topology, self.requests, display)
        self.rows: dict[str, int | None] = {}
        """Rows of each dataset; None if the dataset does not know."""
        self.steps = 0
        self.steps_done = 0
        self._start = start
        self._digests: dict[str, str] = {}
        self._opened = 0
        self._loaded: set[int] = set()
        """Steps whose last draw has been loaded onto the workers."""
        self._finished: deque[tuple[Task, Answered | None]] = deque()
        """Finished calls; None for a call that had no samples."""
        self._reports: dict[int, dict[str, Answered]] = {}
        """Step → its finished calls, by name."""
        self._nonfinite = NonfiniteSteps(directory, display, recipe.train.max_nonfinite_streak)
        self._restarts = Restarts(self.requests, display)
        self._warnings = RankWarnings(self.requests.listen, display)
        self._totals = Totals(self.calls.buffer, sources_of(recipe.datasets[recipe.train.dataset]))
        self._last_record: dict[str, float] = {}
        self._too_few: DataError | None = None
        """Set once too many samples of a step were dropped."""
        self._can_checkpoint = True
        self._checkpoint_seconds: float | None = None
        """How long training has waited for a checkpoint since the last record."""
        self._taken: int | None = None
        """The step of the last checkpoint that was started."""

    def start(self) -> None:
        """Have the workers read the data, load the models and restore the checkpoint.

        Nothing is written to the run's folder yet: an error up to this point leaves the run as it was.
        """
        self._open_datasets()
        self._build_roles()
        if self._start is not None:
            self._restore(self._start)
        rows = self.rows[self.recipe.train.dataset]
        self.flows = make_flows(self.recipe, self.calls, rows, self.steps, self._start, self.topology.open_steps)
        self._end_early()
        collect_as_usual()

    def run(self, outputs: Outputs) -> None:
        """Run everything from the first evaluation to saving the models.

        If the run ends early, a checkpoint that is complete, or soon will be, is committed first.
        """
        self.outputs = outputs
        try:
            self._run()
        except BaseException as error:
            at_once = isinstance(error, Stopped | KeyboardInterrupt)
            self.checkpoints.settle_at_error(SHORT_WAIT if at_once else LAST_WAIT)
            raise

    def _run(self) -> None:
        self.display.start(self.recipe.name, self.directory.path, self.steps, self.title)
        self.directory.write_status("running", self.steps_done, self.steps)
        if self.recipe.train.eval.at_start and self._start is None:  # any checkpoint, even of step 0, comes after it
            results = self._evaluate(0)
            if results:
                self.outputs.metrics.write(0, results)
        self._train()
        self._save()

    def shut_down(self) -> None:
        """Shut the workers down."""
        self.requests.let_go(lanes_of(self.recipe, self.topology))

    # -- the run ---------------------------------------------------------------------------------------------

    def _open_datasets(self) -> None:
        """Open the datasets; find the run's length and check that it may resume from its checkpoint."""
        self.display.phase("reading the data")
        answers = self.requests.ask_all("open_datasets", deadline=self.recipe.launch.startup_deadline)
        self.rows = dict(answers[0]["rows"])
        self.calls.streams = {name for name, rows in self.rows.items() if rows is None}
        self._digests = dict(answers[0]["digests"])
        done = self._start.state if self._start is not None else None
        self.steps = training_steps(self.recipe, self.rows, done.step if done else 0, done.samples if done else 0)
        if self._start is not None:
            self._start.check_datasets(self._digests, self.recipe)
            self._start.check_end(self.steps, self.recipe)

    def _build_roles(self) -> None:
        self.display.phase("loading the models")
        train = self.recipe.train
        wanted = {"steps": self.steps, "rows": self.rows[train.dataset] or self.steps * train.prompts_per_step}
        built = self.requests.ask_all("build", wanted, deadline=self.recipe.launch.startup_deadline)
        self._check_state({role for answer in built.values() for role in answer["without_state"]})
        if self._can_checkpoint:
            self.checkpoints.check_room(sum(answer["bytes"] for answer in built.values()))

    def _check_state(self, without: set[str]) -> None:
        """A user's engine may not support saving: the run then has no checkpoints, and warns about it."""
        self._can_checkpoint = not without
        if without:
            names = ", ".join(sorted(without))
            self.display.warning(f"the backend of {names} has no state(): this run cannot be resumed")

    def _restore(self, start: Start) -> None:
        """Resume from a checkpoint as if the run had never stopped."""
        self.display.phase("restoring the checkpoint")
        state = start.state
        wanted = {"folder": str(start.folder), "versions": dict(state.versions), "interfaces": dict(state.interfaces)}
        self.requests.ask_all("restore", wanted, deadline=self.recipe.launch.startup_deadline)
        self.steps_done = self._opened = state.step
        self.checkpoints.starts_from(state.step)
        self._nonfinite.restore(state.nonfinite)
        self._totals.restore(state.tokens, state.used)

    def _train(self) -> None:
        """Keep every worker busy until all steps are done, or, once the run is to stop, those already begun."""
        schedule = Schedule(self.recipe.checkpoint, self.flows.sizes)
        self.calls.times.begin()
        while not self.flows.scheduler.finished:
            if self._opened == self.steps_done and self._is_checkpoint_due(schedule):
                self._take_checkpoint(schedule)
            if not self._is_checkpoint_due(schedule):
                self._open_steps(schedule)
            if self._opened == self.steps_done and (self._shortage or not self.flows.rollouts or self.should_stop()):
                break
            for task in self.flows.scheduler.ready():
                if task.step in self._loaded:
                    self._start_call(task)
            self._run_ahead()
            if not self._finished:
                self.requests.wait()
                continue
            self._take_in(*self._finished.popleft())
            self.checkpoints.settle()
        wanted = self.recipe.checkpoint.at_end if self.steps_done == self.steps else self.recipe.checkpoint.on_stop
        wanted = self._can_checkpoint and (wanted or self._is_checkpoint_due(schedule))
        wanted = wanted and not (self._shortage and not self.steps_done)
        self.checkpoints.settle(wait=True)
        if wanted and self.checkpoints.committed != self.steps_done:
            self._take_checkpoint(schedule)
            self.checkpoints.settle(wait=True)
        if self._shortage is not None:
            raise self._shortage
        if wanted and self.checkpoints.committed != self.steps_done:
            what = f"step {self.steps_done}, the last one, is not committed; the warning above says why"
            raise ResourceError(
                what, where=str(self.checkpoints.folder), hint="make room, then rlcli resume", code="F28"
            )

    def _run_ahead(self) -> None:
        if not self.should_stop():
            self.flows.run_ahead()

    def _open_steps(self, schedule: Schedule) -> None:
        """Take samples for the steps that may begin; none until a pending evaluation or checkpoint is done."""
        ev = self.recipe.train.eval
        every = ev.every_steps if ev.dataset is not None else None
        evaluation = self.steps if every is None else (self.steps_done // every + 1) * every
        pause = min(evaluation, schedule.next_after(self.steps_done) or self.steps)
        if self._shortage is not None or self.flows.is_used_up:
            return
        for step in self.flows.scheduler.open_steps:
            if not self._opened <= step < pause or not self.flows.samples.may_open(step) or self.should_stop():
                continue
            size = self.flows.sizes.size(step)
            if self.flows.rollouts is None:
                self._load(step, self.flows.samples.open(step, size))
            elif self.flows.rollouts.has_batch(step, size):
                self.flows.samples.open(step, size)
                self._loaded.add(step)
            else:
                break
            self._opened = step + 1

    def _end_early(self) -> None:
        """If samples are dropped, all rows may be used up before the planned steps are done."""
        if self._opened == self.steps_done and self.flows.is_used_up:
            self.steps = self.flows.scheduler.steps = self.steps_done

    def _load(self, step: int, draws: Sequence[Draw]) -> None:
        self._loaded.discard(step)
        rows = [(draw.id, draw.row, draw.attempt) for draw in draws]

        def ended(length: int, missing: list[str]) -> None:
            queue = self.flows.queue
            queue.pass_ended(length)
            self._load(step, self.flows.samples.redraw(step, missing, queue.instead_of))

        dataset = self.recipe.train.dataset
        self.calls.load(train_graph(self.recipe), dataset, rows, lambda: self._loaded.add(step), ended)

    def _start_call(self, task: Task) -> None:
        self.flows.scheduler.start(task)
        ids = self.flows.samples.samples(task.step, task.call)
        if ids:
            self.calls.dispatch(task, ids, lambda answered: self._finished.append((task, answered)))
        else:
            self._finished.append((task, None))

    def _take_in(self, task: Task, answered: Answered | None) -> None:
        """Record a finished call."""
        step = task.step
        if answered is not None:
            reports = self._reports.setdefault(step, {})
            earlier = reports.get(task.call)
            reports[task.call] = answered if earlier is None else earlier.and_then(answered)
            self.flows.samples.drop(step, task.call, answered.dropped())
        self.flows.scheduler.finish(task)
        if self.flows.scheduler.chooses(step):
            self._choose_batch(step)
        while self.flows.scheduler.is_over(self.steps_done):
            self._finish_step(self.steps_done)

    def _choose_batch(self, step: int) -> None:
        """Draw again to replace dropped samples, or train on the batch as it is."""
        try:
            draws = self.flows.samples.complete(step)
        except DataError as error:
            self._abandon(step, error)
            return
        if draws:
            self.flows.scheduler.repeat(step)
            self._load(step, draws)
        else:
            self.calls.forget(self.flows.samples.surplus(step))
            self.flows.scheduler.close(step)

    def _abandon(self, step: int, error: DataError) -> None:
        """Too many samples of a step were dropped: finish and keep the steps before it, then end the run."""
        drawn = self.flows.samples.close(step).drawn
        self.calls.forget([draw.id for draw in drawn])
        self.flows.queue.put_back(drawn)
        self._reports.pop(step, None)
        self._opened, self._too_few = step, error

    @property
    def _shortage(self) -> DataError | None:
        """Why no more steps can begin; None if they can."""
        rollouts = self.flows.rollouts
        return self._too_few if rollouts is None else rollouts.failure

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _is_checkpoint_due(self, schedule: Schedule) -> bool:
        taken = self._taken if self._taken is not None else self.checkpoints.committed or 0
        return self._can_checkpoint and taken != self.steps_done and schedule.is_due(self.steps_done)

    def _take_checkpoint(self, schedule: Schedule) -> None:
        """Take a checkpoint. No step is in progress: the workers hold the weights that the finished steps produced.
        Generation ahead of training continues."""
        queue, rollouts = self.flows.queue, self.flows.rollouts
        waiting, ready = queue.returned, tuple[Ready, ...]()
        if rollouts is not None:
            waiting, ready = rollouts.admission.waiting(), rollouts.admission.ready
            for line in rollouts.drain_drops():
                self.outputs.ledger.write({"step": self.steps_done, **line})
        names = self.calls.names([one.draw.id for one in ready])
        state = RunState(
            step=self.steps_done,
            samples=self.flows.sizes.place(self.steps_done),
            drawn=queue.place,
            pass_rows=queue.pass_rows,
            returned=[(draw.epoch, draw.row, draw.attempt) for draw in waiting],
            ready=[one.as_json() | {"name": names[one.draw.id]} for one in ready],
            datasets=self._digests,
            nonfinite=self._nonfinite.streak,
            used=dict(self._totals.used),
            tokens=self._totals.tokens,
        )
        began = time.perf_counter()
        samples = self.calls.buffer.kept_by(list(names))
        self.checkpoints.take(state, self._last_record, self.outputs.sync, samples)
        self._checkpoint_seconds = time.perf_counter() - began
        self._taken = self.steps_done
        schedule.note()

    def _finish_step(self, step: int) -> None:
        seconds = self.calls.times.seconds
        done = self.flows.close(step, list(self._reports.pop(step).values()))
        record = self._record(step, done, seconds)
        if any(mfc.interface_type is GENERATE for mfc in train_graph(self.recipe)):
            shown = done.ids[: self.recipe.log.samples_per_step]
            self.calls.describe(shown, lambda texts: self._write_samples(step + 1, "train", texts))
        self.calls.forget(done.ids)
        self._loaded.discard(step)
        self.steps_done = step + 1
        self._end_early()
        record |= self._evaluate(self.steps_done) if self._is_evaluation_due() else {}
        self._last_record = record
        self.outputs.metrics.write(self.steps_done, record)
        for line in done.ledger("trained" if self.recipe.trained_roles else "done"):
            self.outputs.ledger.write({"step": self.steps_done, **line})
        self.display.step({"step": self.steps_done, **record})
        self.directory.write_status("running", self.steps_done, self.steps)
        self._nonfinite.watch(self.steps_done, record, done.ids)
        self.calls.times.begin()

    def _record(self, step: int, done: FinishedStep, seconds: float) -> dict[str, float]:
        """The metrics of a step that took `seconds`, without its evaluation."""
        tokens = self._totals.count(done.ids)
        record = done.numbers()
        record |= {**self.calls.times.report(seconds), "tokens_per_second": tokens / seconds}
        record |= self._totals.numbers(self.flows.sizes.place(step + 1)) | self._restarts.numbers()
        if self.flows.samples.drops:
            record |= done.samples.counts(reason for mfc in train_graph(self.recipe) for reason in mfc.drops)
        if self._checkpoint_seconds is not None:
            record["time/checkpoint"], self._checkpoint_seconds = self._checkpoint_seconds, None
        return record

    def _is_evaluation_due(self) -> bool:
        ev = self.recipe.train.eval
        if self.steps_done == self.steps:
            return ev.at_end
        return ev.every_steps is not None and self.steps_done % ev.every_steps == 0

    def _save(self) -> None:
        for role in self.recipe.saved_roles:
            self.display.phase(f"saving {role}")
            folder = str(self.directory.model(role))
            ranks = self.topology.placement(role).ranks
            self.requests.ask_all("save", {"role": role, "folder": folder}, ranks=ranks)

    # -- evaluation ------------------------------------------------------------------------------------------

    def _evaluate(self, step: int) -> dict[str, float]:
        """Run the evaluation graph over its whole dataset, with no step in progress; generation ahead continues."""
        ev = self.recipe.train.eval
        if ev.dataset is None:
            return {}
        self.display.phase(f"evaluating on {ev.dataset}")
        rows, shown = self.rows[ev.dataset] or 0, self.recipe.log.samples_per_step
        found = evaluate(self.recipe, self.calls, self.requests, rows, shown, self._run_ahead)
        self._write_samples(step, "eval", found.texts)
        results = found.numbers() | ({"eval/version": float(found.version)} if self.flows.rollouts is not None else {})
        self.display.evaluation(step, {key: v for key, v in results.items() if key.startswith("eval/")})
        return results

    def _write_samples(self, step: int, phase: str, texts: Sequence[Mapping[str, Any]]) -> None:
        for text in texts:
            self.outputs.samples.write(SampleRecord(step=step, phase=phase, **text))
