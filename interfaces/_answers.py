"""Final answers: found in a response, and judged as far as possible without symbolic maths.

One answer states one value. An answer is judged as a whole; no number is picked out of it. Where the expected answer is
a number, the given one must be a number written out: with a unit or a sentence around it, but without hedging
("maybe 5", "about 5"), comparison, a second number, an operator or a variable. `2+3` does not answer 5: the sum is
still to be done.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from ._answer_expression import Expression, read_expression
from ._answer_markup import MAX_CHARS, closing_brace, is_clean, readable, undecorated
from ._answer_value import Value, read_value
from ._answer_words import retracts

_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s*(?P<token>-?[0-9.,]*[0-9]|\s[^\s{}$\\.,]+))")
_SAID = re.compile(r"answer[*_]*(?:\s*(?:is|:|=|equals)\s*:?|[ \t]*(?P<heading>\n))", re.IGNORECASE)
_HEADING = re.compile(r"[\s#*_]*(?:[^\W\d_]+\s)?")
"""Text before "answer" on a heading line, as in "### Final answer"."""
LONGEST_UNIT = 5
"""Most words in the unit of a row's answer; a row's answer with more is a text."""
MAX_RESPONSE = 1_000_000
"""Characters at the end of a response that are searched for its answer."""
_SAID_SPAN = 200
"""Characters before "answer" that are looked at."""
_BEFORE_BOX = 40
_ATTEMPTS = 50
"""Marks tried from the end of a response; only the last complete one counts."""
_JOINED = re.compile(r"[\s$.,;/|&]*(?:\\text\{)?\s*(?:or|and)?\s*\}?[\s$,;/|&]*", re.IGNORECASE)
_LAST = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?", re.ASCII)
_RETRACTING = ("or", "actually", "wait", "alternatively")


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
    """The answer of a row: a number, an expression or a text."""

    text: str
    value: Value | None
    expression: Expression | None

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
    line, rest = _after_marker(text)
    marked = _boxed(rest)[0] or line or text.strip()
    value = read_value(marked)
    if value is not None and value.bare and len(value.unit) <= LONGEST_UNIT:
        return Gold(marked, value, None)
    is_word = re.fullmatch(r"[^\W\d_]{2,}", undecorated(marked)) is not None
    return Gold(marked, None, None if is_word else read_expression(marked))


def judge(answer: str | None, gold: Gold) -> Verdict | Comparison:
    """The verdict, or the comparison needed to reach one."""
    if not gold.is_readable:
        return Verdict.NO_GOLD
    if answer is None:
        return Verdict.WRONG
    if gold.value is not None:
        value = read_value(answer)
        if value is None:
            return Verdict.UNPARSED
        return Verdict.RIGHT if value.is_same(gold.value) else Verdict.WRONG
    if not is_clean(answer):
        return Verdict.UNPARSED
    if _as_text(answer) == _as_text(gold.text):
        return Verdict.RIGHT
    return _judge_expression(answer, gold.expression) if gold.expression else Verdict.WRONG


def _judge_expression(answer: str, gold: Expression) -> Verdict | Comparison:
    found = read_expression(answer)
    if found is None:
        return Verdict.UNPARSED
    if not gold.is_relation:
        found = found.unnamed()
    if found.key == gold.key and found.unit in ("", gold.unit):
        return Verdict.RIGHT
    other_variables = not found.letters <= gold.letters
    other_unit = gold.unit and found.unit not in ("", gold.unit)
    if other_variables or other_unit or (found.is_relation and not gold.is_relation):
        return Verdict.WRONG
    return Comparison(found.latex, gold.latex)


def final_answer(text: str, last_number: bool = False) -> str | None:
    """A text's final answer, or None.

    Within the last `<answer>…</answer>` if there is one: the line after the last `####`, or the last `\\boxed{…}` with
    those listed with it, whichever comes later; the sentence after the last "answer is" (or "answer:", or a heading
    that ends in "answer"), unless it comes before them or states no value; else the whole content of the tag. Without
    any of these, the whole text if it states one value and nothing else; with `last_number`, its last number.
    """
    text = text[-MAX_RESPONSE:]
    tagged = _tagged(text)
    found = _committed(text if tagged is None else tagged) or tagged
    if found is None and _is_one_value(text.strip()):
        found = text.strip()
    if found is None and last_number:
        numbers = _LAST.findall(text[-10 * MAX_CHARS :])
        found = numbers[-1] if numbers else None
    return found if found and len(found) <= MAX_CHARS else None


def answer_key(answer: str) -> Hashable:
    """Key under which votes for an answer are counted: equal for equivalent answers, as far as that can be decided
    without symbolic maths. Units are ignored, because some responses name them and others do not."""
    value = read_value(answer)
    if value is not None:
        return value.number / (100 if value.percent else 1)
    expression = read_expression(answer) if is_clean(answer) else None
    return expression.key if expression is not None else _as_text(answer)


def _committed(text: str) -> str | None:
    """The answer at the last mark: an answer that is corrected later is not the final one."""
    line, rest = _after_marker(text)
    box, rest = _boxed(rest)
    marked = box or line
    said = _said(rest)
    return said if marked is None or (said and _is_one_value(said)) else marked


def _is_one_value(text: str) -> bool:
    return len(text) <= MAX_CHARS and read_value(text) is not None


def _tagged(text: str) -> str | None:
    tags = list(_places(text, "<answer>"))[:1]
    return re.split("</answer>", text[tags[0] + len("<answer>") :], maxsplit=1, flags=re.I)[0].strip() if tags else None


def _after_marker(text: str) -> tuple[str | None, str]:
    """The line after the last `####`, and the text after that line; all of the text where there is none."""
    _, marker, rest = text.rpartition("####")
    rest = rest.lstrip()
    line = rest[: 4 * MAX_CHARS].split("\n", 1)[0]
    return (line.strip(), rest[len(line) :]) if marker and line else (None, text)


def _boxed(text: str) -> tuple[str | None, str]:
    """The content of the last box, and the text after it; "3, 5" for `\\boxed{3} or \\boxed{5}`, which are one
    answer, not two."""
    contents: list[str] = []
    following = rest = len(text)
    for start in _places(text, "\\boxed", "\\fbox"):
        found = _BOX.match(text, start)
        content, end = _content(text, found) if found else (None, start)
        if content is None:
            continue
        if contents and not (following - end < 30 and _JOINED.fullmatch(text, end, following)):
            break
        if not contents:
            rest = end
        if content not in contents:
            contents.insert(0, content)
        following = start
    if not contents or _is_retracted(text[max(0, following - _BEFORE_BOX) : following]):
        return None, text
    return ", ".join(contents), text[rest:]


def _content(text: str, found: re.Match[str]) -> tuple[str | None, int]:
    """The content of a box, and the position after it."""
    if found["token"]:
        return found["token"].strip(), found.end()
    end = closing_brace(text, found.end() - 1)
    return (text[found.end() : end].strip() or None, end + 1) if end else (None, found.end())


def _said(text: str) -> str | None:
    for place in _places(text, "answer"):
        said = _SAID.match(text, place)
        if said is None or (place and text[place - 1].isalpha()):
            continue
        before = text[max(0, place - _SAID_SPAN) : place]
        if said["heading"] and not _HEADING.fullmatch(before.rpartition("\n")[2]):
            continue
        clause = re.split(r"[.!?\n,;:]", before)[-1]
        line = text[said.end() : said.end() + 4 * MAX_CHARS].strip().split("\n", 1)[0]
        sentence, *rest = re.split(r"(?<=[.!?])\s+", line, maxsplit=1)
        follows = re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", rest[0][:40])[:1] if rest else []
        retracted = any(retracts(word) or word.lower() in _RETRACTING for word in follows)
        if _is_retracted(clause) or retracted:
            return None
        return sentence.strip() or None
    return None


def _is_retracted(clause: str) -> bool:
    """Whether the words right before an answer deny or weaken it."""
    last = re.split(r"[.!?\n]", clause)[-1]
    return any(retracts(word) for word in re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", last)[-8:])


def _places(text: str, *marks: str) -> Iterator[int]:
    """Positions of the marks, ignoring case, from the end; at most the last few."""
    lower = text if marks[0].startswith("\\") else text.lower()
    end = len(lower)
    for _ in range(_ATTEMPTS):
        end = max(lower.rfind(mark, 0, end) for mark in marks)
        if end < 0:
            return
        yield end


def _as_text(answer: str) -> str:
    """The answer without differences that do not matter in a word, a choice or a ratio."""
    text = readable(answer).rstrip(".").strip().casefold()
    text = re.sub(r"\s*([^\w\s])\s*", r"\1", re.sub(r"\s+", " ", text))
    text = re.sub(r"([_^])\{(\w+)\}(?!\w)", r"\1\2", text)
    choice = re.fullmatch(r"\(?(\w)\)?", text)
    return choice[1] if choice else text
