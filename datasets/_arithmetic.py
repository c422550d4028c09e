"""Arithmetic problems of graded difficulty, in symbols and in words,
and a tokenizer that fits them.

A problem of level k starts from a number and applies k additions and subtractions. Its worked
answer keeps a running total, one line per operation, and ends like GSM8K's: `#### 14`. One
expression in eight, chosen by a hash of its numbers, belongs to the held-out split however it is
worded, so the two splits share no problem.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, overload

from rlcli.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAMES = ("Tom", "Ann", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida", "Jack", "Lucy")
THINGS = ("apples", "pears", "books", "coins", "pens", "cards", "cakes", "stamps")
GAINS = ("buys", "finds", "gets", "wins", "makes", "picks")
LOSSES = ("eats", "loses", "sells", "drops", "gives away", "breaks")
LARGEST_TOTAL = 99
MAX_LEVEL = 64
"""Most operations in a problem; longer sums teach a language model nothing."""

PATIENCE = 20_000
"""Consecutive draws without a new problem after which the supply counts as exhausted."""

SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
TRAINED_TOKENIZER = Path(__file__).with_name("_arithmetic_tokenizer.json")

Operation = tuple[str, int]
"""A sign and a number: ("+", 7)."""


@dataclass(frozen=True)
class ArithmeticProblem:
    """One problem: the question as asked and the numbers behind it."""

    question: str
    first: int
    operations: tuple[Operation, ...]

    @property
    def lines(self) -> list[str]:
        """The working, one line per operation."""
        written, total = [], self.first
        for sign, number in self.operations:
            after = _apply(total, sign, number)
            written.append(f"{total}{sign}{number}={after}")
            total = after
        return written

    @property
    def expression(self) -> str:
        """`12+7-3`"""
        return _expression(self.first, self.operations)

    @property
    def answer(self) -> str:
        return self.lines[-1].rsplit("=", 1)[1]


def worked(problem: ArithmeticProblem) -> str:
    """The full working and the answer."""
    return "\n".join([*problem.lines, f"#### {problem.answer}"])


def hasty(problem: ArithmeticProblem) -> str:
    """A careless answer: the first line, and its total as the result."""
    line = problem.lines[0]
    return f"{line}\n#### {line.rsplit('=', 1)[1]}"


def slipped(problem: ArithmeticProblem, rng: random.Random) -> str:
    """The full working with one wrong result, which is carried through the later lines."""
    totals = [problem.first, *(int(line.rsplit("=", 1)[1]) for line in problem.lines)]
    wrong = rng.randrange(1, len(totals))
    error = rng.choice([by for by in (-3, -2, -1, 1, 2, 3) if min(totals[wrong:]) + by >= 0])
    written = [total + error * (step >= wrong) for step, total in enumerate(totals)]
    lines = [
        f"{before}{sign}{number}={after}"
        for before, (sign, number), after in zip(
            written, problem.operations, written[1:], strict=False
        )
    ]
    return "\n".join([*lines, f"#### {written[-1]}"])


class ArithmeticProblems(Sequence[ArithmeticProblem]):
    """`count` distinct problems, cycling through the levels; deterministic in its arguments.
    Drawn lazily."""

    def __init__(self, count: int, *, seed: int, levels: Sequence[int], held_out: bool):
        if count < 1:
            raise ValueError(f"problems is {count}; it must be at least 1")
        if not levels or not all(1 <= level <= MAX_LEVEL for level in levels):
            raise ValueError(
                f"levels is {list(levels)}; name at least one, each a number from 1 to {MAX_LEVEL}"
            )
        self._count = count
        self._levels = levels
        self._held_out = held_out
        self._rng = random.Random(f"{'held-out' if held_out else 'train'}-{seed}")
        self._questions: set[str] = set()
        self._drawn: list[ArithmeticProblem] = []
        self._in_vain = 0
        """Draws since the last new problem."""

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> ArithmeticProblem: ...
    @overload
    def __getitem__(self, index: slice) -> list[ArithmeticProblem]: ...
    def __getitem__(self, index: int | slice) -> ArithmeticProblem | list[ArithmeticProblem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        position = index + self._count if index < 0 else index
        if not 0 <= position < self._count:
            raise IndexError(f"there are {self._count} problems, so none has number {index}")
        while len(self._drawn) <= position:
            self._draw_one()
        return self._drawn[position]

    def _draw_one(self) -> None:
        level = self._levels[len(self._drawn) % len(self._levels)]
        problem = _draw(self._rng, level)
        if is_held_out(problem) == self._held_out and problem.question not in self._questions:
            self._questions.add(problem.question)
            self._drawn.append(problem)
            self._in_vain = 0
            return
        self._in_vain += 1
        if self._in_vain >= PATIENCE:
            message = f"no new problem of level {level} was found after {len(self._drawn)} problems"
            raise DataError(
                message, hint=f"set problems: {len(self._drawn)}, or higher levels", code="F80"
            )


def is_held_out(problem: ArithmeticProblem) -> bool:
    """Whether the problem belongs to the held-out eighth, judged by its numbers alone."""
    return hashlib.sha256(problem.expression.encode()).digest()[0] < 32


def _draw(rng: random.Random, level: int) -> ArithmeticProblem:
    total = first = rng.randint(2, 15)
    operations: list[Operation] = []
    for _ in range(level):
        number, sign = rng.randint(2, 7), rng.choice("+-")
        if total - number < 0:
            sign = "+"
        elif total + number > LARGEST_TOTAL:
            sign = "-"
        total = _apply(total, sign, number)
        operations.append((sign, number))
    in_words = rng.random() < 0.5
    question = (
        _story(rng, first, operations) if in_words else f"What is {_expression(first, operations)}?"
    )
    return ArithmeticProblem(question, first, tuple(operations))


def _story(rng: random.Random, first: int, operations: Sequence[Operation]) -> str:
    name, objects = rng.choice(NAMES), rng.choice(THINGS)
    deeds = [
        f"{rng.choice(GAINS if sign == '+' else LOSSES)} {number}" for sign, number in operations
    ]
    story = " and ".join([", ".join(deeds[:-1]), deeds[-1]] if len(deeds) > 1 else deeds)
    return f"{name} has {first} {objects}, {story}. How many {objects} now?"


def _expression(first: int, operations: Sequence[Operation]) -> str:
    return str(first) + "".join(f"{sign}{number}" for sign, number in operations)


def _apply(total: int, sign: str, number: int) -> int:
    return total + number if sign == "+" else total - number


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE over the problems' words; each digit is its own token,
    any other text falls back to bytes."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(TRAINED_TOKENIZER))


def train_tokenizer() -> Tokenizer:
    """Retrain the content of `TRAINED_TOKENIZER` from the problems:
    many times slower than reading it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]|\n| ?[A-Za-z]+|#+|[^A-Za-z0-9\s#]|\s"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    examples = ArithmeticProblems(4000, seed=0, levels=(1, 2, 3, 4), held_out=False)
    words.train_from_iterator(
        [text for p in examples for text in (f"{p.question}\n", worked(p))], trainer
    )
    words.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", words.token_to_id("<bos>"))]
    )
    return words
