"""Rule-based reward: does the response end with the right answer?"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import ModelInterface, register_interface
from rlcli.errors import DataError, WorkerError, escape_control
from rlcli.interfaces._answers import final_answer, quick_match, truth
from rlcli.interfaces._math_pool import MathPool, Verdict
from rlcli.interfaces._text import response_texts

if TYPE_CHECKING:
    import torch

    from rlcli.api.model import Model

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class MathRewardInterface(ModelInterface):
    """Compares the final answer of each response with the row's `answer`: by text, then by exact arithmetic,
    and only where neither decides by math-verify, in processes that are killed when they take too long.
    """

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards", "solved")}

    correct_reward: float = 1.0
    """Reward of a response with the right final answer."""

    wrong_reward: float = 0.0
    """Reward of any other response."""

    last_number: bool = False
    """Without `####`, `\\boxed{}` or "answer is", take the last number of the response as its answer."""

    symbolic: bool = True
    """Use math-verify where text and arithmetic do not decide; otherwise such answers are wrong."""

    timeout_s: float = 5.0
    """Longest symbolic comparison, in seconds; then its process is killed."""

    workers: int = 2
    """Processes for symbolic comparison, per rank."""

    on_error: Literal["stop", "wrong"] = "stop"
    """A comparison that fails or times out counts as wrong and is reported. "stop": end the run when more
    than `max_error_fraction` of a call's responses fail. "wrong": go on whatever happens."""

    max_error_fraction: float = 0.01
    """Share of a call's responses (rounded up to whole ones) that may fail."""

    pool: MathPool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.on_error not in ("stop", "wrong"):
            raise ValueError(f"on_error is {self.on_error!r}; it must be stop or wrong")
        if not 0 <= self.max_error_fraction <= 1:
            raise ValueError(f"max_error_fraction is {self.max_error_fraction}; it must lie in [0, 1]")
        if self.workers < 1 or not self.timeout_s > 0:
            raise ValueError(f"workers ({self.workers}) must be at least 1 and timeout_s ({self.timeout_s}) above 0")
        self.pool = MathPool(self.workers, self.timeout_s)

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards`, `solved`; metadata `reward_errors`,
        `reward_timeouts`."""
        import torch

        owners = [sample for sample, lengths in enumerate(data.seqlens["packed_input_ids"]) for _ in lengths]
        expected = _answers(data)
        texts = response_texts(model.tokenizer, data)
        verdicts = self._judge(texts, [expected[sample] for sample in owners])
        timeouts, errors = [0] * data.bs, [0] * data.bs
        failures = []
        for sample, verdict in zip(owners, verdicts, strict=True):
            if isinstance(verdict, str):
                (timeouts if verdict == "timeout" else errors)[sample] += 1
                failures.append(f"sample {data.ids[sample]}: {verdict}")
        self._report(failures, len(owners))
        solved = torch.tensor([verdict is True for verdict in verdicts], dtype=torch.bool)
        return self._rewarded(data, solved, errors, timeouts)

    def mock(self, interface_type: str, model: Model, data: SequenceSample) -> SequenceSample:
        """Half of the responses are right, by chance; no answer is looked at."""
        from rlcli.interfaces._mock import uniform

        if interface_type != "inference":
            return super().mock(interface_type, model, data)
        ones = [[1] * len(lengths) for lengths in data.seqlens["packed_input_ids"]]
        return self._rewarded(data, uniform(model, data, ones, "solved") < 0.5, [0] * data.bs, [0] * data.bs)

    def score_texts(self, responses: Sequence[str], answers: Sequence[Any]) -> list[float | None]:
        """The rewards that `inference` would give these responses; None for a comparison that fails."""
        verdicts = self._judge(list(responses), [truth(str(answer)) for answer in answers])
        reward = {True: self.correct_reward, False: self.wrong_reward}
        return [None if isinstance(verdict, str) else reward[verdict] for verdict in verdicts]

    def _rewarded(
        self, data: SequenceSample, solved: torch.Tensor, errors: list[int], timeouts: list[int]
    ) -> SequenceSample:
        """One reward for each response; errors and time-outs for each sample."""
        import torch

        ones = [[1] * len(lengths) for lengths in data.seqlens["packed_input_ids"]]
        rewards = torch.where(solved, self.correct_reward, self.wrong_reward).to(torch.float32)
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens={"rewards": ones, "solved": ones},
            data={"rewards": rewards, "solved": solved},
            metadata={"reward_errors": errors, "reward_timeouts": timeouts},
        )

    def _judge(self, texts: list[str], expected: list[str]) -> list[Verdict]:
        verdicts: list[Verdict | None] = []
        undecided: dict[tuple[str, str], list[int]] = {}
        for place, (text, wanted) in enumerate(zip(texts, expected, strict=True)):
            answer = final_answer(text, self.last_number)
            verdict = quick_match(answer, wanted) if answer is not None else False
            if answer is not None and verdict is None and self.symbolic:
                undecided.setdefault((answer, wanted), []).append(place)
            verdicts.append(verdict)
        compared = self.pool.compare(list(undecided)) if undecided else []
        for places, verdict in zip(undecided.values(), compared, strict=True):
            for place in places:
                verdicts[place] = verdict
        return [False if verdict is None else verdict for verdict in verdicts]

    def _report(self, failures: list[str], responses: int) -> None:
        for failure in failures[:5]:
            log.warning("reward not computed, counted as wrong: %s", escape_control(failure))
        if self.on_error == "stop" and len(failures) > math.ceil(self.max_error_fraction * responses):
            raise WorkerError(
                f"{len(failures)} of {responses} rewards could not be computed; first: {failures[0]}",
                hint="look at these answers; on_error: wrong goes on regardless",
                code="F51",
            )


def _answers(data: SequenceSample) -> list[str]:
    answers = data.metadata.get("answer", [None] * data.bs)
    for id_, answer in zip(data.ids, answers, strict=True):
        if answer is None:
            hint = "math_reward needs a dataset whose rows have an answer"
            raise DataError(f"sample {id_} has no answer to compare with", hint=hint, code="F31")
    return [truth(str(answer)) for answer in answers]


register_interface("math_reward", MathRewardInterface)
