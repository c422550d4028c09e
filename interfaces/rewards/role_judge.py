"""Reward by a language model that is asked for a score: a role of the graph,
with its own engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rlcli.api.chat_template import DAY, conversation_tokens, template_of
from rlcli.api.config import GenerationHyperparameters, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import Generates
from rlcli.api.limits import Limits
from rlcli.api.model import MicroBatchSpec, Model, register_interface
from rlcli.api.special_tokens import as_content, tokens_of

from ._judge_questions import JudgeQuestion
from ._judging import Judging, as_error
from ._scores import Score

_LONGEST_SCORE = 12
"""Tokens of a number; some tokenizers use one per digit."""


@dataclass(kw_only=True)
class RoleJudgeInterface(Judging):
    """Asks its own role, a chat model in the graph with any tokenizer,
    for a score of each response.

    The role thinks first, in up to `thought_tokens`. Then the line with the score is started for
    it, and its continuation must be a number and nothing else.
    """

    LIMITS: ClassVar[Limits] = {"thought_tokens": {"ge": 0}}
    GENERATES: ClassVar[Generates] = {
        "inference": {"prompt": (320,), "response": ("thought_tokens", 12)}
    }
    HEAD: ClassVar[Declaration] = {"inference": ("lm",)}

    thought_tokens: int = 256
    """Maximum tokens for the judge's reasoning before its score; 0: it gives the score at once."""

    has_scored: bool = field(init=False, default=False, repr=False)
    """Whether the judge has scored anything; until then it is asked about a plain response too."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N]. As metadata, for each sample, the
        shares of its responses without a score and of those whose score could not be computed.

        Raises WorkerError if the latter are too many, DataError where the template names a field
        that rows lack.
        """
        questions = self.questions(model.data_tokenizer, data, {})
        asked = dict.fromkeys(questions.of_responses)  # identical questions are asked once
        if questions.control is not None and not self.has_scored:
            asked[questions.control] = None
        scores = self._scores(model, list(asked))
        self.has_scored = self.has_scored or not all(score.unscored for score in scores.values())
        if not self.has_scored:
            scores = {question: as_error(score) for question, score in scores.items()}
        return self.judged(data, [scores[question] for question in questions.of_responses])

    def _scores(
        self, model: Model, questions: Sequence[JudgeQuestion]
    ) -> dict[JudgeQuestion, Score]:
        """Every rank generates equally often, with or without questions:
        its engine may wait for the others."""
        openings = {question: _opening(model, question) for question in questions}
        longest = (
            _positions(model)
            - self.thought_tokens
            - _LONGEST_SCORE
            - _longest_mark(model, questions)
        )
        too_long = {question for question, opening in openings.items() if len(opening) > longest}
        scores = self._asked(
            model,
            {question: openings[question] for question in questions if question not in too_long},
        )
        why = "the question about it is longer than the judge can read"
        return {
            question: self.unscored(why) if question in too_long else scores[question]
            for question in questions
        }

    def _asked(
        self, model: Model, asked: Mapping[JudgeQuestion, list[int]]
    ) -> dict[JudgeQuestion, Score]:
        """The scores of questions, from their openings."""
        questions, openings = list(asked), list(asked.values())
        if self.thought_tokens:
            thoughts = self._written(model, openings, questions, self.thought_tokens)
            openings = [
                [*opening, *thought] for opening, thought in zip(openings, thoughts, strict=True)
            ]
        begun = [
            [*opening, *_tokens(model, f"\n{question.before_score}")]
            for opening, question in zip(openings, questions, strict=True)
        ]
        numbers = self._written(model, begun, questions, _LONGEST_SCORE)
        tokenizer: Any = model.tokenizer
        return {
            question: self._score(question, str(tokenizer.decode(number, skip_special_tokens=True)))
            for question, number in zip(questions, numbers, strict=True)
        }

    def _score(self, question: JudgeQuestion, number: str) -> Score:
        """The score in the line that was started for the judge."""
        line = number.lstrip().partition("\n")[0].rstrip()
        try:
            return Score(question.score(f"{question.before_score} {line}"))
        except ValueError as problem:
            return self.unscored(str(problem))

    def _written(
        self,
        model: Model,
        prompts: Sequence[list[int]],
        questions: Sequence[JudgeQuestion],
        most: int,
    ) -> list[list[int]]:
        """The role's continuation of each prompt, in up to `most` tokens,
        without the stop token."""
        batch = SequenceSample.from_default(
            ids=list(range(len(prompts))),
            seqlens=[len(prompt) for prompt in prompts],
            data={
                "packed_prompts": torch.tensor(
                    [token for prompt in prompts for token in prompt], dtype=torch.int64
                )
            },
        )
        settings = GenerationHyperparameters(
            max_new_tokens=most, greedy=self.temperature == 0, temperature=self.temperature or 1.0
        )
        seeds = [stable_seed(model.seed, question.key, most) for question in questions]
        written = model.module.generate(
            batch.to(model.module.device), model.tokenizer, settings, seeds
        )
        ended = written.ended.tolist()
        return [
            tokens.tolist()[: len(tokens) - end]
            for tokens, end in zip(written.tokens, ended, strict=True)
        ]


def _opening(model: Model, question: JudgeQuestion) -> list[int]:
    """The question up to the start of the judge's reply. One message:
    some templates have no system prompt."""
    text = "\n\n".join(message["content"] for message in question.messages)
    if template_of(model.tokenizer):
        message = [{"role": "user", "content": text}]
        return conversation_tokens(model.tokenizer, message, add_generation_prompt=True, day=DAY)
    return _tokens(model, f"{text}\n")


def _tokens(model: Model, text: str) -> list[int]:
    return tokens_of(model.tokenizer, [as_content(model.tokenizer, text)])[0]


def _positions(model: Model) -> int:
    """How many tokens the judge can read and write."""
    return (
        getattr(model.source and model.source.config, "max_position_embeddings", None)
        or sys.maxsize
    )


def _longest_mark(model: Model, questions: Sequence[JudgeQuestion]) -> int:
    """The most tokens of a line with a score before the score."""
    return max(
        (len(_tokens(model, f"\n{question.before_score}")) for question in questions), default=0
    )


register_interface("role_judge", RoleJudgeInterface)
