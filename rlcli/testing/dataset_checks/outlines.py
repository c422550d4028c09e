"""Checks of where special tokens are in a sequence, and which tokens are trained on."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlcli.testing.contract import Contract, Violation
from rlcli.testing.dataset_checks.sequences import (
    TokenSequence,
    sequences_in,
)
from rlcli.testing.dataset_checks.texts import PARTS
from rlcli.testing.dataset_checks.trial import (
    Trial,
    needs_template,
)
from rlcli.testing.tokenizer import byte_tokenizer

MASKS = ("prompt_mask", "prompt_lens")
"""Keys that say which tokens are trained on."""

PROMPT = re.compile("B([pE]*p)?")
ANSWERED = re.compile("(B([pE]*p)?|b)a*e([pE]+a*e)*[pE]*")
DOCUMENTS = re.compile("(?!bb)[abe]+")
"""Sequences as `_outline` writes them; documents, of which all is trained on, may begin and end
anywhere."""
WORDS = {"B": "BOS", "b": "trained BOS", "E": "untrained EOS", "e": "EOS", "p": "prompt",
         "a": "answer"}  # fmt: skip

HABITS: dict[str, dict[str, Any]] = {
    "a tokenizer that begins texts with BOS": {"around": "<bos> $A"},
    "a tokenizer that puts BOS in front and EOS behind": {"around": "<bos> $A <eos>"},
    "a chat template that writes BOS itself": {"chat": True},
}
"""Ways in which tokenizers add special tokens by themselves."""


class OutlineChecks(Contract):
    @pytest.mark.parametrize("habit", HABITS)
    def test_special_tokens(self, trial: Trial, habit: str) -> None:
        """BOS comes once, answers end with EOS, prompts do not"""
        if trial.divides_rows:
            pytest.skip(PARTS)
        settings = {"chat": needs_template(trial.cls), **HABITS[habit]}
        self.check_outlines(trial, byte_tokenizer(**settings), habit)

    def check_outlines(
        self, trial: Trial, tokenizer: Any = None, habit: str = "a tokenizer"
    ) -> None:
        """Raise Violation if special tokens or a mask are not where they should be."""
        if trial.divides_rows:
            return
        tokenizer = tokenizer or trial.tokenizer
        dataset = trial.demand(tokenizer=tokenizer)
        has_prompts = hasattr(dataset, "preview") and not trial.keys.isdisjoint(MASKS)
        for index, sequence in sequences_in(dataset):
            outline = _outline(sequence, tokenizer)
            if not _legal(sequence, has_prompts).fullmatch(outline):
                parts = ", ".join(WORDS[part[0]] for part in re.findall("p+|a+|.", outline))
                raise Violation(
                    f"row {index}, with {habit}: a sequence is {parts}",
                    "begin it with BOS, end each answer with EOS, and have neither anywhere else: "
                    "a chat template writes its special tokens itself, so encode what it renders, "
                    "and answers, with add_special_tokens=False; mask the prompt and nothing else",
                    trial.reader,
                )


def _outline(sequence: TokenSequence, tokenizer: Any) -> str:
    """A letter for each token, of WORDS: a capital of a special one that is not trained on."""
    special = {tokenizer.bos_token_id: "B", tokenizer.eos_token_id: "E"}
    untrained = (special.get(token, "p") for token in sequence.tokens)
    trained = (special.get(token, "a").lower() for token in sequence.tokens)
    letters = zip(untrained, trained, sequence.trained, strict=True)
    return "".join(after if is_trained else before for before, after, is_trained in letters)


def _legal(sequence: TokenSequence, has_prompts: bool) -> re.Pattern[str]:
    """What the outline of a sequence must match; `has_prompts`: of a dataset without documents."""
    if not sequence.is_answered:
        return PROMPT
    return DOCUMENTS if all(sequence.trained) and not has_prompts else ANSWERED
