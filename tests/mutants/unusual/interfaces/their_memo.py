"""Rule-based reward for form: does a memo have the sections it should, and is it short enough?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import Example, ModelInterface, register_interface
from rlcli.api.limits import Limits
from rlcli.errors import DataError

from .rewards._scores import one_each, places_of, rows_of
from .rewards._text import response_texts

if TYPE_CHECKING:
    from rlcli.api.model import Model

Section = tuple[str, int]
"""A heading as it is compared, and the number of words below it."""


@dataclass(kw_only=True)
class Memo(ModelInterface):
    """Rewards responses that have the `sections` of their row, a list of headings, and no more than
    its `max_words` words.

    A section begins with a line such as `## Risks`; case does not matter. The reward is the share
    of the row's sections that the response has, each with `min_words` words or more, times
    `disorder_factor` if these are not in the order of the row. For each word beyond `max_words`,
    headings not counted, `word_cost` is subtracted, and `surplus_cost` for each other section; the
    reward is never below 0. Of sections with the same heading only the first counts, and the others
    are surplus.
    """

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    EXAMPLES: ClassVar[tuple[Example, ...]] = (
        {
            "row": {"sections": ["Summary", "Risks"], "max_words": 12},
            "right": "## Summary\nWe sell more bread.\n\n## Risks\nFlour gets dearer.",
            "wrong": "We sell more bread, but flour gets dearer.",
            "rewards": {
                "## summary\nWe sell more bread.\n## risks\nFlour gets dearer.": 1.0,
                "## Risks\nFlour gets dearer.\n## Summary\nWe sell more bread.": 0.5,
                "## Summary\nWe sell more bread.": 0.5,
                "## Summary\nWe sell more bread.\n## Risks\nNone.": 0.5,
                "## Summary\nWe sell more bread.\n## Risks\nFlour gets dearer.\n## Next\nWait": 0.9,
                "## Summary\nWe sell more bread than last year.\n"
                "## Risks\nFlour gets dearer from month to month.": 0.96,
            },
        },
        {
            "row": {"sections": ["Aim", "Plan", "Cost"], "max_words": 40},
            "right": (
                "## Aim\nA roof that is dry.\n## Plan\nNew tiles in May.\n## Cost\nNine hundred "
                "pounds."
            ),
            "wrong": "## Aim\nA roof that is dry.\n## Cost\nNine hundred pounds.",
        },
    )
    LIMITS: ClassVar[Limits] = {
        "min_words": {"ge": 1},
        "word_cost": {"ge": 0},
        "surplus_cost": {"ge": 0},
        "disorder_factor": {"ge": 0, "le": 1},
    }

    min_words: int = 3
    """Least number of words of a section that counts."""

    word_cost: float = 0.02
    """Subtracted for each word beyond the row's `max_words`."""

    surplus_cost: float = 0.1
    """Subtracted for each section that the row does not ask for."""

    disorder_factor: float = 0.5
    """Factor of the share of sections that are not in the order of the row."""

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N]. Raises DataError for rows without
        sections or a number of words."""
        import torch

        rewards = []
        responses = response_texts(model.data_tokenizer, data)
        for row, sample, response in zip(rows_of(data), places_of(data), responses, strict=True):
            sections, max_words = row.get("sections"), row.get("max_words")
            if not sections or max_words is None:
                hint = "this reward needs rows with sections and max_words"
                raise DataError(f"{sample} lacks one of them", hint=hint, code="F31")
            rewards.append(self._reward(response, sections, max_words))
        return one_each(data, {"rewards": torch.tensor(rewards, dtype=torch.float32)}, {})

    def _reward(self, response: str, headings: Sequence[str], max_words: int) -> float:
        asked = [_compared(heading) for heading in headings]
        before, sections = _sections(response)
        first: dict[str, int] = {}
        for heading, words in sections:
            first.setdefault(heading, words)
        complete = [name for name, words in first.items() if name in asked]
        complete = [name for name in complete if first[name] >= self.min_words]
        share = len(complete) / len(asked)
        order = [asked.index(name) for name in complete]
        if any(left > right for left, right in pairwise(order)):
            share *= self.disorder_factor
        surplus = len(sections) - sum(name in asked for name in first)
        beyond = max(before + sum(words for _, words in sections) - max_words, 0)
        return max(share - self.word_cost * beyond - self.surplus_cost * surplus, 0.0)


def _sections(response: str) -> tuple[int, list[Section]]:
    """The number of words before the first section, and the sections."""
    before, *rest = re.split(r"^##[ \t]+(.+)$", response, flags=re.MULTILINE)
    sections = [
        (_compared(heading), len(text.split()))
        for heading, text in zip(rest[::2], rest[1::2], strict=True)
    ]
    return len(before.split()), sections


def _compared(heading: str) -> str:
    return " ".join(heading.split()).casefold()


register_interface("their_memo", Memo)
