"""Records finished steps: writes their numbers, responses and samples to the run's files and the
terminal, together with the run's state so far and what went wrong meanwhile."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from rlcli.api.dataflow import ModelInterfaceType
from rlcli.api.key_meaning import SEQUENCES, SOURCE
from rlcli.checkpoint.run_state import RunState
from rlcli.errors import NumericError
from rlcli.messaging.messages import RESTARTED, WARNED, Fields, Report
from rlcli.observe.display import Display
from rlcli.observe.outputs import Outputs
from rlcli.observe.profile import described
from rlcli.observe.progress import RESTARTS
from rlcli.observe.run_directory import RunDirectory
from rlcli.recipe.components import sources_of
from rlcli.recipe.graph import train_graph
from rlcli.recipe.schema import Recipe
from rlcli.runtime.buffer import Buffer
from rlcli.runtime.calls import Calls
from rlcli.runtime.evaluation import Evaluated
from rlcli.runtime.ranks import Ranks
from rlcli.runtime.report import Answered, named_reports, performance, profile_of
from rlcli.runtime.supply import Step, Supply

MEASURES = ("/grad_norm", "/loss")
"""Name endings of the numbers that show whether an update was finite."""
WEIGHT = "/loss_weight"
"""Name ending of the number that shows how much a role's loss counted."""
WARN_EVERY = 10
"""Steps without anything to train on between two warnings."""


class Recorder:
    """The record of finished steps, and what is written of it."""

    outputs: Outputs

    def __init__(
        self,
        recipe: Recipe,
        directory: RunDirectory,
        display: Display,
        calls: Calls,
        ranks: Ranks,
        state: RunState,
    ):
        """`state`: what the run continues from."""
        self.numbers: Mapping[str, float] = {}
        """The metrics of the last finished step."""
        self._directory = directory
        self._display = display
        self._calls = calls
        generates = any(
            mfc.interface_type is ModelInterfaceType.GENERATE for mfc in train_graph(recipe)
        )
        self._shown = recipe.log.samples_per_step if generates else 0
        """Samples of a step whose responses are written."""
        self._profiled = recipe.log.profiled_steps
        self._state = "trained" if recipe.trained_roles else "done"
        limit = recipe.train.max_nonfinite_streak
        self._nonfinite = NonfiniteSteps(directory, display, limit, state.nonfinite)
        self._untrained = UntrainedSteps(display)
        self._incidents = Incidents(ranks, display)
        sources = sources_of(recipe.datasets[recipe.train.dataset])
        self._totals = Totals(calls.buffer, sources, state)
        self._writing: set[asyncio.Task[None]] = set()
        """Responses that are being written."""

    def as_state(self) -> dict[str, Any]:
        """What a run that resumes after the last step must know."""
        totals = self._totals
        return {
            "nonfinite": self._nonfinite.streak,
            "used": dict(totals.used),
            "tokens": totals.tokens,
        }

    def measure(self, step: Step, supply: Supply) -> dict[str, float]:
        """The metrics of a step."""
        times = self._calls.timeline.end_step(step.number + 1)
        tokens = self._totals.count(step.samples.all_ids)
        reports = supply.reports(step)
        numbers = named_reports(reports, Answered.reports, lambda mfc: mfc.model_name)
        numbers |= supply.numbers(step)
        for answered in reports:
            numbers |= answered.costs()
        numbers |= performance(reports)
        if step.number + 1 in self._profiled:
            calls = profile_of(step.number + 1, reports)
            self._directory.write_text(*described(step.number + 1, calls))
        numbers |= times
        numbers["tokens_per_second"] = tokens / times["time/step"]
        numbers |= self._totals.numbers(supply.sizes.position(step.number + 1))
        return numbers | self._incidents.restarts()

    def write_samples(self, step: Step, tasks: asyncio.TaskGroup) -> None:
        """Write some responses of a step, whose samples may be released after this."""
        if self._shown:
            lines = self._calls.describe(step.samples.all_ids[: self._shown])
            writing = tasks.create_task(self._write_lines(step.number + 1, lines))
            self._writing.add(writing)
            writing.add_done_callback(self._writing.discard)

    async def _write_lines(self, step: int, lines: Awaitable[list[Fields]]) -> None:
        self.outputs.show(step, "train", await lines)

    async def wait(self) -> None:
        """Wait until all responses are written."""
        await asyncio.gather(*self._writing)

    def write(self, step: Step, numbers: Mapping[str, float], steps: int) -> None:
        """Write down a step of a run of `steps` steps. Raises NumericError F37 if too many steps in
        a row were not finite."""
        self.numbers, done = numbers, step.number + 1
        self.outputs.metrics.write(done, numbers)
        self.outputs.account(done, step.ledger(self._state))
        self._display.step({"step": done, **numbers})
        self._directory.write_status("running", done, steps)
        self._untrained.watch(done, numbers)
        self._nonfinite.watch(done, numbers, step.samples.all_ids)

    def add(self, step: int, results: Mapping[str, float]) -> None:
        """Write down the results, if there are any, of an evaluation after a step whose record, if
        it has one, is written already."""
        if results:
            self.numbers = {**self.numbers, **results}
            self.outputs.metrics.add(step, results)

    def write_evaluation(
        self, step: int, evaluated: Evaluated, numbers: Mapping[str, float]
    ) -> None:
        """Write responses of an evaluation after a step, and show its results."""
        self.outputs.show(step, "eval", evaluated.texts)
        results = {name: value for name, value in numbers.items() if name.startswith("eval/")}
        self._display.evaluation(step, results)


class Totals:
    """Counts the samples of one step after the other."""

    def __init__(self, buffer: Buffer, sources: Sequence[str], state: RunState):
        """`sources`: the datasets that the training dataset is made of; none if it is a single one.
        `state`: with the counts to continue from."""
        self.tokens = state.tokens
        self.used = Counter(state.used)
        """Samples of each of these datasets."""
        self._buffer = buffer
        self._sources = sources

    def count(self, ids: Sequence[str]) -> int:
        """Add the samples of a step; returns their tokens."""
        tokens = sum(self._buffer.sequence_lengths(ids, SEQUENCES))
        self.tokens += tokens
        if self._sources:
            self.used.update(self._buffer.metadata(ids, SOURCE))
        return tokens

    def numbers(self, samples: int) -> dict[str, float]:
        """Numbers for the metrics. `samples`: of all finished steps,
        each a prompt or another row of the dataset."""
        used = {f"used/{name}": float(self.used[name]) for name in self._sources}
        return {"total/prompts": float(samples), "total/tokens": float(self.tokens), **used}


class NonfiniteSteps:
    """Consecutive non-finite steps, with their samples."""

    def __init__(
        self,
        directory: RunDirectory,
        display: Display,
        limit: int,
        streak: Iterable[tuple[int, Sequence[str]]],
    ):
        self.streak = [(step, list(samples)) for step, samples in streak]
        """(step, samples)."""
        self._directory = directory
        self._display = display
        self._limit = limit

    def watch(self, step: int, record: Mapping[str, float], ids: Sequence[str]) -> None:
        """Record a finished step. Raises NumericError F37, before anything is saved,
        if too many in a row failed."""
        bad = [
            key
            for key, value in record.items()
            if key.endswith(MEASURES) and not math.isfinite(value)
        ]
        if not bad:
            self.streak.clear()
            return
        self.streak.append((step, list(ids)))
        problem = f"step {step}: {bad[0]} is not finite"
        self._display.warning(
            f"[F33] {problem}, update skipped ({len(self.streak)} of {self._limit})"
        )
        if len(self.streak) >= self._limit:
            steps = [{"step": number, "samples": samples} for number, samples in self.streak]
            file = self._directory.write_text(
                "crash/nonfinite.json", json.dumps(steps, indent=2) + "\n"
            )
            raise NumericError(
                f"{problem}, for {self._limit} steps in a row; no model was saved",
                hint=f"lower the learning rate, or look at the samples named in {file}",
                code="F37",
            )


class UntrainedSteps:
    """Warns of consecutive steps in which nothing counted in the loss of a role: of the first, and
    of every tenth."""

    def __init__(self, display: Display):
        self._display = display
        self._in_a_row = 0

    def watch(self, step: int, record: Mapping[str, float]) -> None:
        """Count a finished step."""
        roles = [
            key.removesuffix(WEIGHT)
            for key, value in record.items()
            if key.endswith(WEIGHT) and value == 0
        ]
        self._in_a_row = self._in_a_row + 1 if roles else 0
        if self._in_a_row % WARN_EVERY == 1:
            self._display.warning(
                f"step {step}: nothing to train on for {', '.join(roles)}, whose weights did not "
                f"change ({self._in_a_row} in a row); rlcli samples shows the responses: "
                "a setting such as mask_too_long may leave all of them out"
            )


class Incidents:
    """Shows what ranks report in addition to their answers: each warning once, whichever of them
    has it, and each process of a server or pool that was started again."""

    def __init__(self, ranks: Ranks, display: Display):
        self._display = display
        self._warnings: set[tuple[str, str]] = set()
        """Kinds of warnings that were shown."""
        self._restarts: Counter[str] = Counter()
        """Group → how many of its processes were started again since the last step ended."""
        ranks.listen(WARNED, self._warn)
        ranks.listen(RESTARTED, self._restart)

    def restarts(self) -> dict[str, float]:
        """`restarts/<group>` of each group that had some, for the metrics of a step.
        The next step begins."""
        counts = {
            f"{RESTARTS}{group}": float(count) for group, count in sorted(self._restarts.items())
        }
        self._restarts.clear()
        return counts

    def _warn(self, report: Report) -> None:
        kind = str(report.value["logger"]), str(report.value["template"])
        if kind not in self._warnings:
            self._warnings.add(kind)
            log_file = f"logs/rank{report.rank}.log"
            self._display.warning(
                f"rank {report.rank}: {report.value['text']} (repetitions: {log_file})"
            )

    def _restart(self, report: Report) -> None:
        process = report.value
        self._restarts[process["group"]] += 1
        self._display.warning(
            f"{process['name']} on {process['machine']} {process['how']}; it was started again"
        )
