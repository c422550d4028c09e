"""Numbers as answers write them: 5, 1,234.50, 1e3, 1.5 × 10^3, 10^3, 3/4, \\frac{3}{4}, 1 3/4, 1½,
0.\\overline{3}, 5 million, five."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

from .words import FRACTIONS, NUMBERS, SCALES, SMALL_NUMBERS, TENS

MAX_EXPONENT = 100

_PLAIN = r"(?:[0-9]+(?:,[0-9]+)*(?:\.[0-9]+|\.(?!\w))?|\.[0-9]+)"
_REPEATING = r"[0-9]+\.[0-9]*\\(?:overline|bar)\s*(?:\{\s*[0-9]+\s*\}|[0-9])(?!\w)"
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
    | {_FRACTION} | {_VULGAR} | {_RATIO} | {_REPEATING} | {_TEN_TO}(?![\^⁰¹²³⁴-⁹.!])
    | {_PLAIN}
      (?:{_TIMES}{_TEN_TO} | [eE][+-]?[0-9]+(?!\w|\.[0-9]) | \s+(?:{"|".join(SCALES)})(?!\w))?)
"""
"""Verbose pattern of a number in digits, without its sign."""
_WRITTEN = re.compile(WRITTEN, re.VERBOSE)

_WORD_SCALES = SCALES | {"dozen": 12}
_NUMBER_WORD = "|".join(sorted(NUMBERS, reverse=True))
_COUNTABLE = "|".join([*FRACTIONS, *_WORD_SCALES])
"""What "a" counts."""
_FIRST = (
    rf"(?:an?[ ](?=(?:{_COUNTABLE})\b) | [0-9]+[ ]and[ ](?:an?[ ])? | "
    rf"(?=(?:half|{_NUMBER_WORD})\b))"
)
_NEXT = rf"(?:(?:{_NUMBER_WORD}|{_COUNTABLE})s?|halves)\b"
SPELT = (
    rf"(?i:{_FIRST} (?:half[ ]an?[ ])? {_NEXT} (?:(?:[ ]and(?:[ ]an?)?|[ ]point)?(?:[ ]|-|,[ "
    rf"]){_NEXT})*)(?!['-]?\w)"
)
"""Verbose pattern of a number in words."""
_MIXED = re.compile(
    rf"""(?:(?P<integer>[0-9]+)(?:\s+(?=[0-9])|\s*(?=[^0-9\s])))?
    (?:(?P<vulgar>{_VULGAR}) | (?P<fraction>{_FRACTION}|{_RATIO}))""",
    re.VERBOSE,
)
_POWER_OF_TEN = re.compile(rf"(?:{_TIMES}|^){_TEN_TO}$")
_SCALED = re.compile(rf"(?P<digits>{_PLAIN})(?:[eE](?P<exponent>.+)|\s+(?P<scale>[a-z]+))?")
_REPETEND = re.compile(r"(?P<before>[0-9.]+)\\(?:overline|bar)[\s{]*(?P<again>[0-9]+)")
_THOUSANDS = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")


def read_number(text: str) -> Fraction | None:
    """The number that a text writes, in digits or in words; None if it is none."""
    return number_in_digits(text) if _WRITTEN.fullmatch(text) else number_in_words(text)


def number_in_digits(text: str) -> Fraction | None:
    """The value of what WRITTEN matches; None for misplaced commas, a division by zero or one
    without remainder (a computation not carried out), and numbers out of bounds."""
    if repetend := _REPETEND.match(text):
        return _repeating(repetend["before"], repetend["again"])
    mixed = _MIXED.fullmatch(text)
    if mixed is None:
        return _scaled(text)
    fraction = _fraction(mixed)
    if mixed["integer"] is None or fraction is None:
        return fraction
    return int(mixed["integer"]) + fraction if 0 < fraction < 1 else None


def _fraction(mixed: re.Match[str]) -> Fraction | None:
    if mixed["vulgar"]:
        return Fraction(unicodedata.numeric(mixed["vulgar"])).limit_denominator(10)
    numbers = re.findall("-?[0-9]+", mixed["fraction"])
    top, bottom = map(int, numbers if len(numbers) == 2 else numbers[0])  # \frac12
    return Fraction(top, bottom) if bottom and top % bottom else None


def _repeating(before: str, again: str) -> Fraction:
    """0.1, 6 → 1/6: the digits after which others are repeated without end."""
    decimals = len(before.partition(".")[2])
    return Fraction(before + "0") + Fraction(int(again), (10 ** len(again) - 1) * 10**decimals)


def _scaled(text: str) -> Fraction | None:
    power = _POWER_OF_TEN.search(text)
    if power:
        raised = re.sub(r"[\s^{}]", "", power[0].partition("10")[2]).translate(_SUPERSCRIPTS)
        text = f"{text[: power.start()] or 1}e{raised}"
    match = _SCALED.fullmatch(text)
    if match is None or ("," in match["digits"] and not _THOUSANDS.fullmatch(match["digits"])):
        return None
    exponent = int(match["exponent"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    return (
        Fraction(match["digits"].replace(",", ""))
        * Fraction(10) ** exponent
        * SCALES.get(match["scale"], 1)
    )


def is_number_word(word: str) -> bool:
    """Whether it is or contains a number word, as "twenty-five", "five-year" and "thousands" do."""
    return any(
        piece in NUMBERS or piece.removesuffix("s") in NUMBERS for piece in word.lower().split("-")
    )


def number_in_words(text: str) -> Fraction | None:
    """The number that a text spells out, or None.

    "one hundred and twenty-five", "three quarters", "one and a half", "a dozen",
    "two point five", "2 and a half".
    """
    *count, last = parts = re.split(r"[\s,-]+", text.lower())
    if "point" in parts:
        point = parts.index("point")
        return _decimal(_integer(parts[:point]), parts[point + 1 :])
    if parts[0] == "half" and parts[1:2] in (["a"], ["an"]):
        scale = _integer(parts[1:])
        return Fraction(scale, 2) if scale else None
    denominator = FRACTIONS.get("half" if last == "halves" else last.removesuffix("s"))
    if denominator is None:
        integer = _integer(parts)
        return None if integer is None else Fraction(integer)
    if "and" not in count:
        numerator = _integer(count or ["one"])
        return Fraction(numerator, denominator) if numerator else None
    joint = len(count) - 1 - count[::-1].index("and")
    integer, numerator = _integer(count[:joint]), _integer(count[joint + 1 :] or ["one"])
    if not integer or not numerator or numerator >= denominator:
        return None
    return integer + Fraction(numerator, denominator)


def _decimal(integer: int | None, words: Sequence[str]) -> Fraction | None:
    """two, [five, one] → 2.51"""
    digits = [SMALL_NUMBERS.get(word, 10) for word in words]
    if integer is None or max(digits) > 9:
        return None
    return Fraction(f"{integer}.{''.join(map(str, digits))}")


def _integer(words: Sequence[str]) -> int | None:
    """one, hundred, and, five → 105; also a number in digits, and "a" as one."""
    if len(words) == 1 and words[0].isdigit():
        return int(words[0])
    total, group, smallest = 0, 0, 10**15
    previous = ""
    for word in words:
        if word in ("a", "an") and not previous:
            group = 1
        elif word == "and" and previous in SCALES:
            pass
        elif word in SMALL_NUMBERS and _may_follow(word, previous):
            group += SMALL_NUMBERS[word]
        elif word == "hundred" and 1 <= group < 100:
            group *= 100
        elif word in _WORD_SCALES and word != "hundred" and group and _WORD_SCALES[word] < smallest:
            smallest = _WORD_SCALES[word]
            total, group = total + group * smallest, 0
        else:
            return None
        previous = word
    return total + group if words else None


def _may_follow(word: str, previous: str) -> bool:
    if previous in TENS:
        return 1 <= SMALL_NUMBERS[word] <= 9
    return previous in ("", "and", *SCALES)
