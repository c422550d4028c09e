"""Numbers as answers write them: 5, 1,234.50, 1e3, 1.5 × 10^3, 10^3, 3/4, \\frac{3}{4}, 1 3/4, 1½, 5 million, five."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from .words import FRACTIONS, NUMBERS, SCALES, SMALL_NUMBERS, TENS

MAX_DIGITS = 100
MAX_EXPONENT = 100

_PLAIN = r"(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+|\.(?!\w))?|\.[0-9]+)"
_FRACTION = r"""\\[dtc]?frac\s*(?:
    \{\s*-?[0-9]+\s*\}\s*\{\s*-?[0-9]+\s*\} | [0-9]\s*[0-9](?![0-9])
    | \{\s*-?[0-9]+\s*\}\s*[0-9](?![0-9]) | [0-9]\s*\{\s*[0-9]+\s*\})"""
_VULGAR = "[¼-¾⅐-⅞]"
_RATIO = r"[0-9]+\s*/\s*[0-9]+"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_TEN_TO = r"10(?:\s*\^\s*(?:\{\s*[+-]?[0-9]+\s*\}|[+-]?[0-9]+)|[⁻⁺]?[⁰¹²³⁴-⁹]+)"
_TIMES = r"\s*(?:×|·|\*|\\times|\\cdot)\s*"
WRITTEN = rf"""
    (?:[0-9]+\s*(?:{_VULGAR}|{_FRACTION}) | [0-9]+\s+{_RATIO}
    | {_FRACTION} | {_VULGAR} | {_RATIO} | {_TEN_TO}(?![\^⁰¹²³⁴-⁹.!])
    | {_PLAIN}(?:{_TIMES}{_TEN_TO} | [eE][+-]?[0-9]+(?!\w|\.[0-9]) | \s+(?:{"|".join(SCALES)})(?!\w))?)
"""
"""Verbose pattern of a number in digits, without its sign."""

_WORD_SCALES = SCALES | {"dozen": 12}
_VOCABULARY = NUMBERS | frozenset(FRACTIONS) | {"and", "a", "an", "point", "dozen"}
_PARTS = re.compile(
    rf"""(?:(?P<whole>[0-9]+)(?:\s+(?=[0-9])|\s*(?=[^0-9\s])))?
    (?:(?P<vulgar>{_VULGAR}) | (?P<fraction>{_FRACTION}) | (?P<ratio>{_RATIO}))""",
    re.VERBOSE,
)
_POWER_OF_TEN = re.compile(rf"(?:{_TIMES}|^){_TEN_TO}$")
_SCALED = re.compile(rf"(?P<plain>{_PLAIN})(?:[eE](?P<exponent>.+)|\s+(?P<scale>[a-z]+))?")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")


def number_in_digits(text: str) -> Fraction | None:
    """The value of what WRITTEN matches; None for misplaced commas, a division by zero or one without remainder
    (a computation not carried out), and numbers out of bounds."""
    if sum(character.isdigit() for character in text) > MAX_DIGITS:
        return None
    parts = _PARTS.fullmatch(text)
    if parts is None:
        return _scaled(text)
    part = _part(parts)
    if parts["whole"] is None or part is None:
        return part
    return int(parts["whole"]) + part if 0 < part < 1 else None


def _part(parts: re.Match[str]) -> Fraction | None:
    if parts["vulgar"]:
        return Fraction(unicodedata.numeric(parts["vulgar"])).limit_denominator(10)
    numbers = re.findall("-?[0-9]+", parts["fraction"] or parts["ratio"])
    if len(numbers) == 1:  # \frac12
        numbers = list(numbers[0])
    top, bottom = map(int, numbers)
    return Fraction(top, bottom) if bottom and top % bottom else None


def _scaled(text: str) -> Fraction | None:
    power = _POWER_OF_TEN.search(text)
    if power:
        exponent = re.sub(r"[\s^{}]", "", power[0].partition("10")[2]).translate(_SUPERSCRIPTS)
        text = f"{text[: power.start()] or 1}e{exponent}"
    found = _SCALED.fullmatch(text)
    if found is None or ("," in found["plain"] and not _THOUSANDS.fullmatch(found["plain"])):
        return None
    number = Fraction(found["plain"].replace(",", "").removesuffix("."))
    exponent = found["exponent"] or "0"
    if len(exponent) > 5 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    return number * Fraction(10) ** int(exponent) * SCALES.get(found["scale"] or "", 1)


def is_number_word(word: str) -> bool:
    """Whether it is or contains a number word, as "twenty-five", "five-year" and "thousands" do."""
    return any(part in NUMBERS or part.removesuffix("s") in NUMBERS for part in word.lower().split("-"))


def belongs_to_number(word: str) -> bool:
    """Whether the word can be part of a number in words."""
    return all(_singular(part) in _VOCABULARY for part in word.lower().split("-"))


def number_in_words(words: Sequence[str]) -> Fraction | None:
    """The number that these words spell out together, or None.

    "one hundred and twenty-five", "three quarters", "one and a half", "a dozen", "two point five".
    """
    parts = [part for word in words for part in word.lower().split("-")]
    if parts[1:] and parts[0] in ("a", "an"):
        parts[0] = "one"
    if "point" in parts:
        return _decimal(parts)
    if parts[:2] == ["half", "a"]:
        scale = _whole(["one", *parts[2:]])
        return scale if scale is None else Fraction(scale, 2)
    if parts and _singular(parts[-1]) in FRACTIONS:
        return _parts_of(parts)
    whole = _whole(parts)
    return None if whole is None else Fraction(whole)


def _decimal(parts: Sequence[str]) -> Fraction | None:
    point = parts.index("point")
    whole, digits = _whole(parts[:point]), [SMALL_NUMBERS.get(part, 10) for part in parts[point + 1 :]]
    if whole is None or not digits or max(digits) > 9:
        return None
    return Fraction(f"{whole}.{''.join(map(str, digits))}")


def _parts_of(parts: Sequence[str]) -> Fraction | None:
    """ "three quarters", or "two and three quarters"."""
    *count, name = parts
    joint = len(count) - 1 - count[::-1].index("and") if "and" in count else -1
    top = ["one"] if count[joint + 1 :] == ["a"] or (not count and name == "half") else count[joint + 1 :]
    whole, number = _whole(count[:joint]) if joint > 0 else 0, _whole(top)
    if whole is None or not number:
        return None
    part = Fraction(number, FRACTIONS[_singular(name)])
    return part + whole if joint < 0 or (whole and part < 1) else None


def _whole(parts: Sequence[str]) -> int | None:
    total, group, smallest = 0, 0, 10**15
    previous = ""
    for place, part in enumerate(parts):
        if part == "and" and previous in SCALES and place + 1 < len(parts):
            pass
        elif part in SMALL_NUMBERS and _may_follow(part, previous):
            group += SMALL_NUMBERS[part]
        elif part == "hundred" and 1 <= group < 100:
            group *= 100
        elif part in _WORD_SCALES and part != "hundred" and group and _WORD_SCALES[part] < smallest:
            smallest = _WORD_SCALES[part]
            total, group = total + group * smallest, 0
        else:
            return None
        previous = part
    return total + group if parts else None


def _may_follow(part: str, previous: str) -> bool:
    if previous in TENS:
        return 1 <= SMALL_NUMBERS[part] <= 9
    return previous == "" or previous in SCALES or previous == "and"


def _singular(part: str) -> str:
    return "half" if part == "halves" else part.removesuffix("s")
