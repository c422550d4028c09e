"""Final answers: found in a response, and judged as far as possible without symbolic maths.

One answer states one value. An answer is judged as a whole; no number is picked out of it. Where
the expected answer is a number, the given one must be a number written out: with a unit or a
sentence around it, but without hedging ("maybe 5", "about 5"), comparison, a second number, an
operator or a variable. `2+3` does not answer 5: the sum is still to be done.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from .choice import ANNOUNCED, LETTER, letter_and_content
from .claim import claimed_answer, marked_answer
from .expression import Expression, read_expression
from .markup import LABEL, MAX_CHARS, is_clean, plain, readable, without_tags
from .time_of_day import read_time
from .units import units_agree
from .value import Value, read_value

LONGEST_UNIT = 5
"""Most words in the unit of a row's answer; a row's answer with more is a text."""
MAX_RESPONSE = 1_000_000
"""Characters at the end of a response that are searched for its answer."""
_LAST = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?", re.ASCII)


class Verdict(StrEnum):
    """Result of judging a response."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSED = "unparsed"
    """There is an answer, but it is neither one value nor a small expression. Counts as wrong."""
    TIMEOUT = "timeout"
    """Comparing it took too long. Counts as wrong."""
    CRASHED = "crashed"
    """Comparing it killed the process. Counts as wrong."""
    NO_GOLD = "no gold"
    """The row's own answer cannot be read; not the response's fault."""


@dataclass(frozen=True)
class Gold:
    """The answer of a row: a number, an expression, a text, or a choice with its content."""

    text: str
    value: Value | None = None
    expression: Expression | None = None
    letter: str = ""
    """Of a choice that has a content, such as "(B) 12"; lower-case."""
    content: Gold | None = None

    @property
    def is_readable(self) -> bool:
        return is_clean(self.text) and bool(self.text)


@dataclass(frozen=True)
class Comparison:
    """Two expressions whose comparison needs symbolic maths."""

    answer: str
    expected: str


@lru_cache(maxsize=4096)
def gold_of(text: str) -> Gold:
    """Read a dataset's `answer`: the part marked by `####` or `\\boxed`, else all of it."""
    marked = marked_answer(text)
    letter, content = letter_and_content(marked) if is_clean(marked) else ("", marked)
    if letter and content:
        return Gold(marked, letter=letter, content=_read_gold(content))
    return _read_gold(marked)


def _read_gold(text: str) -> Gold:
    if not is_clean(text):  # a long one would take minutes
        return Gold(text)
    value = read_value(text)
    if value is not None and value.bare and len(value.unit) <= LONGEST_UNIT:
        return Gold(text, value)
    is_word = re.fullmatch(r"[^\W\d_]{2,}", plain(text)) is not None
    return Gold(text, None, None if is_word else read_expression(text))


def judge(answer: str | None, gold: Gold) -> Verdict | Comparison:
    """The verdict, or the comparison needed to reach one."""
    if not gold.is_readable:
        return Verdict.NO_GOLD
    if answer is None:
        return Verdict.WRONG
    if gold.content is not None:
        return _judge_choice(answer, gold.letter, gold.content)
    if gold.value is not None:
        return _judge_value(answer, gold.value)
    if not is_clean(answer):
        return Verdict.UNPARSED
    if _as_text(answer) == _as_text(gold.text):
        return Verdict.RIGHT
    verdict = _judge_time(answer, gold.text)
    if verdict is not None or gold.expression is None:
        return verdict or Verdict.WRONG
    return _judge_expression(answer, gold.expression)


def _judge_value(answer: str, gold: Value) -> Verdict:
    value = read_value(answer)
    if value is None:
        return Verdict.UNPARSED
    return Verdict.RIGHT if value.is_same(gold) else Verdict.WRONG


def _judge_choice(answer: str, letter: str, content: Gold) -> Verdict | Comparison:
    """Its letter, its content, or both; a content with another letter is another choice."""
    if not is_clean(answer):
        return Verdict.UNPARSED
    stated_letter, stated_content = letter_and_content(answer)
    if stated_letter not in ("", letter):
        return Verdict.WRONG
    return judge(stated_content, content) if stated_content else Verdict.RIGHT


def _judge_time(answer: str, gold: str) -> Verdict | None:
    """The verdict where the gold is a time of day, else None. 2:10 may also be a ratio, which 1/5
    answers; 2:10 PM is none."""
    expected, stated = read_time(gold), read_time(answer)
    if expected is None or (stated is None and not expected.half):
        return None
    return Verdict.RIGHT if stated is not None and stated.is_same(expected) else Verdict.WRONG


def _judge_expression(answer: str, gold: Expression) -> Verdict | Comparison:
    expression = read_expression(answer)
    if expression is None:
        return Verdict.UNPARSED
    bare = gold.unnamed()
    if bare.is_interval or not gold.is_relation:
        gold, expression = bare, expression.unnamed()
    if gold.is_interval:
        expression = expression.as_interval()
    if gold.unit and expression.unit and not units_agree(gold.unit, expression.unit):
        return Verdict.WRONG
    if expression.key == gold.key and (gold.unit or not expression.unit):
        return Verdict.RIGHT
    other_variables = not expression.letters <= gold.letters
    if other_variables or (expression.is_relation and not gold.is_relation):
        return Verdict.WRONG
    return Comparison(expression.latex, gold.latex)


def final_answer(text: str, last_number: bool = False) -> str | None:
    """A text's final answer, or None.

    Within the last `<answer>…</answer>` if there is one: the line after the last `####`, or the
    last `\\boxed{…}` with those listed with it, whichever comes later; the sentence after the last
    "answer is" (or "answer:", or a heading that ends in "answer"), unless it comes before them or
    states no value; else the whole content of the tag. Without any of these, the whole text if it
    states one value and nothing else; with `last_number`, its last number.
    """
    text = without_tags(text[-MAX_RESPONSE:])
    answer = claimed_answer(text, _is_one_value)
    if answer is None and _is_one_value(text.strip()):
        answer = text.strip()
    if answer is None and last_number:
        answer = next(reversed(_LAST.findall(text[-10 * MAX_CHARS :])), None)
    return answer if answer and len(answer) <= MAX_CHARS else None


def answer_key(answer: str) -> Hashable:
    """Key under which votes for an answer are counted: equal for equivalent answers, as far as that
    can be decided without symbolic maths. Units are ignored,
    because some responses name them and others do not."""
    value = read_value(answer)
    if value is not None:
        return value.amount
    expression = read_expression(answer)
    return expression.key if expression is not None else _as_text(answer)


def _is_one_value(text: str) -> bool:
    return read_value(text) is not None


def _as_text(answer: str) -> str:
    """The answer without differences that do not matter in a word, a choice or a ratio."""
    text = ANNOUNCED.sub("", readable(answer).casefold())
    label = LABEL.match(text)
    choice = LETTER.fullmatch(text) or (label and read_value(answer) and label)
    if choice:
        return choice[1]
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", re.sub(r"\s+", " ", text))
    return re.sub(r"([_^])\{(\w+)\}(?!\w)", r"\1\2", text)
