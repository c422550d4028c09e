"""What a run reports: what its calls answered, where its time went, what it has come to, and what
went wrong nearby.

Warnings that a rank or a process of a pool logs, where no user looks, reach the terminal, each
once; each stays in its process's log too, where its repetitions are.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rlcli.api.dataflow import MFCDef
from rlcli.api.key_meaning import SEQUENCES, SOURCE
from rlcli.errors import NumericError
from rlcli.observe.display import Display
from rlcli.observe.progress import RESTARTS
from rlcli.observe.run_directory import RunDirectory
from rlcli.runtime.buffer import Buffer, owners
from rlcli.runtime.messages import RESTARTED, WARNED, Report, Tell
from rlcli.runtime.output_checks import Segments
from rlcli.runtime.ranks import Answers, Ranks
from rlcli.runtime.responses import Moments
from rlcli.topology import RolePlacement, WorkerGroup

T = TypeVar("T")

MEASURES = ("/grad_norm", "/loss")
"""Name endings of the numbers that show whether an update was finite."""


LONGEST = 2000
"""Characters of a warning that are shown."""
LOGGER = "rlcli"
"""The logger above those of rlcli and of components; those of other libraries warn of what users
cannot change."""


@dataclass(frozen=True)
class Answered:
    """A call that all its ranks have answered."""

    mfc: MFCDef
    seconds: Mapping[int, float]
    """Rank → how long it took."""
    updates: int
    """Updates of its role's weights per training step; 0 if they never change."""
    version: int
    """Version of the role's weights when the call began:
    the number of training steps behind them."""
    stats: Mapping[str, float]
    """Statistics reported by the interface, which has already reduced them over the ranks."""
    scores: Mapping[str, Moments]
    """Scores over all ranks' outputs."""
    counts: Mapping[str, Moments]
    """Errors and the like."""
    dropped: Mapping[str, str]
    """Sample → why the call drops it."""
    segments: Mapping[str, Segments]
    """Sample → the segments of its responses, if the weights may change while they are sampled."""
    copy_seconds: float = 0.0
    """Seconds until the last rank of the role that follows its role had the new weights;
    0 if none follows."""
    copy_bytes: int = 0
    """Bytes that ranks sent each other for that."""

    @classmethod
    def of(
        cls, mfc: MFCDef, placement: RolePlacement, answers: Answers, updates: int = 0
    ) -> Answered:
        """`answers`: those of the call's ranks to `run_call`."""
        first, owned = answers[placement.ranks[0]], [answers[rank] for rank in owners(placement)]
        seconds = {rank: answers[rank]["seconds"] for rank in placement.ranks}
        version = int(first["version"]) // max(updates, 1)
        segments = {
            id_: in_steps(of_sample, max(updates, 1))
            for answer in owned
            for id_, of_sample in answer["segments"].items()
        }
        scores = _sums(answer["scores"] for answer in owned)
        counts = _sums(answer["counts"] for answer in owned)
        dropped = {id_: why for answer in owned for id_, why in answer["dropped"].items()}
        return cls(
            mfc=mfc,
            seconds=seconds,
            updates=updates,
            version=version,
            stats=first["stats"],
            scores=scores,
            counts=counts,
            dropped=dropped,
            segments=segments,
        )

    def and_then(self, later: Answered) -> Answered:
        """Merge with the same call on other samples of the step."""
        return replace(
            later,
            seconds={rank: seconds + later.seconds[rank] for rank, seconds in self.seconds.items()},
            scores=_sums((self.scores, later.scores)),
            counts=_sums((self.counts, later.counts)),
            copy_seconds=self.copy_seconds + later.copy_seconds,
            copy_bytes=self.copy_bytes + later.copy_bytes,
        )

    def averages(self) -> dict[str, Moments]:
        """Scores, and counts of errors and the like if there were any."""
        counts = {name: moments for name, moments in self.counts.items() if moments.total}
        return counts | {name: moments for name, moments in self.scores.items() if moments.size}

    def reports(self) -> dict[str, float]:
        """Everything to record about the call, except its times."""
        return {name: moments.mean for name, moments in self.averages().items()} | dict(self.stats)

    def costs(self) -> dict[str, float]:
        """By name of the metric: seconds of the slowest rank, and what it took to copy weights, if
        they were copied."""
        call = self.mfc.name
        copy = {f"time/{call}.copy_to": self.copy_seconds, f"bytes/{call}.copy_to": self.copy_bytes}
        return {f"time/{call}": max(self.seconds.values())} | {
            name: cost for name, cost in copy.items() if cost
        }


def in_steps(responses: Segments, updates: int) -> Segments:
    """The segments of a sample with versions counted in training steps of so many updates."""
    return [
        [(version // updates, tokens) for version, tokens in response] for response in responses
    ]


def add_report(reports: dict[str, Answered], answered: Answered) -> None:
    """Add what a call answered to what it has answered on other samples of the step."""
    call = answered.mfc.name
    reports[call] = reports[call].and_then(answered) if call in reports else answered


def _sums(reports: Iterable[Mapping[str, Sequence[Any]]]) -> dict[str, Moments]:
    """The moments of each name, as ranks send them, added up."""
    totals: dict[str, Moments] = {}
    for report in reports:
        for name, moments in report.items():
            totals[name] = totals.get(name, Moments()) + Moments(*moments)
    return totals


def named_reports(
    calls: Sequence[Answered],
    reports: Callable[[Answered], Mapping[str, T]],
    section: Callable[[MFCDef], str],
) -> dict[str, T]:
    """Reports of calls as `<section>/<name>`, or as `<call>/<name>` where several calls of a
    section report the same name: `math_inf/reward`."""
    named = [
        (answered.mfc, name, value)
        for answered in calls
        for name, value in reports(answered).items()
    ]
    uses = Counter((section(mfc), name) for mfc, name, _ in named)

    def full(mfc: MFCDef, name: str) -> str:
        prefix = section(mfc) if uses[section(mfc), name] == 1 else mfc.name
        return f"{prefix}/{name}" if prefix else name

    return {full(mfc, name): value for mfc, name, value in named}


class Totals:
    """Counts the samples of one step after the other."""

    def __init__(self, buffer: Buffer, sources: Sequence[str]):
        """`sources`: the datasets that the training dataset is made of;
        none if it is a single one."""
        self.tokens = 0
        self.used: Counter[str] = Counter()
        """Samples of each of these datasets."""
        self._buffer = buffer
        self._sources = sources

    def restore(self, tokens: int, used: Mapping[str, int]) -> None:
        """Continue with the totals of a checkpoint."""
        self.tokens, self.used = tokens, Counter(used)

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


class StepTimes:
    """Adds up seconds since the last step ended. A call counts when it is done, even if it belongs
    to a later step."""

    def __init__(
        self, groups: Sequence[WorkerGroup], clock: Callable[[], float] = time.perf_counter
    ):
        self._groups = {"+".join(group.roles): group.ranks for group in groups}
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Start timing the next step."""
        self._began = self._clock()
        self._busy: Counter[int] = Counter()
        self._moves = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since the step began."""
        return self._clock() - self._began

    def count_work(self, seconds: Mapping[int, float]) -> None:
        """Count a call or a copy of weights; `seconds`: what each of its ranks spent on it."""
        self._busy.update(seconds)

    def count_move(self, seconds: Iterable[float]) -> None:
        """Count a transfer of tensors between ranks, `seconds` for each participant: it took as
        long as the slowest."""
        self._moves += max(seconds, default=0.0)

    def report(self, seconds: float) -> dict[str, float]:
        """Times of a step that took `seconds`: `time/moves`, and for each group of ranks
        `time/idle/<roles>`, the mean seconds in which its ranks computed nothing, and
        `time/idle_share/<roles>`, their share of the step."""
        times = {"time/step": seconds}
        for name, ranks in self._groups.items():
            idle = max(0.0, seconds - sum(self._busy[rank] for rank in ranks) / len(ranks))
            times[f"time/idle/{name}"] = idle
            if seconds:
                times[f"time/idle_share/{name}"] = idle / seconds
        if self._moves:
            times["time/moves"] = self._moves
        return times


class NonfiniteSteps:
    """Consecutive non-finite steps, with their samples."""

    def __init__(self, directory: RunDirectory, display: Display, limit: int):
        self.streak: list[tuple[int, list[str]]] = []
        """(step, samples)."""
        self._directory = directory
        self._display = display
        self._limit = limit

    def restore(self, streak: Iterable[tuple[int, Sequence[str]]]) -> None:
        """Continue with the streak of a checkpoint."""
        self.streak = [(step, list(samples)) for step, samples in streak]

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


class WarningsToMaster(logging.StreamHandler):
    """Writes warnings to stderr, as Python does where there is no handler,
    and reports the first of each kind."""

    def __init__(self, report: Tell):
        super().__init__()
        self.setLevel(logging.WARNING)
        self._report = report
        self._reported: set[tuple[str, str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        template = str(getattr(record, "template", record.msg))
        if (record.name, template) in self._reported:
            return
        self._reported.add((record.name, template))
        value = {"logger": record.name, "template": template, "text": record.getMessage()[:LONGEST]}
        try:
            self._report(WARNED, value, None)
        except Exception:
            self.handleError(record)


def report_warnings(report: Tell) -> None:
    """Report the warnings of this process from now on."""
    logging.getLogger(LOGGER).addHandler(WarningsToMaster(report))


def log_again(report: Report) -> None:
    """Log a warning that another process has reported, as one of this process."""
    logger, template, text = (str(report.value[key]) for key in ("logger", "template", "text"))
    logging.getLogger(logger).warning("%s", text, extra={"template": template})


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
