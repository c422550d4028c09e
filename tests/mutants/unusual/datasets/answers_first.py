"""Rows of a text and its title: the text is the prompt, the title the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlcli.api.data import register_dataset

from .prompt_answer import PromptAnswer


@register_dataset("answers_first")
@dataclass(kw_only=True)
class AnswersFirst(PromptAnswer):
    """`prompt_answer` with other columns and a system prompt of its own."""

    EXAMPLES: ClassVar[tuple[dict[str, str], ...]] = (
        {"body": "It rained all day.", "title": "Rain"},
        {"body": "Nobody came.\nThe door stayed shut.", "title": "Alone at home"},
        {"body": "Käse!", "title": "Ein Ruf"},
    )

    prompt_key: str = "body"
    """Field with the text."""

    answer_key: str = "title"
    """Field with its title."""

    system: str | None = "Find a title."
    """System prompt."""
