"""Reads an answer that states one value: a number, perhaps with a unit or a sentence around it.

    answer   = lead quantity repeated* tail
    lead     = words | name "="            nothing that hedges, denies, compares or computes
    quantity = sign? currency? number "%"? | "(" quantity ")"
    repeated = "=" quantity | "(" quantity ")"     the same value, written in another way
    tail     = currency | words, powers of a unit  states nothing, except that this is the answer

Each token has a letter for its class, and the patterns below are about these letters. The whole
answer must match. A second number, an operator, a variable or an unknown symbol means that it does
not state a single value, whatever number it may contain.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .languages import announces, is_elsewhere
from .markup import LABEL, is_clean, readable
from .number import SPELT, WRITTEN, is_number_word, read_number
from .units import PER, units_agree
from .words import (
    ABBREVIATED,
    BEING,
    BOUNDS,
    CEILINGS,
    CLOSING,
    COMMENTS,
    COUNTED,
    GREEK,
    MEASURES,
    SUPERLATIVES,
    TAKES_A_PART,
    is_plain_word,
    qualifies,
)

MAX_TOKENS = 120

_TOKEN = re.compile(
    rf"""
    (?P<spelt>{SPELT})
    | (?P<digits>{WRITTEN})
    | (?P<percent>%|percent(?:age)?(?!\w))
    | (?P<currency>[A-Z]{{0,3}}[$¢£¤¥֏؋฿₠-⃀])
    | (?P<power>\^[ ]?[23]|[²³])
    | (?P<sign>[-+](?=\S)(?<![^ ].)|(?i:minus|negative)(?!\w))
    | (?P<operator>[-+])
    | (?P<or>or(?!\w))
    | (?P<word>[^\W\d_²³¹⁰-⁹]+(?:['-][^\W\d_²³¹⁰-⁹]+)*(?![0-9]))
    | (?P<times>×|·|\\times|\\cdot)
    | (?P<blank>[ ]+)
    | (?P<itself>[=:,.!()/])
    | (?P<unknown>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_LETTERS = {
    "spelt": "n", "digits": "n", "percent": "%", "currency": "$", "power": "²", "sign": "-",
    "operator": "~", "or": "|", "word": "w", "times": "×", "unknown": "?",
}  # fmt: skip
_QUANTITY = r"(?:(?:-|(?:^|(?<=[=:($]))~)?\$?|\$[-~]?)n%?"
_QUANTITIES = re.compile(_QUANTITY)
_STATED = rf"(?:{_QUANTITY}|\({_QUANTITY}\)|\(\({_QUANTITY}\)\))"
_ANSWER = re.compile(rf"[^n]*?(?P<stated>{_STATED}(?:[=|]{_STATED}|\({_QUANTITY}\))*)[^n]*")
_LEAD = re.compile(r"[wbpo%:,]*(?:(?:^|(?<=[wbpo]))=|(?<!b)(?<![bp]o))")
"""Words that lead up to a number: not a bound (b) right before it, and not a part (p)
or a bound "of" it (o)."""
_TAIL = re.compile(r"\$?(?:/?[wc]²?|(?<=[wc²])×[wc]|\([wc]+\))*(?:[b,][bc,]*)?\.?")
"""A unit, then perhaps a remark that consists of closing words (c), after a form of "to be" (b)
or a comma."""

_NO_SIGN = re.compile(rf"(?<!\w)({'|'.join(sorted(ABBREVIATED))})\.(?= )|(?<=[A-Za-z])!$")
"""The full stop of an abbreviation, and an exclamation mark after a word."""
_LETTER = rf"(?:\\(?:{'|'.join(sorted(GREEK))})|[A-Za-zα-ωΑ-Ω])(?![A-Za-z])"
_NAME = (
    rf"(?:{_LETTER}(?:_(?:\w|\{{\w+\}}))?'?(?:\(\w+(?:,\s*\w+)*\))?"
    r"|\|[A-Z]{1,2}\||\\angle\s*[A-Z]{1,3})"
)
_NAMED = re.compile(rf"(?<![\w\\]){_NAME}(?:\s*[+-]\s*{_NAME}){{0,9}}(?=\s*=)")
"""x_1, f(2) and m+n, as names of what equals the value."""


@dataclass(frozen=True)
class Value:
    """One number, with its unit."""

    number: Fraction
    percent: bool = False
    unit: tuple[str, ...] = ()
    """The words after it, or the name of its currency and what it is a rate of."""
    bare: bool = True
    """Whether at most a name and "=" come before it."""
    is_part: bool = False
    """Whether it is less than one or written as a fraction:
    then its percentage is another value."""

    @property
    def amount(self) -> Fraction:
        """50% is 0.5."""
        return self.number / (100 if self.percent else 1)

    def is_same(self, gold: Value) -> bool:
        """Whether this answers a row whose answer is `gold`. A unit matters where both name one;
        50% is 50 and 0.5."""
        if gold.unit and (self.percent or (self.unit and not units_agree(gold.unit, self.unit))):
            return False
        if gold.percent and self.unit and not self.percent:
            return False
        if self.percent and not gold.percent and self.is_part:
            return self.amount == gold.number
        return self.number == gold.number or (
            self.percent != gold.percent and self.amount == gold.amount
        )


@dataclass(frozen=True)
class _Token:
    letter: str
    text: str
    is_glued: bool
    """Whether there is no space before it."""


def read_value(text: str) -> Value | None:
    """The one value that the whole text states, or None."""
    tokens = _tokens(LABEL.sub("", readable(text), count=1)) if is_clean(text) else []
    letters = _letters(tokens)
    answer = _ANSWER.fullmatch(letters)
    if answer is None or len(tokens) > MAX_TOKENS:
        return None
    start, end = answer.span("stated")
    # a function, whatever it may do
    if letters[start - 1 : start + 1] == "w(" and tokens[start].is_glued:
        return None
    matches = _QUANTITIES.finditer(letters, start, end)
    first, *repeated = [_quantity(tokens[match.start() : match.end()]) for match in matches]
    if first is None or any(again is None or again.amount != first.amount for again in repeated):
        return None
    lead, tail = tokens[:start], tokens[end:]
    if not _leads_up(lead) or not _is_unit_or_remark(tail):
        return None
    if first.unit and (first.percent or _letters(tail[:1]) == "$"):
        return None
    unit = first.unit + _unit(_rate(tail) if first.unit else tail)
    bare = "w" not in letters[:start] or letters[start - 1] == "="
    return Value(first.number, first.percent, unit, bare, first.is_part)


def _tokens(text: str) -> list[_Token]:
    text = _NO_SIGN.sub(r"\1", _NAMED.sub("x", text))
    tokens: list[_Token] = []
    is_glued = False
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind != "blank":
            tokens.append(_Token(_LETTERS.get(kind, match[0]), match[0], is_glued))
        is_glued = kind != "blank"
    return tokens


def _letters(tokens: Sequence[_Token]) -> str:
    return "".join(token.letter for token in tokens)


def _quantity(tokens: Sequence[_Token]) -> Value | None:
    """The value of a sign, a currency, a number and a percent sign; None if the number has none."""
    texts = {token.letter: token.text for token in tokens}
    written = texts["n"]
    number = read_number(written)
    if number is None:
        return None
    is_part = abs(number) < 1 or (number.denominator > 1 and "." not in written)
    if texts.get("-", texts.get("~", "+")) != "+":
        number = -number
    unit = (_currency(texts["$"]),) if "$" in texts else ()
    return Value(number, "%" in texts, unit, is_part=is_part)


def _currency(text: str) -> str:
    """The currency's unit: $ is named DOLLAR SIGN."""
    return unicodedata.name(text[-1]).removesuffix(" SIGN").lower()


def _unit(tail: Sequence[_Token]) -> tuple[str, ...]:
    """The words, powers, currencies and "/" after a number."""
    return tuple(_word_of_unit(token) for token in tail if token.letter in "w²$/")


def _word_of_unit(token: _Token) -> str:
    if token.letter == "$":
        return _currency(token.text)
    return str(unicodedata.digit(token.text[-1])) if token.letter == "²" else token.text


def _rate(tail: Sequence[_Token]) -> Sequence[_Token]:
    """What an amount of money is for: "per square foot"."""
    return tail[:3] if tail and tail[0].text in PER else ()


def _leads_up(lead: Sequence[_Token]) -> bool:
    """Whether these tokens are a sentence that leads up to a number, or a name that equals it."""
    words = [token.text for token in lead if token.letter == "w"]
    if any(qualifies(word) or is_number_word(word) for word in words):
        return False
    if is_elsewhere(words) and not all(map(announces, words)):
        return False
    return _LEAD.fullmatch("".join(_letter_before(token) for token in lead)) is not None


def _letter_before(token: _Token) -> str:
    """The class of a token before the number."""
    word = token.text.lower()
    if token.letter != "w":
        return token.letter
    if word in BOUNDS | COUNTED or (len(word) == 1 and word not in "aiéè"):
        return "b"
    return "p" if word in TAKES_A_PART else "o" if word in ("of", "to") else "w"


def _is_unit_or_remark(tail: Sequence[_Token]) -> bool:
    """Whether these tokens are a unit of the number, or a remark that does not change it."""
    words = [token.text.lower() for token in tail]
    if words[:1] == ["times"] and not MEASURES.isdisjoint(words[1:2]):
        return False
    if not CEILINGS.isdisjoint(words[:1]):
        return False
    letters = (_letter_after(token, is_glued=token is tail[0] and token.is_glued) for token in tail)
    return _TAIL.fullmatch("".join(letters)) is not None


def _letter_after(token: _Token, is_glued: bool) -> str:
    """The class of a token after the number; "?" for a word that is another number,
    or changes or retracts it."""
    word = token.text.lower()
    if token.letter != "w":
        return token.letter
    changes = qualifies(token.text) or is_number_word(word) or word in SUPERLATIVES | COMMENTS
    if changes or not is_plain_word(token.text, is_glued):
        return "?"
    return "b" if word in BEING else "c" if word in CLOSING else "w"
