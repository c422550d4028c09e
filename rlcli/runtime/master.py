"""MasterWorker: opens one step after the other, and decides when to save, evaluate and stop.

It holds descriptions of samples, never their tensors. `flow` is the way of a step's samples through
its calls; `record` writes down its results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from rlcli.api.headway import say
from rlcli.checkpoint.completion import RunIdentity
from rlcli.checkpoint.run_state import BEGINNING, RunState, Start
from rlcli.errors import Stopped
from rlcli.garbage import collect_as_usual
from rlcli.messaging.transport import Transport
from rlcli.observe.display import Display
from rlcli.observe.outputs import Outputs
from rlcli.observe.replay import progress_so_far
from rlcli.observe.run_directory import RunDirectory
from rlcli.observe.trace import TraceFile
from rlcli.recipe.dataset_sizes import training_steps
from rlcli.recipe.measured_arguments import Choice
from rlcli.recipe.schema import Recipe
from rlcli.runtime.building import build_models
from rlcli.runtime.calls import Calls
from rlcli.runtime.checkpoints import Checkpoints, Schedule
from rlcli.runtime.chunks import Ready
from rlcli.runtime.evaluation import evaluate
from rlcli.runtime.flow import Flow
from rlcli.runtime.rank_counts import LOADING, READING, RESTORING
from rlcli.runtime.ranks import Ranks
from rlcli.runtime.record import Recorder
from rlcli.runtime.supply import Step, Supply, restored_samples
from rlcli.topology import Topology
from rlcli.topology.groups import lanes_of
from rlcli.topology.stages import Stages

LAST_WAIT = 30.0
"""Seconds that a run ending with an error waits for the files of a checkpoint."""
SHORT_WAIT = 0.5
"""The same for a run that was asked to stop at once: enough to read the reports that have already
arrived."""


class MasterWorker:
    """Drives the workers behind a transport through one run: `start`, `run`, `shut_down`."""

    flow: Flow
    supply: Supply
    schedule: Schedule
    _last_evaluated: int | None = None
    """The step after which the last evaluation was done."""

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
        self._start = start
        self._state = start.state if start is not None else BEGINNING
        """What the run continues from."""
        self.ranks = Ranks(
            transport,
            topology.world_size,
            recipe.launch.step_deadline,
            topology.devices_per_node,
        )
        self.calls = Calls(recipe, topology, self.ranks, display.phase)
        self.checkpoints = Checkpoints(directory, identity, recipe, topology, self.ranks, display)
        self.choices: tuple[Choice, ...] = ()
        """Values that the ranks have measured for what the recipe leaves open."""
        self.recorder = Recorder(recipe, directory, display, self.calls, self.ranks, self._state)
        self.rows: dict[str, int | None] = {}
        """Rows of each dataset; None if the dataset does not know."""
        self.steps = 0
        self.steps_done = self._state.step
        self._stages = Stages.of(recipe)
        self._digests: dict[str, str] = {}

    def start(self) -> None:
        """Have the workers read the data, load the models and restore the checkpoint. Nothing is
        written to the run's folder yet: an error up to this point leaves the run as it was."""
        self.ranks.run(self._start_up())

    def run(self, outputs: Outputs) -> None:
        """Run everything from the first evaluation to saving the models. If the run ends early, a
        checkpoint that is complete, or soon will be, is committed first."""
        self.recorder.outputs = outputs
        steps_kept, step = self.recipe.log.trace_steps, self._state.step
        self.calls.timeline.write_to(TraceFile(self.directory.path, steps_kept, step))
        try:
            self.ranks.run(self._run())
        except BaseException as error:
            at_once = isinstance(error, Stopped | KeyboardInterrupt)
            self.ranks.run(self.checkpoints.settle_at_error(SHORT_WAIT if at_once else LAST_WAIT))
            raise
        finally:
            self.calls.timeline.write()

    def shut_down(self) -> None:
        """Shut the workers down."""
        self.ranks.run(self.ranks.let_go(lanes_of(self.recipe, self.topology)))

    # -- starting ----------------------------------------------------------------------------------

    async def _start_up(self) -> None:
        await self._open_datasets()
        await self._build_roles()
        stages, ready = self._stages, list[Ready]()
        if self._start is not None:
            await self._restore(self._start)
            ready = await restored_samples(self._start, self.calls, stages)
        self.flow = Flow(self.calls, stages.graph, self.steps_done, stages.is_ahead)
        self.supply = Supply(
            self.recipe,
            stages,
            self.calls,
            self.flow,
            self.rows[self.recipe.train.dataset],
            self.steps,
            self._state,
            ready,
            self.should_stop,
        )
        self._end_early()
        collect_as_usual()

    async def _open_datasets(self) -> None:
        """Open the datasets; find the run's length and check that it may resume from its
        checkpoint."""
        say(READING)
        answers = await self.ranks.ask_all(
            "open_datasets", deadline=self.recipe.launch.startup_deadline
        )
        self.rows = dict(answers[0]["rows"])
        self.calls.streams = {name for name, rows in self.rows.items() if rows is None}
        self._digests = dict(answers[0]["digests"])
        state = self._state
        self.steps = training_steps(self.recipe, self.rows, state.step, state.samples)
        if self._start is not None:
            self._start.check_datasets(self._digests, self.recipe)
            self._start.check_end(self.steps, self.recipe)
            if warning := self._start.changed_evaluation(self._digests, self.recipe):
                self.display.warning(warning)

    async def _build_roles(self) -> None:
        say(LOADING)
        train = self.recipe.train
        rows = self.rows[train.dataset] or self.steps * train.prompts_per_step
        built = await build_models(self.ranks, self.recipe, self.steps, rows)
        self.choices = built.choices
        answers = built.answers.values()
        without_state = {role for answer in answers for role in answer["without_state"]}
        if without_state:  # a user's engine may not support saving: the run then has no checkpoints
            self.checkpoints.are_possible = False
            names = ", ".join(sorted(without_state))
            self.display.warning(
                f"the backend of {names} has no state(): this run cannot be resumed"
            )
        else:
            self.checkpoints.check_room(sum(answer["bytes"] for answer in answers))

    async def _restore(self, start: Start) -> None:
        """Resume from a checkpoint as if the run had never stopped."""
        say(RESTORING)
        state = start.state
        args = {
            "folder": str(start.folder),
            "versions": dict(state.versions),
            "interfaces": dict(state.interfaces),
        }
        await self.ranks.ask_all("restore", args, deadline=self.recipe.launch.startup_deadline)
        self.checkpoints.starts_from(state.step)

    # -- the run -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._start_display()
        self.directory.write_status("running", self.steps_done, self.steps)
        async with asyncio.TaskGroup() as tasks:
            ahead = tasks.create_task(self.supply.make_ahead())
            # a checkpoint, even of step 0, comes after the first evaluation
            is_due = self.recipe.train.eval.at_start and self.steps_done == 0
            if is_due and self._last_evaluated is None and not self.should_stop():
                self.recorder.add(0, await self._evaluate(0))
            await self._train(tasks)
            ahead.cancel()
        for role in self.recipe.saved_roles:
            self.display.phase(f"saving {role}")
            args = {"role": role, "folder": str(self.directory.model(role))}
            await self.ranks.ask_all("save", args, ranks=self.topology.placement(role).ranks)

    def _start_display(self) -> None:
        """Show the run: of one that is resumed, what it has done."""
        self.display.start(self.recipe.name, self.directory.path, self.steps, self.title)
        if self._start is not None:
            progress = progress_so_far(self.directory.metrics, self.steps)
            self._last_evaluated = max((step for step, _ in progress.evaluations), default=None)
            self.display.take_up(progress)

    async def _train(self, tasks: asyncio.TaskGroup) -> None:
        """Do all steps, or, once the run is to stop, those already begun. A step may begin while
        the one before it is in progress; an evaluation or a checkpoint begins only when no step
        is."""
        self.schedule = Schedule(self.recipe.checkpoint, self.supply.sizes)
        in_progress: deque[asyncio.Task[None]] = deque()
        self.calls.timeline.begin_step()
        for number in range(self.steps_done, self.steps):
            while len(in_progress) > self._most_before(number):
                await in_progress.popleft()
            if not in_progress and self._is_checkpoint_due:
                await self._take_checkpoint()
                self.calls.timeline.begin_step()
            if self.should_stop() or (step := await self.supply.next_step(number)) is None:
                break
            before = in_progress[-1] if in_progress else None
            in_progress.append(tasks.create_task(self._do(step, before, tasks)))
        for task in in_progress:
            await task
        self._end_early()
        await self._evaluate_at_end()
        await self._finish()

    def _most_before(self, number: int) -> int:
        """How many steps may be in progress when a step begins."""
        every = self.recipe.train.eval.every_steps
        is_evaluation_before = every is not None and number % every == 0
        if is_evaluation_before or self.schedule.is_due(number):
            return 0
        return self.topology.open_steps - 1

    async def _do(
        self, step: Step, before: Awaitable[None] | None, tasks: asyncio.TaskGroup
    ) -> None:
        """One step: its samples go through its calls; then its record is written, after that of the
        step before."""
        await self.flow.go_through(self._stages.of_step, step)
        if before is not None:
            await before
        self.flow.finish_step(step.number)
        await self._record(step, tasks)
        await self.checkpoints.settle()

    def _end_early(self) -> None:
        """If samples are dropped, all rows may be used up before the planned steps are done."""
        if self.supply.samples.step == self.steps_done and self.supply.is_used_up:
            self.steps = self.steps_done

    async def _evaluate_at_end(self) -> None:
        """Evaluate after the last step if nobody knew that it was the last when it was done: its
        run was stopped there and is not continued, or later samples were all dropped."""
        is_over = self.steps_done == self.steps and self.supply.failure is None
        is_due = is_over and self._is_evaluation_due()
        if is_due and self._last_evaluated != self.steps_done:
            results = await self._evaluate(self.steps_done)
            self.recorder.add(self.steps_done, results)
            await self.checkpoints.add_metrics(self.steps_done, results)

    async def _finish(self) -> None:
        """Commit the last checkpoint. Raises the error that ended the run early, and ResourceError
        F28 if the checkpoint could not be written."""
        shortage = self.supply.failure
        has_begun = shortage is None or self.steps_done > 0
        is_last_due = has_begun and self._is_last_checkpoint_due
        await self.checkpoints.settle(wait=True)
        if is_last_due and self.checkpoints.committed != self.steps_done:
            await self._take_checkpoint()
            await self.checkpoints.settle(wait=True)
        if shortage is not None:
            raise shortage
        if is_last_due:
            self.checkpoints.check_committed(self.steps_done)

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def _is_checkpoint_due(self) -> bool:
        return (
            self.checkpoints.are_possible
            and self.checkpoints.newest != self.steps_done
            and self.schedule.is_due(self.steps_done)
        )

    @property
    def _is_last_checkpoint_due(self) -> bool:
        """Whether one is due as the run ends."""
        settings = self.recipe.checkpoint
        is_due = settings.at_end if self.steps_done == self.steps else settings.on_stop
        return self._is_checkpoint_due or (is_due and self.checkpoints.are_possible)

    async def _take_checkpoint(self) -> None:
        """Take a checkpoint. No step is in progress: the workers hold the weights that the finished
        steps produced. Generation ahead of training continues."""
        with self.calls.timeline.doing(f"checkpoint of step {self.steps_done}", "checkpoint"):
            await self._copy_state()
        self.schedule.note()

    async def _copy_state(self) -> None:
        await self.recorder.wait()
        self.recorder.outputs.account(self.steps_done, self.supply.samples.drain_drops())
        ready = self.supply.ready_names()
        state = RunState(
            step=self.steps_done,
            datasets=self._digests,
            **self.supply.as_state(self.steps_done, ready),
            **self.recorder.as_state(),
        )
        by_rank = self.calls.buffer.shared_out(list(ready))
        sync = self.recorder.outputs.sync
        await self.checkpoints.take(state, self.recorder.numbers, sync, by_rank)

    # -- reporting ---------------------------------------------------------------------------------

    async def _record(self, step: Step, tasks: asyncio.TaskGroup) -> None:
        """Write down a finished step, and evaluate if it is time."""
        numbers = self.recorder.measure(step, self.supply) | self.checkpoints.drain_times()
        self.recorder.write_samples(step, tasks)
        self.calls.forget(step.samples.all_ids)
        self.steps_done = step.number + 1
        self._end_early()
        if self._is_evaluation_due():
            numbers |= await self._evaluate(self.steps_done)
        self.recorder.write(step, numbers, self.steps)
        self.calls.timeline.begin_step()

    def _is_evaluation_due(self) -> bool:
        ev = self.recipe.train.eval
        if ev.at_end and self.steps_done == self.steps:
            return True
        return ev.every_steps is not None and self.steps_done % ev.every_steps == 0

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Run the evaluation graph over its whole dataset, with no step in progress; generation
        ahead continues."""
        dataset = self.recipe.train.eval.dataset
        if dataset is None:
            return {}
        self.display.phase(f"evaluating on {dataset}")
        rows, shown = self.rows[dataset] or 0, self.recipe.log.samples_per_step
        with self.calls.timeline.doing(f"evaluation on {dataset}", "evaluation"):
            evaluated = await evaluate(self.recipe, self.calls, self.flow, rows, shown)
        numbers = evaluated.numbers()
        if self._stages.is_ahead:
            numbers["eval/version"] = float(evaluated.version)
        self.recorder.write_evaluation(step, evaluated, numbers)
        self._last_evaluated = step
        return numbers
