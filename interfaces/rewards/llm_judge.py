"""Reward by a language model that is asked for a score over HTTP."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.interface import register_interface
from rlcli.api.limits import Limits
from rlcli.errors import ResourceError, WorkerError
from rlcli.files import known_object, make_folder, replace_file

from ._chat_endpoint import ChatEndpoint, EndpointError, Patience
from ._judge_questions import JudgeQuestion
from ._judging import Judging, Questions
from ._scores import Score

if TYPE_CHECKING:
    from rlcli.api.model import Model

_LONGEST_KEPT = 4000
"""Characters of a reply that are stored with its score."""
_MOST_KEPT = 1 << 16
"""Scores that are kept in memory."""


@dataclass(kw_only=True)
class LLMJudgeInterface(Judging):
    """Asks a model behind an OpenAI-compatible chat endpoint (vLLM, SGLang, a service) for a score
    of each response.

    The score is in the last line of the reply, after a mark that the judged text cannot predict, so
    that a verdict inside a response has no effect. A question is repeated if the reply has any
    other form, or the server fails. A response that still has no score, although the judge scores a
    plain one, is rewarded with `unscored_reward`; a judge that fails is an error.
    """

    ELSEWHERE: ClassVar[str] = "openai api_judge"
    TRIED: ClassVar[bool] = False
    VARIABLES: ClassVar[tuple[str, ...]] = ("api_key_env",)
    LIMITS: ClassVar[Limits] = {
        "concurrency": {"ge": 1, "le": 256},
        "tries": {"ge": 1, "le": 1000},
        "try_s": {"gt": 0, "le": 1_000_000},
        "deadline_s": {"gt": 0, "le": 1_000_000},
        "pause_s": {"ge": 0, "le": 1_000_000},
        "max_tokens": {"ge": 1},
    }

    url: str
    """Base URL of the endpoint, without `/chat/completions`: `http://localhost:8000/v1`."""

    model: str
    """Name of the model at the endpoint."""

    api_key_env: str | None = None
    """The environment variable that holds the key; recipes and files never contain it."""

    max_tokens: int = 1024
    """Maximum length of the judge's reply."""

    concurrency: int = 8
    """Concurrent questions, per rank."""

    tries: int = 4
    """Maximum number of tries per question to get a usable reply."""

    try_s: float = 60.0
    """Wall-clock seconds for one reply."""

    deadline_s: float = 180.0
    """Wall-clock seconds for all tries of a question."""

    pause_s: float = 1.0
    """Wait before the second try; doubles before each further one."""

    cache: str | None = None
    """Folder that caches scores, also for later runs, keyed by the whole question; null: in
    memory, the last 65,536 of them."""

    scores_by_key: dict[str, float] = field(init=False, repr=False, default_factory=dict)
    endpoint: ChatEndpoint = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        if self.api_key_env and not key:
            hint = f"export {self.api_key_env}=…"
            raise ResourceError(
                f"llm_judge: the environment has no {self.api_key_env}", hint=hint, code="F51"
            )
        self.endpoint = ChatEndpoint(self.url, key)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N]. As metadata, for each sample, the
        shares of its responses without a score and of those whose score could not be computed.

        Raises WorkerError if the latter are too many, DataError where the template names a field
        that rows lack.
        """
        settings = {
            name: getattr(self, name) for name in ("url", "model", "temperature", "max_tokens")
        }
        scores = self._scores(self.questions(model.data_tokenizer, data, settings))
        self._forget_oldest()
        return self.judged(data, scores)

    def _scores(self, questions: Questions) -> list[Score | None]:
        """Ask identical questions only once. None for questions left when there are too many
        errors."""
        most, stop, failed = self.most_errors(len(questions.of_responses)), threading.Event(), []
        judge_works = _Once(lambda: self._scores_control(questions, stop))

        def score(question: JudgeQuestion) -> Score | None:
            if stop.is_set():
                return None
            try:
                return Score(self._score(question, stop))
            except EndpointError as problem:
                if problem.of_question and judge_works():
                    return self.unscored(str(problem))
                failed.append(question)
                if len(failed) > most:
                    stop.set()
                message = (
                    f"no score from {self.model} at {self.url} in up to "
                    f"{self.tries} tries: {problem}"
                )
                return Score(error=WorkerError(message, code="F52"))

        asked = list(dict.fromkeys(questions.of_responses))
        with ThreadPoolExecutor(self.concurrency) as threads:
            scores = dict(zip(asked, threads.map(score, asked), strict=True))
        return [scores[question] for question in questions.of_responses]

    def _scores_control(self, questions: Questions, stop: threading.Event) -> bool:
        """Whether the judge scores a plain response now."""
        assert questions.control is not None
        try:
            self._ask(questions.control, stop)
        except EndpointError:
            return False
        return True

    def _score(self, question: JudgeQuestion, stop: threading.Event) -> float:
        score = self._remembered(question)
        if score is None:
            score, reply = self._ask(question, stop)
            self._remember(question, score, reply)
        return score

    def _ask(self, question: JudgeQuestion, stop: threading.Event) -> tuple[float, str]:
        body = {
            "model": self.model,
            "messages": question.messages_for_server,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
        }
        patience = Patience(self.tries, self.try_s, self.deadline_s, self.pause_s)
        return self.endpoint.ask(body, question.score, patience, stop)

    def _remembered(self, question: JudgeQuestion) -> float | None:
        score = self.scores_by_key.get(question.key)
        if score is None and self.cache is not None:
            score = known_object(_file(self.cache, question)).get("score")
        return float(score) if score is not None and question.allows(score) else None

    def _remember(self, question: JudgeQuestion, score: float, reply: str) -> None:
        self.scores_by_key[question.key] = score
        if self.cache is not None:
            file = _file(self.cache, question)
            make_folder(file.parent)
            replace_file(
                file, json.dumps({"score": score, "reply": reply[-_LONGEST_KEPT:]}).encode()
            )

    def _forget_oldest(self) -> None:
        for key in list(self.scores_by_key)[:-_MOST_KEPT]:
            self.scores_by_key.pop(key, None)


class _Once:
    """What a function returns, called by the first of several threads that ask."""

    def __init__(self, function: Callable[[], bool]):
        self._function = function
        self._turn = threading.Lock()
        self._result: bool | None = None

    def __call__(self) -> bool:
        with self._turn:
            if self._result is None:
                self._result = self._function()
            return self._result


def _file(folder: str, question: JudgeQuestion) -> Path:
    return Path(folder) / question.key[:2] / f"{question.key}.json"


register_interface("llm_judge", LLMJudgeInterface)
