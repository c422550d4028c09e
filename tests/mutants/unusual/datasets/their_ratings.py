"""Prompts whose responses people gave stars, as pairs of a better and a worse one, for reward
models and direct preference optimisation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, ClassVar

from rlcli.api.config import stable_seed
from rlcli.api.data import Preview, SequenceSample, register_dataset
from rlcli.api.limits import Limits

from ._jsonl import BadRow, Row, numbers_field, texts_field
from ._messages import Prompt, prompt_field
from ._samples import paired_sample
from ._text_rows import Answered, TextRows

Pair = tuple[str, str, float]
"""A better and a worse response, and how many stars are between them."""
Rated = tuple[Prompt, list[Pair]]


@register_dataset("their_ratings")
@dataclass(kw_only=True)
class TheirRatings(TextRows):
    """Rows with a prompt, a list of `responses` to it, and the number of `stars` of each.

    A pair is a response with another that has at least `min_gap` fewer stars. A sample holds the
    sequences better 0, worse 0, better 1, worse 1, …, each the prompt and a response that ends with
    the end-of-sequence token; `margins` are the stars between the two, times `margin_per_star`. A
    row without any such pair is a malformed one.
    """

    KEYS: ClassVar[tuple[str, ...]] = ("packed_input_ids", "prompt_mask", "prompt_lens", "margins")
    PAIRS: ClassVar[str] = "max_pairs"
    EXAMPLES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"prompt": "What is 2+2?", "responses": ["It is five.", "4"], "stars": [1, 5]},
        {
            "prompt": "Greet me.",
            "responses": ["Hello!", "No.", "Good day, how are you?", "Go!"],
            "stars": [4, 2, 5, 1],
        },
        {
            "prompt": "Name a colour.\nOnly one.",
            "responses": ["grün", "red, blue", "a dog"],
            "stars": [5, 3.5, 1],
        },
    )
    LIMITS: ClassVar[Limits] = {"min_gap": {"gt": 0}, "max_pairs": {"ge": 1}}

    prompt_key: str = "prompt"
    """Field that holds the prompt: a text, or a list of messages."""

    responses_key: str = "responses"
    """Field that holds the list of responses."""

    stars_key: str = "stars"
    """Field that holds the list of their stars, in the same order."""

    min_gap: float = 1.0
    """Least number of stars between the two responses of a pair."""

    max_pairs: int = 3
    """Maximum number of pairs taken from one row, drawn with the run's seed and used in the order
    of the row: by the better response, then by the worse one."""

    margin_per_star: float = 1.0
    """Margin of a pair for each star between its responses."""

    _rows: list[tuple[Row[Rated], Answered]] = field(init=False, repr=False)

    def _encoded(self, rows: list[Row[Rated]]) -> list[tuple[Row[Rated], Answered]]:
        return self._answered(rows, [self._answers(row) for row in rows])

    def __getitem__(self, index: int) -> SequenceSample:
        gaps = [gap for _, _, gap in self._drawn(self._rows[index][0])]
        return paired_sample(self.preview(index), [self.margin_per_star * gap for gap in gaps])

    def preview(self, index: int) -> Preview:
        row, (prompt, answers) = self._rows[index]
        about = self._about(row, row.content[0])
        return Preview.answered(prompt, answers, answers=self._answers(row), **about)

    def _answers(self, row: Row[Rated]) -> list[str]:
        """Better 0, worse 0, better 1, … of the drawn pairs."""
        return [text for better, worse, _ in self._drawn(row) for text in (better, worse)]

    def _drawn(self, row: Row[Rated]) -> list[Pair]:
        """The pairs of a row that are used."""
        _, pairs = row.content
        if len(pairs) <= self.max_pairs:
            return pairs
        rng = random.Random(stable_seed("their_ratings", self.util.seed, row.id))
        return [pairs[number] for number in sorted(rng.sample(range(len(pairs)), self.max_pairs))]

    def _read(self, fields: dict[str, Any]) -> Rated:
        prompt = prompt_field(fields, self.prompt_key)
        responses = texts_field(fields, self.responses_key)
        stars = numbers_field(fields, self.stars_key)
        if len(responses) != len(stars):
            raise BadRow(f"{len(responses)} {self.responses_key} but {len(stars)} {self.stars_key}")
        rated = list(zip(responses, stars, strict=True))
        pairs = [
            (better, worse, high - low)
            for (better, high), (worse, low) in permutations(rated, 2)
            if high - low >= self.min_gap
        ]
        if not pairs:
            raise BadRow(f"no two {self.responses_key} are {self.min_gap:g} stars or more apart")
        return prompt, pairs
