"""Rule-based reward: does the response end with the right answer?"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import Example, register_interface
from rlcli.api.key_meaning import DROPPED, REASONS
from rlcli.api.limits import Limits
from rlcli.api.metrics import Metrics
from rlcli.errors import DataError, escape_control

from .._answers.verdict import Comparison, Gold, Verdict, answer_key, final_answer, gold_of, judge
from ._math_pool import MathPool
from ._scores import RightOrWrong, by_sample, one_each, places_of, shares
from ._text import response_texts, turn_texts

if TYPE_CHECKING:
    from rlcli.api.model import Model

log = logging.getLogger(__name__)

OnError = Literal["stop", "wrong", "drop"]

COUNTED = {
    Verdict.UNPARSED: "reward_unparsed",
    Verdict.TIMEOUT: "reward_timeouts",
    Verdict.CRASHED: "reward_crashes",
    Verdict.NO_GOLD: "reward_errors",
}
"""Metrics: shares of responses that count as wrong for a reason other than their value."""

FAILED = {
    Verdict.WRONG: "wrong answer",
    Verdict.UNPARSED: "cannot be read as one value",
    Verdict.TIMEOUT: "comparing it took too long",
    Verdict.CRASHED: "comparing it ended its process",
}
LONGEST_ANSWER = 60
"""Characters of an answer that are shown."""


@dataclass(kw_only=True)
class MathRewardInterface(RightOrWrong):
    """Compares the final answer of each response with the row's `answer`: numbers exactly, words as
    text, choices such as `(B) 12` by letter or content, and other expressions with math-verify, in
    separate processes. The answer of an episode may be all that its last turn says.

    A response is always either right or wrong: an answer that is not one value, or that cannot be
    compared within bounds, is wrong and counted.
    """

    ELSEWHERE: ClassVar[str] = "rule rule_based verifier math_verify accuracy gsm8k rw_math"
    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards", "solved", "answer_classes")}
    DROPS: ClassVar[Declaration] = {"inference": ("unreadable_answer if on_error=drop",)}
    METRICS: ClassVar[Metrics] = {
        "reward_unparsed": (
            "share",
            "share of responses whose answer is neither one value nor a small expression",
        ),
        "reward_timeouts": ("share", "share of responses whose answer took too long to compare"),
        "reward_crashes": (
            "share",
            "share of responses whose answer ended the process that compared it",
        ),
        "reward_errors": ("share", "share of responses to rows whose own answer cannot be read"),
    }
    EXAMPLES: ClassVar[tuple[Example, ...]] = (
        {
            "row": {"answer": "3/4"},
            "rewards": {
                "Half of 3/2. The answer is 0.75.": 1.0,
                "\\boxed{\\frac{6}{8}}": 1.0,
                "<think>#### 3/4</think>No, that is not it. #### 4/3": 0.0,
                "#### 3/4 or 4/3": 0.0,
            },
        },
        {
            "row": {"answer": "1,250 km"},
            "rewards": {"#### 1250": 1.0, "\\boxed{1,250} km": 1.0, "#### 1.25": 0.0},
        },
        {
            "row": {"answer": "-12"},
            "rewards": {"#### −12": 1.0, "#### -1,2": 0.0, "<think>It is #### -12": 0.0},
        },
        {"row": {"answer": "1/2"}, "rewards": {"#### 50%": 1.0, "#### 50": 0.0}},
    )
    LIMITS: ClassVar[Limits] = {
        "max_error_fraction": {"ge": 0, "le": 1},
        "workers": {"ge": 1, "le": 1024},
        "timeout_s": {"gt": 0, "le": 1_000_000},
    }

    last_number: bool = False
    """Without `####`, `\\boxed{}`, `<answer>` or "answer is", and unless the whole response is one
    value, take the last number of the response as its answer."""

    symbolic: bool = True
    """Compare expressions whose texts differ with math-verify; if false, they are wrong."""

    timeout_s: float = 2.0
    """Longest symbolic comparison, in seconds of processor time;
    after that the answer counts as wrong."""

    workers: int = 2
    """Processes for symbolic comparison, per rank."""

    on_error: OnError = "stop"
    """How to treat rows whose own answer cannot be read. "stop": the run ends if more than
    `max_error_fraction` of a call's samples are such rows. "wrong": all responses to them are
    wrong. "drop": others are drawn in their place; an evaluation counts them as wrong."""

    max_error_fraction: float = 0.01
    """Share of a call's samples (rounded up to whole ones) whose own answer may be unreadable."""

    pool: MathPool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.pool = MathPool(self.workers, self.timeout_s)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards`, `solved`, `answer_classes` [N]. As
        metadata, for each sample, the shares of its responses with each verdict of COUNTED.

        Raises DataError for rows without an answer, or if too many answers cannot be read.
        """
        owners = [
            sample
            for sample, lengths in enumerate(data.seqlens["packed_input_ids"])
            for _ in lengths
        ]
        golds = _golds(data)
        answers = self._answers(model, data)
        expected = [golds[sample] for sample in owners]
        verdicts = self._judge(answers, expected)
        _report(places_of(data), answers, verdicts)
        unreadable = {
            sample
            for sample, verdict in zip(owners, verdicts, strict=True)
            if verdict is Verdict.NO_GOLD
        }
        self._refuse_rows(data, golds, sorted(unreadable))
        reasons = list(map(_reason, answers, expected, verdicts))
        rewarded = self._rewarded(data, answers, verdicts, reasons)
        if self.on_error == "drop":
            rewarded.metadata[DROPPED] = [
                "unreadable_answer" if row in unreadable else None for row in range(data.bs)
            ]
        return rewarded

    def score_texts(self, responses: Sequence[str], answers: Sequence[Any]) -> list[float | None]:
        """The rewards that `inference` would give these responses;
        None where the row's own answer cannot be read."""
        finals = [final_answer(text, self.last_number) for text in responses]
        verdicts = self._judge(finals, [gold_of(str(answer)) for answer in answers])
        reward = {Verdict.RIGHT: self.correct_reward, Verdict.NO_GOLD: None}
        return [reward.get(verdict, self.wrong_reward) for verdict in verdicts]

    def _marked(self, data: SequenceSample, right: Sequence[bool]) -> SequenceSample:
        nothing = [None] * len(right)
        verdicts = [Verdict.RIGHT if is_right else Verdict.WRONG for is_right in right]
        return self._rewarded(data, nothing, verdicts, nothing)

    def _rewarded(
        self,
        data: SequenceSample,
        answers: Sequence[str | None],
        verdicts: Sequence[Verdict],
        reasons: Sequence[str | None],
    ) -> SequenceSample:
        """One reward per response, the reasons for it, and the counts per sample."""
        import torch

        from rlcli.ops.evaluation import answer_classes

        solved = torch.tensor([verdict is Verdict.RIGHT for verdict in verdicts], dtype=torch.bool)
        rewards = torch.where(solved, self.correct_reward, self.wrong_reward).to(torch.float32)
        vote = iter(_votes(answers, verdicts))
        classes = answer_classes(
            [[next(vote) for _ in group] for group in data.seqlens["packed_input_ids"]]
        )
        counted = {
            name: shares(data, [verdict is kind for verdict in verdicts])
            for kind, name in COUNTED.items()
        }
        return one_each(
            data,
            {"rewards": rewards, "solved": solved, "answer_classes": classes},
            counted | {REASONS: by_sample(data, reasons)},
        )

    def _answers(self, model: Model, data: SequenceSample) -> list[str | None]:
        """The final answer of each response, which may be all that the last turn of an episode
        says."""
        answers = [
            final_answer(text, self.last_number)
            for text in response_texts(model.data_tokenizer, data)
        ]
        for number, turns in enumerate(turn_texts(model.data_tokenizer, data)):
            if answers[number] is None and turns[1:]:
                answers[number] = final_answer(turns[-1], self.last_number)
        return answers

    def _judge(self, answers: list[str | None], golds: list[Gold]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        undecided: dict[Comparison, list[int]] = {}
        for index, (answer, gold) in enumerate(zip(answers, golds, strict=True)):
            verdict = judge(answer, gold)
            if isinstance(verdict, Comparison):
                undecided.setdefault(verdict, []).append(index)
                verdict = Verdict.WRONG
            verdicts.append(verdict)
        if undecided and self.symbolic:
            for indices, verdict in zip(
                undecided.values(), self.pool.compare(list(undecided)), strict=True
            ):
                for index in indices:
                    verdicts[index] = verdict
        return verdicts

    def _refuse_rows(self, data: SequenceSample, golds: list[Gold], rows: list[int]) -> None:
        """`rows`: indices of the rows whose own answer cannot be read."""
        if not rows:
            return
        problem = (
            f"the answers of {len(rows)} of {data.bs} samples cannot be read; first, sample "
            f"{data.ids[rows[0]]}: {escape_control(golds[rows[0]].text[:80])!r}"
        )
        if self.on_error == "stop" and len(rows) > math.ceil(self.max_error_fraction * data.bs):
            hint = (
                "correct these rows; with on_error: wrong their responses count as wrong, with "
                "drop they are replaced"
            )
            raise DataError(problem, hint=hint, code="F51")
        consequence = (
            "these samples are dropped"
            if self.on_error == "drop"
            else "responses to them count as wrong"
        )
        log.warning("%s; %s", problem, consequence)


def _golds(data: SequenceSample) -> list[Gold]:
    answers = data.metadata.get("answer", [None] * data.bs)
    for id_, answer in zip(data.ids, answers, strict=True):
        if answer is None:
            hint = "math_reward needs a dataset whose rows have an answer"
            raise DataError(f"sample {id_} has no answer to compare with", hint=hint, code="F31")
    return [gold_of(str(answer)) for answer in answers]


def _reason(answer: str | None, gold: Gold, verdict: Verdict) -> str | None:
    """Why a response is not right."""
    if verdict is Verdict.RIGHT:
        return None
    if verdict is Verdict.NO_GOLD:
        return f"the row's own answer cannot be read: {gold.text[:LONGEST_ANSWER]}"
    if answer is None:
        return "no answer found"
    return f"{FAILED[verdict]}: {answer[:LONGEST_ANSWER]}; expected: {gold.text[:LONGEST_ANSWER]}"


def _votes(answers: Sequence[str | None], verdicts: Sequence[Verdict]) -> list[Hashable]:
    """The answer that each response votes for; all right answers count as one,
    however they are written."""
    keys: list[Hashable] = []
    for answer, verdict in zip(answers, verdicts, strict=True):
        if verdict is Verdict.RIGHT:
            keys.append(verdict)
        else:
            keys.append(None if answer is None else answer_key(answer))
    return keys


def _report(
    places: Sequence[str], answers: Sequence[str | None], verdicts: Sequence[Verdict]
) -> None:
    """Warn about comparisons that failed; unparsed answers are too common for a warning,
    and only counted."""
    for event, verdict in (
        ("took too long", Verdict.TIMEOUT),
        ("ended its process", Verdict.CRASHED),
    ):
        failed = [number for number, judged in enumerate(verdicts) if judged is verdict]
        if failed:
            log.warning(
                (
                    "%d of %d responses count as wrong because comparing their "
                    "answers %s; first, %s: %s"
                ),
                len(failed),
                len(verdicts),
                event,
                places[failed[0]],
                escape_control(str(answers[failed[0]])),
            )


register_interface("math_reward", MathRewardInterface)
