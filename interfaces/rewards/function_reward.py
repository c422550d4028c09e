"""Reward by your own Python function, which maps a response and its row to a number."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface, register_interface
from rlcli.api.limits import Limits, Needs
from rlcli.errors import DataError, ProjectError, RlcliError, WorkerError
from rlcli.processes import file_write_gap

from .._prints import show_prints
from ._scores import Score, ScoreErrors, described_responses
from ._worker_pool import BrokenWorker, End, TaskOutcome, WorkerPool

if TYPE_CHECKING:
    from rlcli.api.model import Model

log = logging.getLogger(__name__)

PROJECT = "RLCLI_PROJECT"
"""Environment variable that names the project's folder if it is not the working directory."""


@dataclass(kw_only=True)
class FunctionRewardInterface(ScoreErrors, ModelInterface):
    """Scores each response with your own Python function.

        def score(response, answer):
            return 1.0 if answer in response else 0.0

    The function receives what its parameters name: `prompt`, `response`, and any field of the row's
    metadata; with `**row` all of them. It returns a finite number. It runs in separate processes,
    with limits on processor time and memory; a response that makes it exceed one scores
    `limit_reward`. An exception, a process that exits and one that hangs are not the response's
    fault: the call is retried once, in another process, and then counts as an error.

    The file is loaded once per process, and each call runs in a fork of that process: nothing that
    a call changes or starts affects the next one. So slow imports, reading and computation belong
    at the top of the file. The processes see only a few environment variables, and write no files.
    What it prints, the last 3000 characters of each call and of its import, is in the log of its
    rank (`rlcli logs`).
    A function that executes what a model wrote can be made to return anything: use `code_reward`.
    """

    ELSEWHERE: ClassVar[str] = "custom python reward_func reward_function custom_reward_function"
    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    FILES: ClassVar[tuple[str, ...]] = ("path",)
    NEEDS: ClassVar[Needs] = {"function=score": "path"}
    LIMITS: ClassVar[Limits] = {
        "cpu_s": {"gt": 0, "le": 1_000_000},
        "memory_gib": {"gt": 0},
        "hang_s": {"gt": 0, "le": 1_000_000},
        "workers": {"ge": 1, "le": 1024},
    }

    path: str | None = None
    """The Python file with the function: in the project's folder,
    the working directory or next to the recipe."""

    function: str = "score"
    """Name of the function; without `path`, including its module, as `package.module:score`."""

    cpu_s: float = 10.0
    """Seconds of processor time for one response. Less if a call has so many responses that it
    could otherwise exceed `launch.step_deadline`: each then gets at least an equal share of the
    time."""

    memory_gib: float = 8.0
    """Address space per process."""

    limit_reward: float = 0.0
    """Reward of a response that exceeds a limit."""

    hang_s: float = 60.0
    """Wall-clock seconds without any activity after which a process counts as hung."""

    workers: int = 2
    """Number of processes, per rank."""

    pool: WorkerPool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is None) != (":" in self.function):
            hint = "with path, function is a name such as score; without it, package.module:score"
            raise ValueError(f"path is {self.path!r} and function is {self.function!r}; {hint}")
        folders = [str(folder) for folder in _folders()]
        self.pool = WorkerPool(
            "_function_worker.py",
            workers=self.workers,
            cpu_s=self.cpu_s,
            quiet_s=self.hang_s,
            memory_bytes=int(self.memory_gib * 2**30),
            settings={"path": self._file(), "function": self.function, "folders": folders},
        )

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N]. As metadata, for each sample, the
        shares of its responses that exceeded a limit and that could not be scored.

        Raises ProjectError or WorkerError if too many could not be scored,
        DataError where rows lack a field.
        """
        rows = described_responses(model.data_tokenizer, data)
        return self.rewarded(data, self._scores(rows, model.call_deadline))

    def _scores(self, rows: Sequence[dict[str, Any]], deadline_s: float) -> list[Score | None]:
        _report_gap()
        tasks, most = [{"row": row} for row in rows], self.most_errors(len(rows))
        try:
            outcomes = self.pool.run(
                tasks, again=_is_error, is_fault=_is_error, most_faults=most, deadline_s=deadline_s
            )
        except BrokenWorker as problem:
            raise self._not_loaded(problem) from problem
        for outcome in outcomes:
            if outcome is not None:
                show_prints(outcome.reply.get("printed"))
        return [self._score(outcome) if outcome is not None else None for outcome in outcomes]

    def check_ready(self) -> None:
        """Load the function in a process. Raises ProjectError if that fails,
        WorkerError if no process starts."""
        try:
            self.pool.check_start()
        except BrokenWorker as problem:
            raise self._not_loaded(problem) from problem

    def _not_loaded(self, problem: BrokenWorker) -> ProjectError:
        message = f"{self._name} cannot be loaded: {problem}\n{problem.reply['traceback']}"
        return ProjectError(
            message.rstrip(), hint=self._other_functions(), where=problem.reply["where"], code="F51"
        )

    def _other_functions(self) -> str | None:
        """The hint that names the functions of the file, if the one that is set is not among
        them."""
        source = Path(self._file() or os.devnull).read_text(encoding="utf-8", errors="replace")
        names = re.findall(r"^def ([A-Za-z]\w*)", source, re.MULTILINE)
        if not names or self.function in names:
            return None
        return f"the argument function names it; the file defines {', '.join(names)}"

    def _score(self, outcome: TaskOutcome) -> Score:
        reply = outcome.reply
        if "value" in reply:
            return Score(reply["value"])
        if outcome.end is End.CPU:
            return Score(
                self.limit_reward, limit=f"{self._name} used up {self.cpu_s:g} s of processor time"
            )
        if outcome.end is End.LATE:
            return Score(
                self.limit_reward,
                limit=f"{self._name} was not run: the other responses of its call used up the time",
            )
        if "limit" in reply:
            return Score(
                self.limit_reward, limit=f"{self._name} used up {self.memory_gib:g} GiB of memory"
            )
        if "lacks" in reply:
            message = f"{self._name} takes {', '.join(reply['lacks'])}, which the rows do not have"
            raise DataError(message, hint=f"they have {', '.join(reply['row'])}", code="F31")
        return Score(error=self._error(outcome))

    def _error(self, outcome: TaskOutcome) -> RlcliError:
        reply = outcome.reply
        if outcome.end is None:
            message = f"{self._name} raised {reply['error']}\n{reply['traceback']}"
            return ProjectError(message.rstrip(), where=reply["where"] or self._file(), code="F51")
        why = (
            f"in {self.hang_s:g} s by the clock"
            if outcome.end is End.HUNG
            else "while the function ran"
        )
        return WorkerError(f"{self._name}: {outcome.end} {why}", where=self._file(), code="F52")

    @property
    def _name(self) -> str:
        return f"{self.function} of {self.path}" if self.path is not None else self.function

    def _file(self) -> str | None:
        """Raises ProjectError if there is no such file."""
        if self.path is None:
            return None
        file_here = next(
            (file for folder in _folders() if (file := folder / self.path).is_file()), None
        )
        if file_here is None:
            message = (
                f"function_reward: there is no file {self.path} in "
                f"{' or '.join(map(str, _folders()))}"
            )
            raise ProjectError(
                message, hint="path names a Python file that has the function", code="F51"
            )
        return str(file_here.resolve())


def _folders() -> list[Path]:
    """Where to look for files and modules: the project's folder, if it is named,
    and the working directory."""
    return [Path(folder) for folder in (os.environ.get(PROJECT), os.getcwd()) if folder]


def _is_error(outcome: TaskOutcome) -> bool:
    return outcome.end in (End.HUNG, End.DIED, End.GARBLED) or "error" in outcome.reply


@functools.cache
def _report_gap() -> None:
    if gap := file_write_gap():
        log.warning(
            "function_reward: the kernel lacks Landlock: files can still %s by the function", gap
        )


register_interface("function_reward", FunctionRewardInterface)
