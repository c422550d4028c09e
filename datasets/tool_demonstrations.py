"""Generated sums that are too long to work out in one's head: some are answered with a call of a
tool, the others by a guess. The warm start for episodes with that tool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits
from rlcli.api.special_tokens import tokens_of

from ._arithmetic_rows import ArithmeticRows
from ._rendering import encode_answers, encode_prompts
from ._samples import answered_sample


@register_dataset("tool_demonstrations")
@dataclass(kw_only=True)
class ToolDemonstrations(ArithmeticRows):
    """Questions with the turns of an episode without a chat template: a call of a tool, the line
    it returns, which is not trained on, and the answer; or the answer at once."""

    NAME: ClassVar[str] = "tool-demonstration"
    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask")
    PAIRS: ClassVar[str] = ""
    LONGEST: ClassVar[int] = 120
    """Tokens of the longest row at the default levels."""
    LIMITS: ClassVar[Limits] = {**ArithmeticRows.LIMITS, "calls": {"ge": 0, "le": 1}}

    problems: int = 40000
    """Number of problems to generate."""

    levels: tuple[int, ...] = (2, 3, 4, 5, 6)
    """Difficulties (numbers of operations), used in rotation."""

    environment: Literal["calculator", "python"] = "calculator"
    """The environment whose tool is called."""

    calls: float = 0.4
    """The share of questions that are answered with a call."""

    def __getitem__(self, index: int) -> SequenceSample:
        return answered_sample(self.preview(index))

    def preview(self, index: int) -> Preview:
        problem, about = self._problems[index], self._about(index)
        (prompt,) = encode_prompts(self.util.tokenizer, [about["prompt"]], chat=False)
        answer = f"#### {problem.answer}"
        if random.Random(f"caller-{self.seed}-{index}").random() >= self.calls:
            (tokens,) = encode_answers(self.util.tokenizer, [answer])
            return Preview.answered(prompt, [tokens], answers=[answer], **about)
        call, result = CALLS[self.environment](problem.expression), f"{problem.answer}\n"
        tokens, trained = self._turns(call, result, answer)
        return Preview(
            sequences=[[*prompt, *tokens]],
            trained=[[False] * len(prompt) + trained],
            answers=[f"{call}{answer}"],
            **about,
        )

    def _turns(self, call: str, result: str, answer: str) -> tuple[list[int], list[bool]]:
        """The tokens after the prompt, and which of them are trained on."""
        first, last = encode_answers(self.util.tokenizer, [call, answer])
        (observed,) = tokens_of(self.util.tokenizer, [result])
        trained = [True] * len(first) + [False] * len(observed) + [True] * len(last)
        return [*first, *observed, *last], trained


def _call(tool: str, **arguments: str) -> str:
    return json.dumps({"name": tool, "arguments": arguments})


CALLS: Mapping[str, Callable[[str], str]] = {
    "calculator": lambda sum_: _call("calculate", expression=sum_),
    "python": lambda sum_: _call("run", program=f"print({sum_})"),
}
"""Environment → the call that works out a sum."""
