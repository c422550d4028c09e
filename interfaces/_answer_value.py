"""Reads an answer that states one value: a number, perhaps with a unit or a sentence around it.

    answer  = lead value tail
    lead    = words | name "="             nothing that hedges, denies, compares or computes
    value   = sign? currency? number | "(" value ")"
    tail    = "%" | currency | words, powers of a unit

The whole answer must match. A second number, an operator, a variable or an unknown symbol means that it does not state
a single value, whatever number it may contain.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ._answer_markup import is_clean, readable
from ._answer_number import WRITTEN, is_number_word, number_in_digits, number_in_words
from ._answer_words import (
    AT_SUCH,
    BOUNDS,
    CEILINGS,
    COUNTED,
    TAKES_A_PART,
    is_plain_word,
    qualifies,
    unit_of,
    units_agree,
)

MAX_WORDS = 30

_TOKEN = re.compile(
    rf"""
    (?P<number>{WRITTEN})
    | (?P<word>[^\W\d_²³¹⁰-⁹]+(?:['-][^\W\d_²³¹⁰-⁹]+)*)
    | (?P<command>\\[A-Za-z]+(?:_(?:\w|\{{\w+\}}))?)
    | (?P<blank>[ ]+)
    | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_INDEXED_NAME = re.compile(r"(?<![\w\\])([A-Za-z])(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\})|\([A-Za-z]\))(?=\s*=)")
"""x_1 and f(x), as names of what equals the value."""

_POWERS = ("2", "3", "²", "³")
_SIGNS = ("+", "-", "minus", "negative")


@dataclass(frozen=True)
class Value:
    """One number, with its unit."""

    number: Fraction
    percent: bool = False
    unit: tuple[str, ...] = ()
    """The words after it, or the name of its currency."""
    bare: bool = True
    """Whether at most a name and "=" come before it."""

    def is_same(self, gold: Value) -> bool:
        """Whether this answers a row whose answer is `gold`. A unit matters where both name one; 50% is 50 and 0.5."""
        if gold.unit and (self.percent or (self.unit and not units_agree(gold.unit, self.unit))):
            return False
        if gold.percent and self.unit and not self.percent:
            return False
        if self.number == gold.number:
            return True
        mine, wanted = self.number / (100 if self.percent else 1), gold.number / (100 if gold.percent else 1)
        return self.percent != gold.percent and mine == wanted


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    after_blank: bool


class _NoValue(Exception):
    """The answer does not match this grammar."""


def read_value(text: str) -> Value | None:
    """The one value that the whole text states, or None."""
    if not is_clean(text):
        return None
    try:
        return _Reader(_tokens(readable(text))).answer()
    except _NoValue:
        return None


def _tokens(text: str) -> list[_Token]:
    text = _INDEXED_NAME.sub(r"\1", text)
    found: list[_Token] = []
    blank = True
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or "sign"
        if kind == "blank":
            blank = True
            continue
        written = match.group()
        if kind == "sign" and unicodedata.category(written[0]) == "Sc":
            kind = "currency"
        if written in ("\\times", "\\cdot", "×", "·"):
            kind, written = "sign", "×"
        found.append(_Token(kind, written, blank))
        blank = False
    if len(found) > 4 * MAX_WORDS:
        raise _NoValue
    return found


class _Reader:
    def __init__(self, tokens: Sequence[_Token]):
        self.tokens = tokens

    def answer(self) -> Value:
        tokens = self.tokens
        first = next((n for n, token in enumerate(tokens) if _is_numeric(token)), None)
        if first is None:
            raise _NoValue
        number, after = self._number(first)
        start, negative, currency = self._before(first)
        while start and after < len(tokens) and tokens[start - 1].text == "(" and tokens[after].text == ")":
            start, after = start - 1, after + 1
        lead, tail = tokens[:start], tokens[after:]
        _check_lead(lead, tokens[start])
        percent, unit = _tail(tail, tokens[after - 1])
        if currency and (percent or (tail and tail[0].kind == "currency")):
            raise _NoValue
        if number < 0 and (negative or currency):
            raise _NoValue
        return Value(
            -number if negative else number,
            percent,
            (currency,) if currency else unit,
            bare=not any(token.kind == "word" for token in lead) or lead[-1].text == "=",
        )

    def _before(self, first: int) -> tuple[int, bool, str]:
        """Where the value begins, including sign and currency; whether it is negative; the currency."""
        tokens, start = self.tokens, first
        sign, currency = "", ""
        while start:
            token = tokens[start - 1]
            if token.kind == "currency" and not currency:
                currency = _currency(token)
                start -= 1
                if start and tokens[start - 1].text.isupper() and not token.after_blank:  # US$
                    start -= 1
            elif token.text.lower() in _SIGNS and not sign and self._is_sign(start - 1):
                sign = token.text
                start -= 1
            else:
                break
        return start, sign not in ("", "+"), currency

    def _is_sign(self, place: int) -> bool:
        """Whether it is the sign of the number, not a binary operator."""
        before = self.tokens[place - 1] if place else None
        if before is None or before.kind == "currency" or before.text in ("=", ":", "("):
            return True
        tight = self.tokens[place].after_blank and not self.tokens[place + 1].after_blank
        return before.kind == "word" and len(before.text) > 1 and (tight or self.tokens[place].kind == "word")

    def _number(self, first: int) -> tuple[Fraction, int]:
        """The number that begins there, and the index after it."""
        tokens, after = self.tokens, first + 1
        if tokens[first].kind == "number":
            number = number_in_digits(tokens[first].text)
        else:
            while after < len(tokens) and (_is_numeric(tokens[after]) or self._joins_numbers(after)):
                after += 1
            said = number_in_words([token.text for token in tokens[first:after]])
            number = None if said is None else Fraction(said)
        if number is None:
            raise _NoValue
        return number, after

    def _joins_numbers(self, place: int) -> bool:
        after = place + 1
        return self.tokens[place].text == "and" and after < len(self.tokens) and _is_numeric(self.tokens[after])


def _currency(token: _Token) -> str:
    """The currency's unit: $ is named DOLLAR SIGN."""
    return unit_of(unicodedata.name(token.text).removesuffix(" SIGN"))


def _is_numeric(token: _Token) -> bool:
    return token.kind == "number" or (token.kind == "word" and is_number_word(token.text))


def _check_lead(lead: Sequence[_Token], value: _Token) -> None:
    """Check that the value is preceded by a sentence that leads up to it, or by a name that equals it."""
    words = [token.text for token in lead if token.kind == "word"]
    if len(words) > MAX_WORDS or any(qualifies(word) for word in words):
        raise _NoValue
    if not lead:
        return
    if not value.after_blank and lead[-1].kind in ("word", "command"):
        raise _NoValue
    for place, token in enumerate(lead):
        last = place == len(lead) - 1
        named = token.text == "=" and last and (not place or lead[place - 1].kind in ("word", "command"))
        before_name = token.kind == "command" and place == len(lead) - 2 and lead[-1].text == "="
        if not (token.kind == "word" or named or before_name or token.text in (":", ",")):
            raise _NoValue
    if lead[-1].kind != "word":
        return
    last_word = lead[-1].text.lower()
    if (len(last_word) == 1 and last_word not in "ai") or last_word in BOUNDS | COUNTED:
        raise _NoValue
    if last_word in ("of", "to") and len(words) > 1 and words[-2].lower() in TAKES_A_PART | BOUNDS:
        raise _NoValue


def _tail(tail: Sequence[_Token], value: _Token) -> tuple[bool, tuple[str, ...]]:
    """Whether the text after the value means percent, and the unit."""
    words: list[str] = []
    percent = False
    before: _Token = value
    for place, token in enumerate(tail):
        follower = tail[place + 1] if place + 1 < len(tail) else None
        if token.kind == "word":
            glued = place == 0 and not token.after_blank
            if _takes_back(token.text, before) or not is_plain_word(token.text, glued):
                raise _NoValue
            if not words and token.text.lower() in ("percent", "percentage"):
                percent = True
            else:
                words.append(unit_of(token.text))
        elif token.text == "%" and place == 0:
            percent = True
        elif token.kind == "currency" and place == 0:
            words.append(_currency(token))
        elif token.text in _POWERS and (before.text == "^" or (token.text in _POWERS[2:] and before.kind == "word")):
            words.append(str(unicodedata.digit(token.text)))
        elif not _may_stand(token, before, follower):
            raise _NoValue
        before = token
    if len(words) > MAX_WORDS:
        raise _NoValue
    return percent, tuple(words)


def _takes_back(word: str, before: _Token) -> bool:
    """Whether a word after the number is a second number, or changes or retracts the first."""
    lower = word.lower()
    return (
        qualifies(word)
        or is_number_word(word)
        or (lower in AT_SUCH and before.text.lower() == "at")
        or (lower in CEILINGS and before.kind != "word")
    )


def _may_stand(token: _Token, before: _Token, follower: _Token | None) -> bool:
    """Whether a sign may occur between the words of a unit or a sentence."""
    after_word = before.kind == "word" or before.text in (")", *_POWERS)
    match token.text:
        case ".":
            return follower is None
        case "!":
            return follower is None and before.kind == "word"
        case "^":
            return before.kind == "word" and follower is not None and follower.text in ("2", "3")
        case "/" | "×":
            return follower is not None and follower.kind == "word" and (after_word or token.text == "/")
        case "-":
            return follower is not None and follower.kind == "word" and not (token.after_blank or follower.after_blank)
        case ",":
            return follower is not None and follower.kind == "word" and follower.after_blank
        case "(":
            return follower is not None and follower.kind == "word" and token.after_blank
        case ")":
            return before.kind == "word"
    return False
