"""Final answers: cut out of a response, and compared as far as that is decided without symbolic maths."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 500
"""A longer final answer is no answer."""

_PLAIN = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)")
_FRACTION = re.compile(r"([-+]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}|([-+]?\d+)/(\d+)")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_SAID = re.compile(r"\banswer\s*(?:is|:|=)\s*:?", re.IGNORECASE)
_LAST = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?")


def final_answer(text: str, last_number: bool = False) -> str | None:
    """What a text gives as its final answer, or None.

    In this order: the line after the last `####`; the last `\\boxed{…}`; the rest of the line after the last
    "answer is" (or "answer:"), up to the end of the sentence; with `last_number`, the last number of the
    text.
    """
    found = _after_marker(text) or _boxed(text) or _said(text)
    if found is None and last_number:
        numbers = _LAST.findall(text)
        found = numbers[-1] if numbers else None
    return found if found and len(found) <= MAX_CHARS else None


def truth(text: str) -> str:
    """The answer that a dataset's `answer` holds: what it marks by `####` or `\\boxed`, else all of it."""
    return _after_marker(text) or _boxed(text) or text.strip()


def quick_match(answer: str, expected: str) -> bool | None:
    """True or False where plain text or exact arithmetic decides it, None where it takes symbolic maths."""
    left, right = _clean(answer), _clean(expected)
    if left == right:
        return True
    a, b = _number(left), _number(right)
    if a is not None and b is not None:
        return a == b
    return None


def _after_marker(text: str) -> str | None:
    _, marker, rest = text.rpartition("####")
    line = rest.strip().split("\n", 1)[0].strip() if marker else ""
    return line or None


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for place in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place].strip() or None
    return None


def _said(text: str) -> str | None:
    said = list(_SAID.finditer(text))
    if not said:
        return None
    line = text[said[-1].end() :].lstrip(" ").split("\n", 1)[0]
    sentence = re.split(r"[.!?](?:\s|$)", line, maxsplit=1)[0]
    return sentence.strip() or None


def _clean(answer: str) -> str:
    """Without what does not change a value: dollar signs, spaces, units of money and percent, a closing full
    stop."""
    text = answer.strip().strip("$").strip()
    text = text.removeprefix("\\(").removesuffix("\\)").replace("\\$", "").replace("\\%", "%").replace("\\,", "")
    text = text.replace("$", "").replace("\\!", "").rstrip(".").strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return re.sub(r"\s+", " ", text.removesuffix("%").strip()).lower()


def _number(text: str) -> Fraction | None:
    if len(text) > 100:
        return None
    if _PLAIN.fullmatch(text):
        return Fraction(text.removesuffix("."))
    fraction = _FRACTION.fullmatch(text)
    if fraction is None:
        return None
    sign, top, bottom, plain_top, plain_bottom = fraction.groups()
    numerator, denominator = int((sign or "") + top if top else plain_top), int(bottom or plain_bottom)
    return Fraction(numerator, denominator) if denominator else None
