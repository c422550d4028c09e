"""MasterWorker: opens one step after the other, decides when to save, evaluate and stop, and
reports all of it.

It holds descriptions of samples, never their tensors. `flow` is the way of a step's samples through
its calls. The lines of metrics, samples and ledger that it writes are its `Outputs`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from rlcli.api.dataflow import ModelInterfaceType
from rlcli.checkpoint.disk import explain_disk_errors
from rlcli.errors import ResourceError, Stopped
from rlcli.files import sync_folder
from rlcli.garbage import collect_as_usual
from rlcli.observe.display import Display
from rlcli.observe.json_lines import JsonLines, Warn
from rlcli.observe.metrics import MetricsWriter
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.samples import SampleRecord, SampleWriter
from rlcli.recipe.components import sources_of
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.calls import Calls
from rlcli.runtime.checkpoints import Checkpoints, RunState, Schedule, Start
from rlcli.runtime.commits import RunIdentity
from rlcli.runtime.evaluation import evaluate
from rlcli.runtime.flow import Flow
from rlcli.runtime.messages import Fields
from rlcli.runtime.ranks import Ranks, lanes_of
from rlcli.runtime.report import Answered, Incidents, NonfiniteSteps, Totals, named_reports
from rlcli.runtime.roles import training_steps
from rlcli.runtime.supply import Step, Supply, make_supply, runs_ahead
from rlcli.runtime.transport import Transport
from rlcli.topology import Topology

GENERATE = ModelInterfaceType.GENERATE
LAST_WAIT = 30.0
"""Seconds that a run ending with an error waits for the files of a checkpoint."""
SHORT_WAIT = 0.5
"""The same for a run that was asked to stop at once: enough to read the reports that have already
arrived."""

LAST_TRIES, PAUSE = 10, 0.5
"""Attempts to write the last lines of a run, and seconds between them."""


class MasterWorker:
    """Drives the workers behind a transport through one run: `start`, `run`, `shut_down`."""

    outputs: Outputs
    flow: Flow
    supply: Supply
    schedule: Schedule

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        transport: Transport,
        directory: RunDirectory,
        display: Display,
        identity: RunIdentity,
        start: Start | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        title: str = "step",
    ):
        self.recipe = recipe
        self.topology = topology
        self.directory = directory
        self.display = display
        self.should_stop = should_stop
        self.title = title
        """What the display calls this run's steps."""
        self.ranks = Ranks(transport, topology.world_size, recipe.launch.step_deadline)
        self.calls = Calls(recipe, topology, self.ranks, display.phase)
        self.checkpoints = Checkpoints(directory, identity, recipe, topology, self.ranks, display)
        self.rows: dict[str, int | None] = {}
        """Rows of each dataset; None if the dataset does not know."""
        self.steps = 0
        self.steps_done = 0
        self._start = start
        self._graph = train_graph(recipe)
        self._digests: dict[str, str] = {}
        self._nonfinite = NonfiniteSteps(directory, display, recipe.train.max_nonfinite_streak)
        self._incidents = Incidents(self.ranks, display)
        self._totals = Totals(self.calls.buffer, sources_of(recipe.datasets[recipe.train.dataset]))
        self._last_record: dict[str, float] = {}
        self._writing: list[asyncio.Task[None]] = []
        """Samples that are being written."""
        self._can_checkpoint = True
        self._checkpoint_seconds: float | None = None
        """How long training has waited for a checkpoint since the last record."""
        self._taken: int | None = None
        """The step of the last checkpoint that was started."""

    def start(self) -> None:
        """Have the workers read the data, load the models and restore the checkpoint. Nothing is
        written to the run's folder yet: an error up to this point leaves the run as it was."""
        self.ranks.run(self._start_up())

    def run(self, outputs: Outputs) -> None:
        """Run everything from the first evaluation to saving the models. If the run ends early, a
        checkpoint that is complete, or soon will be, is committed first."""
        self.outputs = outputs
        try:
            self.ranks.run(self._run())
        except BaseException as error:
            at_once = isinstance(error, Stopped | KeyboardInterrupt)
            self.ranks.run(self.checkpoints.settle_at_error(SHORT_WAIT if at_once else LAST_WAIT))
            raise

    def shut_down(self) -> None:
        """Shut the workers down."""
        self.ranks.run(self.ranks.let_go(lanes_of(self.recipe, self.topology)))

    # -- starting ----------------------------------------------------------------------------------

    async def _start_up(self) -> None:
        await self._open_datasets()
        await self._build_roles()
        if self._start is not None:
            await self._restore(self._start)
        self.flow = Flow(self.calls, self._graph, self.steps_done, runs_ahead(self.recipe))
        rows = self.rows[self.recipe.train.dataset]
        self.supply = await make_supply(
            self.recipe, self.calls, self.flow, rows, self.steps, self._start, self.should_stop
        )
        self._end_early()
        collect_as_usual()

    async def _open_datasets(self) -> None:
        """Open the datasets; find the run's length and check that it may resume from its
        checkpoint."""
        self.display.phase("reading the data")
        answers = await self.ranks.ask_all(
            "open_datasets", deadline=self.recipe.launch.startup_deadline
        )
        self.rows = dict(answers[0]["rows"])
        self.calls.streams = {name for name, rows in self.rows.items() if rows is None}
        self._digests = dict(answers[0]["digests"])
        done = self._start.state if self._start is not None else None
        self.steps = training_steps(
            self.recipe, self.rows, done.step if done else 0, done.samples if done else 0
        )
        if self._start is not None:
            self._start.check_datasets(self._digests, self.recipe)
            self._start.check_end(self.steps, self.recipe)

    async def _build_roles(self) -> None:
        self.display.phase("loading the models")
        train = self.recipe.train
        rows = self.rows[train.dataset] or self.steps * train.prompts_per_step
        deadline = self.recipe.launch.startup_deadline
        built = await self.ranks.ask_all(
            "build", {"steps": self.steps, "rows": rows}, deadline=deadline
        )
        without_state = {role for answer in built.values() for role in answer["without_state"]}
        if without_state:  # a user's engine may not support saving: the run then has no checkpoints
            self._can_checkpoint = False
            names = ", ".join(sorted(without_state))
            self.display.warning(
                f"the backend of {names} has no state(): this run cannot be resumed"
            )
        else:
            self.checkpoints.check_room(sum(answer["bytes"] for answer in built.values()))

    async def _restore(self, start: Start) -> None:
        """Resume from a checkpoint as if the run had never stopped."""
        self.display.phase("restoring the checkpoint")
        state = start.state
        args = {
            "folder": str(start.folder),
            "versions": dict(state.versions),
            "interfaces": dict(state.interfaces),
        }
        await self.ranks.ask_all("restore", args, deadline=self.recipe.launch.startup_deadline)
        self.steps_done = state.step
        self.checkpoints.starts_from(state.step)
        self._nonfinite.restore(state.nonfinite)
        self._totals.restore(state.tokens, state.used)

    # -- the run -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        self.display.start(self.recipe.name, self.directory.path, self.steps, self.title)
        self.directory.write_status("running", self.steps_done, self.steps)
        async with asyncio.TaskGroup() as tasks:
            ahead = tasks.create_task(self.supply.make_ahead())
            # a checkpoint, even of step 0, comes after the first evaluation
            is_first = self._start is None
            if (
                self.recipe.train.eval.at_start
                and is_first
                and (results := await self._evaluate(0))
            ):
                self.outputs.metrics.write(0, results)
            await self._train(tasks)
            ahead.cancel()
        for role in self.recipe.saved_roles:
            self.display.phase(f"saving {role}")
            args = {"role": role, "folder": str(self.directory.model(role))}
            await self.ranks.ask_all("save", args, ranks=self.topology.placement(role).ranks)

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """Do all steps, or, once the run is to stop, those already begun. A step may begin while
        the one before it is in progress, but for an evaluation or a checkpoint all wait."""
        self.schedule = Schedule(self.recipe.checkpoint, self.supply.sizes)
        in_progress: deque[asyncio.Task[None]] = deque()
        self.calls.times.begin()
        for number in range(self.steps_done, self.steps):
            while len(in_progress) > self._most_before(number):
                await in_progress.popleft()
            if not in_progress and self._is_checkpoint_due:
                await self._take_checkpoint()
            if self.should_stop() or (step := await self.supply.next_step(number)) is None:
                break
            before = in_progress[-1] if in_progress else None
            in_progress.append(tasks.create_task(self._do(step, before, tasks)))
        for task in in_progress:
            await task
        self._end_early()
        await self._finish()

    def _most_before(self, number: int) -> int:
        """How many steps may be in progress when a step begins."""
        every = self.recipe.train.eval.every_steps
        is_evaluation_before = every is not None and number % every == 0
        return (
            0
            if is_evaluation_before or self.schedule.is_due(number)
            else self.topology.open_steps - 1
        )

    async def _do(
        self, step: Step, before: Awaitable[None] | None, tasks: asyncio.TaskGroup
    ) -> None:
        """One step: its samples go through its calls; then what is known of it is written, after
        that of the step before."""
        await self.flow.go_through(self.supply.calls_in_steps, step)
        if before is not None:
            await before
        self.flow.finish_step(step.number)
        await self._record(step, tasks)
        await self.checkpoints.settle()

    def _end_early(self) -> None:
        """If samples are dropped, all rows may be used up before the planned steps are done."""
        if self.supply.opened == self.steps_done and self.supply.is_used_up:
            self.steps = self.supply.steps = self.steps_done

    async def _finish(self) -> None:
        """Commit the last checkpoint. Raises the error that ended the run early, and ResourceError
        F28 if the checkpoint could not be written."""
        settings, shortage = self.recipe.checkpoint, self.supply.failure
        is_wanted = settings.at_end if self.steps_done == self.steps else settings.on_stop
        is_wanted = self._can_checkpoint and (is_wanted or self._is_checkpoint_due)
        is_wanted = is_wanted and (shortage is None or self.steps_done > 0)
        await self.checkpoints.settle(wait=True)
        if is_wanted and self.checkpoints.committed != self.steps_done:
            await self._take_checkpoint()
            await self.checkpoints.settle(wait=True)
        if shortage is not None:
            raise shortage
        if is_wanted and self.checkpoints.committed != self.steps_done:
            problem = (
                f"step {self.steps_done}, the last one, is not committed; the "
                "warning above says why"
            )
            folder = str(self.checkpoints.folder)
            raise ResourceError(
                problem, where=folder, hint="make room, then rlcli resume", code="F28"
            )

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def _is_checkpoint_due(self) -> bool:
        taken = self._taken if self._taken is not None else self.checkpoints.committed or 0
        return (
            self._can_checkpoint
            and taken != self.steps_done
            and self.schedule.is_due(self.steps_done)
        )

    async def _take_checkpoint(self) -> None:
        """Take a checkpoint. No step is in progress: the workers hold the weights that the finished
        steps produced. Generation ahead of training continues."""
        while self._writing:
            await self._writing.pop(0)
        samples, queue = self.supply.samples, self.supply.samples.queue
        self.outputs.account(self.steps_done, self.supply.drain_drops())
        names = self.calls.names([sample.id for sample in samples.ready])
        state = RunState(
            step=self.steps_done,
            samples=self.supply.sizes.position(self.steps_done),
            drawn=queue.position,
            pass_rows=queue.pass_rows,
            returned=list(samples.waiting()),
            ready=[sample.as_json() | {"name": names[sample.id]} for sample in samples.ready],
            datasets=self._digests,
            nonfinite=self._nonfinite.streak,
            used=dict(self._totals.used),
            tokens=self._totals.tokens,
        )
        began = time.perf_counter()
        by_rank = self.calls.buffer.shared_out(list(names))
        await self.checkpoints.take(state, self._last_record, self.outputs.sync, by_rank)
        self._checkpoint_seconds = time.perf_counter() - began
        self._taken = self.steps_done
        self.schedule.note()

    # -- reporting ---------------------------------------------------------------------------------

    async def _record(self, step: Step, tasks: asyncio.TaskGroup) -> None:
        """Write down a finished step, and evaluate if it is time."""
        ids = step.samples.all_ids
        record = self._numbers(step)
        if any(mfc.interface_type is GENERATE for mfc in self._graph):
            lines = self.calls.describe(ids[: self.recipe.log.samples_per_step])
            self._writing.append(tasks.create_task(self._write_samples(step.number + 1, lines)))
        self.calls.forget(ids)
        self.steps_done = step.number + 1
        self._end_early()
        record |= await self._evaluate(self.steps_done) if self._is_evaluation_due() else {}
        self._last_record = record
        self.outputs.metrics.write(self.steps_done, record)
        self.outputs.account(
            self.steps_done, step.ledger("trained" if self.recipe.trained_roles else "done")
        )
        self.display.step({"step": self.steps_done, **record})
        self.directory.write_status("running", self.steps_done, self.steps)
        self._nonfinite.watch(self.steps_done, record, ids)
        self.calls.times.begin()

    def _numbers(self, step: Step) -> dict[str, float]:
        """The metrics of a step, without its evaluation."""
        seconds, tokens = self.calls.times.seconds, self._totals.count(step.samples.all_ids)
        reports = self.supply.reports(step)
        record = named_reports(reports, Answered.reports, lambda mfc: mfc.model_name)
        record |= self.supply.numbers(step)
        record |= {
            f"time/{name}": took for answered in reports for name, took in answered.times().items()
        }
        record |= {**self.calls.times.report(seconds), "tokens_per_second": tokens / seconds}
        record |= (
            self._totals.numbers(self.supply.sizes.position(step.number + 1))
            | self._incidents.restarts()
        )
        if self._checkpoint_seconds is not None:
            record["time/checkpoint"], self._checkpoint_seconds = self._checkpoint_seconds, None
        return record

    def _is_evaluation_due(self) -> bool:
        ev = self.recipe.train.eval
        if self.steps_done == self.steps:
            return ev.at_end
        return ev.every_steps is not None and self.steps_done % ev.every_steps == 0

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Run the evaluation graph over its whole dataset, with no step in progress; generation
        ahead continues."""
        ev = self.recipe.train.eval
        if ev.dataset is None:
            return {}
        self.display.phase(f"evaluating on {ev.dataset}")
        rows, shown = self.rows[ev.dataset] or 0, self.recipe.log.samples_per_step
        evaluated = await evaluate(self.recipe, self.calls, self.flow, rows, shown)
        self.outputs.show(step, "eval", evaluated.texts)
        version = {"eval/version": float(evaluated.version)} if self.supply.is_ahead else {}
        results = evaluated.numbers() | version
        self.display.evaluation(
            step, {key: value for key, value in results.items() if key.startswith("eval/")}
        )
        return results

    async def _write_samples(self, step: int, lines: Awaitable[list[Fields]]) -> None:
        self.outputs.show(step, "train", await lines)


@dataclass(frozen=True)
class Outputs:
    """The files of a run that every step adds to."""

    run: RunDirectory
    metrics: MetricsWriter
    samples: SampleWriter
    ledger: JsonLines
    """A line for each sample that was drawn, `e<epoch>r<row>`: when it was trained on,
    or why it was dropped."""

    @property
    def lines(self) -> tuple[JsonLines, ...]:
        """All files."""
        return self.metrics.lines, self.samples.lines, self.ledger

    def account(self, step: int, lines: Iterable[Fields]) -> None:
        """Write lines of the ledger, once a step is done."""
        for line in lines:
            self.ledger.write({"step": step, **line})

    def show(self, step: int, phase: str, lines: Iterable[Fields]) -> None:
        """Write responses for people to read."""
        for line in lines:
            self.samples.write(SampleRecord(step=step, phase=phase, **line))

    def sync(self) -> None:
        """Flush everything written so far to disk: a run that resumes keeps these lines. Raises
        ResourceError with the id of the fault."""
        for lines in self.lines:
            with explain_disk_errors(lines.path):
                lines.sync()
        with explain_disk_errors(self.run.path):
            sync_folder(self.run.path)

    def finish(self) -> None:
        """Write the last lines; retry if the disk is full for a moment.
        Raises ResourceError if some are lost."""
        for tries in range(1, LAST_TRIES + 1):
            try:
                return self.sync()
            except ResourceError as error:
                if tries == LAST_TRIES:
                    lost = ", ".join(
                        f"{lines.waiting} of {lines.path.name}"
                        for lines in self.lines
                        if lines.waiting
                    )
                    message = f"lines that are not on disk: {lost or 'unknown'}: {error.what}"
                    raise ResourceError(
                        message, where=error.where, hint=error.hint, code=error.code
                    ) from error
            time.sleep(PAUSE)


@contextmanager
def open_outputs(run: RunDirectory, tensorboard: bool, warn: Warn) -> Iterator[Outputs]:
    """Add to the files in a run's folder. At the end all lines must be on disk: raises
    ResourceError if they are not, or warns if another error ends the run."""
    with (
        MetricsWriter(run.metrics, run.tensorboard if tensorboard else None, warn) as metrics,
        SampleWriter(run.samples, warn) as samples,
        closing(JsonLines(run.ledger, warn)) as ledger,
    ):
        outputs = Outputs(run, metrics, samples, ledger)
        try:
            yield outputs
        except BaseException:
            for lines in outputs.lines:
                lines.close()
                if lines.waiting:
                    warn(f"{lines.waiting} lines of {lines.path.name} could not be written")
            raise
        outputs.finish()
