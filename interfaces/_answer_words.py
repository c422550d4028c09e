"""Words that change the meaning of an answer: closed classes of English, and numbers in words."""

from __future__ import annotations

import re
from collections.abc import Sequence


def words(text: str) -> frozenset[str]:
    """A class of words."""
    return frozenset(text.split())


HEDGES = words(
    """
    maybe perhaps possibly probably presumably supposedly likely unlikely might could approximately approx
    roughly nearly almost circa guess guessing suppose think believe assume assuming estimate estimated
    unsure uncertain unknown something somewhere anything whatever if unless depends depending either or
    versus vs instead but close ish seems apparently perchance conceivably potentially plausibly hopefully
    doubtful doubtfully dubious questionable debatable arguably allegedly reportedly any
    """
)
"""An answer that contains one of these commits to nothing."""

NEGATIONS = words(
    """
    not no never none nor neither cannot except excluding without wrong incorrect false nothing impossible
    unlike
    """
)

OPERATIONS = words(
    """
    plus minus negative times divided multiplied subtracted squared cubed root factorial mod modulo log ln
    sin cos tan exp sqrt reciprocal inverse twice thrice double triple quadruple half halves halved doubled
    tripled dozen dozens bn mn mil k lakh lakhs crore crores gross grand kilo mega giga permille ppm
    """
)
"""Words that turn the number before or after them into another one."""

COUNTED = frozenset({"times"})
"""Operations that can also be counted: "5 times". A second operand would be a second number or a variable."""

BOUNDS = words(
    """
    about around over under above below beyond than least most exceeding near nearing up within
    max min maximum minimum limit
    """
)
"""Right before a number: the value is a different one, or unknown."""

AT_SUCH = words("least most best worst")
"""Bounds after "at"."""

CEILINGS = words("max maximum minimum tops")
"""Bounds right after a number."""

TAKES_A_PART = words("third quarter fourth fifth sixth seventh eighth ninth tenth multiple factor square")
"""Before "of": a fraction or a multiple of the number."""

_ONES = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
""".split()  # noqa: SIM905
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SMALL_NUMBERS = {word: value for value, word in enumerate(_ONES)} | {word: 20 + 10 * n for n, word in enumerate(TENS)}
NUMBERS = frozenset(SMALL_NUMBERS) | frozenset(SCALES)
_PARTS = re.compile(r"(?:thirds|fifths|eighths|ninths|twelfths|(?:" + "|".join(sorted(NUMBERS)) + r")ths?)")

_SHORT_UNIT = re.compile(
    r"[kcmdµμn]?(?:m|g|s|l|L|Hz|Pa|Wh|cal)|[hCF]|hrs?|yrs?|mins?|secs?|ft|in|yd|mi|lbs?|oz|mph|kph|kmh|am|pm|AM|PM|st|nd|rd|th"
)
_CURRENCY_CODES = {"usd": "dollar", "eur": "euro", "gbp": "pound", "buck": "dollar"}


def qualifies(word: str) -> bool:
    """Whether the word retracts, weakens or changes a number anywhere near it. "May" is a month."""
    lower = word.lower().replace("’", "'")
    if word == "may" or lower.endswith("n't"):
        return True
    parts = {lower, *lower.split("-")}
    return bool(parts & (HEDGES | NEGATIONS | OPERATIONS) - COUNTED) or _PARTS.fullmatch(lower) is not None


def retracts(word: str) -> bool:
    """Whether a sentence with this word may deny or weaken what it leads up to."""
    lower = word.lower().replace("’", "'")
    return lower in (HEDGES | NEGATIONS) - {"but", "instead"} or lower.endswith("n't") or word == "may"


def is_plain_word(word: str, glued: bool) -> bool:
    """Whether the word after a number can be a unit or part of a sentence, and not a variable or a multiplier.

    `glued`: no space before it, as in "5km" and "5x".
    """
    if _SHORT_UNIT.fullmatch(word):
        return True
    if not re.sub("['-]", "", word).isalpha():
        return False
    if glued:
        return len(word) >= 4 and word.islower() and _has_vowel(word)
    return word in ("a", "I") or (len(word) >= 2 and (_has_vowel(word) or not word.isascii()) and len(word) < 30)


def unit_of(word: str) -> str:
    """A unit in the singular."""
    lower = word.lower()
    lower = {"feet": "foot", "inches": "inch"}.get(lower, lower)
    lower = lower[:-1] if len(lower) > 3 and lower.endswith("s") else lower
    return _CURRENCY_CODES.get(lower, lower)


def units_agree(expected: Sequence[str], given: Sequence[str]) -> bool:
    """Whether the given words begin with that unit, with its abbreviation, or with what it abbreviates."""
    wanted = "".join(expected)
    return any(
        _digits(wanted) == _digits(start) and (_abbreviates(wanted, start) or _abbreviates(start, wanted))
        for start in ("".join(given[: count + 1]) for count in range(len(given)))
    )


def _abbreviates(short: str, long: str) -> bool:
    letters = iter(long)
    return short[:1] == long[:1] and all(letter in letters for letter in short)


def _digits(text: str) -> list[str]:
    return [character for character in text if character.isdigit()]


def _has_vowel(word: str) -> bool:
    return any(letter in "aeiouyAEIOUY" for letter in word)
