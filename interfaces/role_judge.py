"""Reward by a language model that is asked for a score: a role of the graph, with its own engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.chat_template import DAY, conversation_text, template_of
from rlcli.api.config import GenerationHyperparameters, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.interface import Generates
from rlcli.api.limits import Limits
from rlcli.api.model import MicroBatchSpec, Model, register_interface
from rlcli.errors import WorkerError

from ._judge_questions import Question
from ._judging import Judging
from ._scores import Score

_LONGEST_SCORE = 12
"""Tokens of a number; some tokenizers use one per digit."""


@dataclass(kw_only=True)
class RoleJudgeInterface(Judging):
    """Asks its own role, a chat model in the graph with any tokenizer, for a score of each response.

    The role thinks first, in up to `thought_tokens`. Then the line with the score is started for it, and its
    continuation must be a number and nothing else.
    """

    LIMITS: ClassVar[Limits] = {"thought_tokens": {"ge": 0}}
    GENERATES: ClassVar[Generates] = {"inference": {"prompt": (320,), "response": ("thought_tokens", 12)}}

    thought_tokens: int = 256
    """Maximum tokens for the judge's reasoning before its score; 0: it gives the score at once."""

    def inference(self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N]. As metadata, for each sample, the share of its responses
        that could not be scored.

        Raises WorkerError if these are too many, DataError where the template names a field that rows lack.
        """
        questions = self.questions(model.data_tokenizer, data, {})
        asked = list(dict.fromkeys(questions))  # identical questions are asked once
        scores = dict(zip(asked, self._scores(model, asked), strict=True))
        return self.rewarded(data, [scores[question] for question in questions])

    def _scores(self, model: Model, questions: Sequence[Question]) -> list[Score]:
        """Every rank generates equally often, with or without questions: its engine may wait for the others."""
        openings = [_opening(model, question) for question in questions]
        if self.thought_tokens:
            thoughts = self._written(model, openings, questions, self.thought_tokens)
            openings = [[*opening, *thought] for opening, thought in zip(openings, thoughts, strict=True)]
        begun = [
            [*opening, *_tokens(model, f"\n{question.before_score}")]
            for opening, question in zip(openings, questions, strict=True)
        ]
        numbers = self._written(model, begun, questions, _LONGEST_SCORE)
        return [
            _score(question, str(model.tokenizer.decode(number, skip_special_tokens=True)))
            for question, number in zip(questions, numbers, strict=True)
        ]

    def _written(
        self, model: Model, prompts: Sequence[list[int]], questions: Sequence[Question], most: int
    ) -> list[list[int]]:
        """The role's continuation of each prompt, in up to `most` tokens, without the stop token."""
        batch = SequenceSample.from_default(
            ids=list(range(len(prompts))),
            seqlens=[len(prompt) for prompt in prompts],
            data={"packed_prompts": torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64)},
        )
        settings = GenerationHyperparameters(
            max_new_tokens=most, greedy=self.temperature == 0, temperature=self.temperature or 1.0
        )
        seeds = [stable_seed(model.seed, question.key, most) for question in questions]
        made = model.module.generate(batch.to(model.module.device), model.tokenizer, settings, seeds)
        ended = made.ended.tolist()
        return [tokens.tolist()[: len(tokens) - end] for tokens, end in zip(made.tokens, ended, strict=True)]


def _opening(model: Model, question: Question) -> list[int]:
    """The question up to the start of the judge's reply. One message: some templates have no system prompt."""
    text = "\n\n".join(message["content"] for message in question.messages)
    if template_of(model.tokenizer):
        message = [{"role": "user", "content": text}]
        return _tokens(model, conversation_text(model.tokenizer, message, add_generation_prompt=True, day=DAY))
    return _tokens(model, f"{text}\n")


def _tokens(model: Model, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False).input_ids)


def _score(question: Question, number: str) -> Score:
    """The score in the line that was started for the judge."""
    line = number.lstrip().partition("\n")[0].rstrip()
    try:
        return Score(question.score(f"{question.before_score} {line}"))
    except ValueError as problem:
        return Score(error=WorkerError(f"no score from the judge: {problem}", code="F52"))


register_interface("role_judge", RoleJudgeInterface)
