"""Reward by tests: does the program in a response pass the tests of its row?"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import Example, register_interface
from rlcli.api.limits import Limits
from rlcli.errors import ResourceError, WorkerError

from ._code_tasks import Part, Task, passed, program_of, tasks_of
from ._sandbox import unbounded
from ._scores import RightOrWrong, Score, ScoreErrors, one_each, places_of, rows_of
from ._text import response_texts
from ._worker_pool import BrokenWorker, End, TaskOutcome, WorkerPool

if TYPE_CHECKING:
    from rlcli.api.model import Model

log = logging.getLogger(__name__)

ScoreBy = Literal["all", "share"]
Isolation = Literal["namespaces", "limits"]

_MIB = 1 << 20
_SPARE_S = 60.0
"""Wall-clock seconds that a worker may need in addition to its program."""
NOT_RUN = {
    "passed": [],
    "output": "",
    "status": -1,
    "limit": "was not run: the other programs of its call used up the time",
}


@dataclass(kw_only=True)
class CodeRewardInterface(ScoreErrors, RightOrWrong):
    """Runs the Python program in each response against the tests of its row.

    `tests` of the row is a list that may hold

        {"input": "2 3\\n", "output": "5\\n"}    what it reads from stdin and must write to stdout
        "assert add(2, 3) == 5"                code that uses the program's functions by name

    A row's `entry_point` names the only function that its code uses, also available as `candidate`;
    a function `check(candidate)` is then called. The code itself has to call its other functions
    and test cases: a row whose code only defines them is refused. Programs and test code run in
    separate processes: only plain values (numbers, texts, lists, dicts …) are passed to a
    comparison, so no program can influence its result. Trailing blanks are ignored.

    Programs have Python's standard library and an empty folder. They are isolated by Linux
    namespaces: no network, none of the machine's other files, no other processes. Where namespaces
    are unavailable the run is refused.

    Without `entry_point`, any name that the tests use and do not define is the program's, except
    modules, builtins and what tests often forget to import, such as `Counter` and `isclose`. A list
    that a program changes changes in its test too, after the statement that called the program.
    """

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards", "solved")}
    EXAMPLES: ClassVar[tuple[Example, ...]] = (
        {
            "row": {
                "tests": [{"input": "2 3\n", "output": "5\n"}, {"input": "2 2\n", "output": "4"}]
            },
            "right": "```python\nprint(sum(map(int, input().split())))\n```",
            "wrong": "```python\nprint(4)\n```",
            "rewards": {
                "```python\nprint(sum(map(int, input().split())))\n```": 1.0,
                "```python\nprint(5)\n```": 0.0,
                "```python\nprint(sum(map(int, input().split())))\nexit(1)\n```": 0.0,
                "print(sum(map(int, input().split())))": 0.0,
            },
        },
        {
            "row": {"tests": ["assert add(2, 3) == 5", "assert add(0, 1) == 1"]},
            "right": "```python\ndef add(a, b):\n    return a + b\n```",
            "wrong": "```python\ndef add(a, b):\n    return 5\n```",
        },
    )
    LIMITS: ClassVar[Limits] = {
        "cpu_s": {"ge": 1, "le": 1_000_000},
        "wall_s": {"gt": 0, "le": 1_000_000},
        "memory_mib": {"ge": 32},
        "file_mib": {"ge": 1},
        "output_mib": {"ge": 1},
        "processes": {"ge": 1},
        "workers": {"ge": 1, "le": 1024},
    }

    tests_key: str = "tests"
    """Field of the row that contains its tests."""

    program: Part = "last_block"
    """Which part of a response is the program: a block between ``` and ```, or the whole response.
    Of several blocks, those that say ```python come before those without a language, and these
    before others."""

    score: ScoreBy = "all"
    """all: a program is correct if it passes all tests. share: one that passes only some gets a
    proportional reward in between."""

    isolation: Isolation = "namespaces"
    """limits: programs run with the limits below and no isolation. They can then read your files,
    talk to the machine's services and kill your processes."""

    cpu_s: int = 5
    """Seconds of processor time per process of a program, for one input or all test code."""

    wall_s: float = 30.0
    """Wall-clock seconds for one input or all test code. Less if a call has so many programs that
    it could otherwise exceed `launch.step_deadline`: each then gets at least an equal share of the
    time."""

    memory_mib: int = 512
    """Memory of a program: of all its processes together, and the address space of each."""

    file_mib: int = 16
    """Largest file that a program may write; twice as much in total."""

    output_mib: int = 1
    """Maximum output of a program."""

    processes: int = 16
    """Maximum number of processes and threads of a program."""

    workers: int = 2
    """Programs run at the same time, per rank."""

    pool: WorkerPool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "memory_bytes": self.memory_mib * _MIB,
            "file_bytes": self.file_mib * _MIB,
            "output_bytes": self.output_mib * _MIB,
            "processes": self.processes,
        }
        self.pool = WorkerPool(
            "_code_worker.py",
            workers=self.workers,
            cpu_s=_SPARE_S,
            quiet_s=2 * self.wall_s + _SPARE_S,
            memory_bytes=(self.memory_mib + 1024) * _MIB,
            settings={
                "limits": limits,
                "confined": self.isolation == "namespaces",
                "file_bytes": 1024 * _MIB,
            },
        )

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards`, `solved` [N]. As metadata, for each
        sample, the shares of its responses that exceeded a limit and that could not be scored.

        Raises DataError for rows without tests, ResourceError if programs cannot be isolated,
        WorkerError if too many could not be run.
        """
        tasks = [
            tasks_of(row, self.tests_key, sample)
            for row, sample in zip(rows_of(data), places_of(data), strict=True)
        ]
        programs = [
            program_of(text, self.program) for text in response_texts(model.data_tokenizer, data)
        ]
        return self._judged(data, self._scores(programs, tasks, model.call_deadline))

    def _marked(self, data: SequenceSample, right: Sequence[bool]) -> SequenceSample:
        return self._judged(
            data,
            [Score(self.correct_reward if is_right else self.wrong_reward) for is_right in right],
        )

    def _judged(self, data: SequenceSample, scores: Sequence[Score | None]) -> SequenceSample:
        import torch

        judged = self.rewarded(data, scores)
        solved = [
            bool(score and not score.error and score.value == self.correct_reward)
            for score in scores
        ]
        judged.update_(one_each(data, {"solved": torch.tensor(solved, dtype=torch.bool)}, {}))
        return judged

    def _scores(
        self, programs: Sequence[str | None], tasks: Sequence[list[Task]], deadline_s: float
    ) -> list[Score | None]:
        """Run identical programs only once for each task."""
        _report_gaps()
        runs: dict[str, Task] = {}
        keys: list[list[str]] = [[] for _ in programs]
        for keys_of_response, program, of_row in zip(keys, programs, tasks, strict=True):
            for task in of_row if program is not None else ():
                keys_of_response.append(json.dumps([program, task]))
                runs[keys_of_response[-1]] = {"program": program, **task}
        asked = [
            {name: value for name, value in run.items() if name != "expected"}
            for run in runs.values()
        ]
        most = self.most_errors(len(programs))
        try:
            results = self.pool.run(
                asked, again=_is_error, is_fault=_is_error, most_faults=most, deadline_s=deadline_s
            )
        except BrokenWorker as problem:
            hint = (
                "allow unprivileged user namespaces, or set isolation to limits, which lets "
                "programs read your files"
            )
            raise ResourceError(
                f"programs cannot be isolated here: {problem}", hint=hint, code="F53"
            ) from problem
        outcomes = dict(zip(runs, results, strict=True))
        return [
            self._score([(runs[key], outcomes[key]) for key in keys_of_response])
            for keys_of_response in keys
        ]

    def _score(self, results: Sequence[tuple[Task, TaskOutcome | None]]) -> Score | None:
        """The score of one response; without results, of one that contains no program."""
        marks: list[bool] = []
        limit = ""
        for task, outcome in results:
            if outcome is None:
                return None
            if _is_error(outcome):
                why = outcome.end or outcome.reply["error"]
                return Score(error=WorkerError(f"a program could not be run: {why}", code="F52"))
            reply: Mapping[str, Any] = outcome.reply if outcome.end is None else NOT_RUN
            marks += passed(task, reply)
            limit = limit or reply["limit"]
        if marks and all(marks):
            return Score(self.correct_reward)
        share = sum(marks) / len(marks) if marks and self.score == "share" else 0.0
        value = self.wrong_reward + share * (self.correct_reward - self.wrong_reward)
        return Score(value, limit=f"a program {limit}" if limit else "")


def _is_error(outcome: TaskOutcome) -> bool:
    return outcome.end not in (None, End.LATE) or "error" in outcome.reply


@functools.cache
def _report_gaps() -> None:
    if gaps := unbounded():
        log.warning("code_reward: the limits of a program do not bound %s", gaps)


register_interface("code_reward", CodeRewardInterface)
