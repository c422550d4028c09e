"""Reads an answer that states one value: a number, perhaps with a unit or a sentence around it.

    answer   = lead quantity repeated* tail
    lead     = words | name "="            nothing that hedges, denies, compares or computes
    quantity = sign? currency? number "%"? | "(" quantity ")"
    repeated = "=" quantity | "(" quantity ")"     the same value, written in another way
    tail     = currency | words, powers of a unit  no statement of its own, except that this is the answer

The whole answer must match. A second number, an operator, a variable or an unknown symbol means that it does not state
a single value, whatever number it may contain.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from .languages import announces, is_elsewhere
from .markup import LABEL, is_clean, readable
from .number import WRITTEN, belongs_to_number, is_number_word, number_in_digits, number_in_words
from .words import (
    ABBREVIATED,
    ANNOUNCING,
    AT_SUCH,
    BEING,
    BOUNDS,
    CEILINGS,
    CLOSING,
    COMMENTS,
    COUNTABLE,
    COUNTED,
    FRACTIONS,
    GREEK,
    MEASURES,
    PREPOSITIONS,
    SCALES,
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
_LETTER = rf"(?:\\(?:{'|'.join(sorted(GREEK))})|[A-Za-zα-ωΑ-Ω])(?![A-Za-z])"
_NAME = rf"(?:{_LETTER}(?:_(?:\w|\{{\w+\}}))?'?(?:\(\w+(?:,\s*\w+)*\))?|\|[A-Z]{{1,2}}\||\\angle\s*[A-Z]{{1,3}})"
_NAMED = re.compile(rf"(?<![\w\\]){_NAME}(?:\s*[+-]\s*{_NAME}){{0,9}}(?=\s*=)")
"""x_1, f(2) and m+n, as names of what equals the value."""
_POWERS = ("2", "3", "²", "³")
_PERCENT = ("%", "percent", "percentage")
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
    is_part: bool = False
    """Whether it is less than one or written as a fraction: then its percentage is another value."""

    @property
    def amount(self) -> Fraction:
        """50% is 0.5."""
        return self.number / (100 if self.percent else 1)

    def is_same(self, gold: Value) -> bool:
        """Whether this answers a row whose answer is `gold`. A unit matters where both name one; 50% is 50 and 0.5."""
        if gold.unit and (self.percent or (self.unit and not units_agree(gold.unit, self.unit))):
            return False
        if gold.percent and self.unit and not self.percent:
            return False
        if self.percent and not gold.percent and self.is_part:
            return self.amount == gold.number
        return self.number == gold.number or (self.percent != gold.percent and self.amount == gold.amount)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    after_blank: bool

    @property
    def word(self) -> str:
        """In lower case; empty if it is not a word."""
        return self.text.lower() if self.kind == "word" else ""


@dataclass(frozen=True)
class _Quantity:
    """A number with its sign, currency and percent sign: the tokens from `start` to `end`."""

    value: Value
    currency: str
    start: int
    end: int


class _NoValue(Exception):
    """The answer does not match this grammar."""


def read_value(text: str) -> Value | None:
    """The one value that the whole text states, or None."""
    if not is_clean(text):
        return None
    try:
        return _Reader(_tokens(LABEL.sub("", readable(text), count=1))).answer()
    except _NoValue:
        return None


def _tokens(text: str) -> list[_Token]:
    text = _NAMED.sub("x", text)
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
        first = next((n for n in range(len(self.tokens)) if self._begins_number(n)), None)
        if first is None:
            raise _NoValue
        quantity = self._quantity(first)
        end = self._after_repetitions(quantity)
        lead, tail = self.tokens[: quantity.start], self.tokens[end:]
        _check_lead(lead, self.tokens[quantity.start])
        unit = _tail(tail, self.tokens[end - 1])
        _check_statement(lead, tail)
        if quantity.currency and (quantity.value.percent or (tail and tail[0].kind == "currency")):
            raise _NoValue
        bare = not any(token.kind == "word" for token in lead) or lead[-1].text == "="
        return replace(quantity.value, unit=(quantity.currency,) if quantity.currency else unit, bare=bare)

    def _quantity(self, first: int) -> _Quantity:
        """The quantity whose number begins there."""
        number, is_part, end = self._number(first)
        start, negative, currency = self._before(first)
        percent = self._text(end).lower() in _PERCENT
        end += percent
        while start and self._text(start - 1) == "(" and self._text(end) == ")":
            start, end = start - 1, end + 1
        if number < 0 and (negative or currency):
            raise _NoValue
        value = Value(-number if negative else number, percent, is_part=is_part)
        return _Quantity(value, currency, start, end)

    def _after_repetitions(self, quantity: _Quantity) -> int:
        """The index after the quantity and the same value written in other ways: "3/4 = 0.75", "10 (ten)"."""
        end = quantity.end
        while self._text(end) in ("=", "(", "or"):
            first = next((n for n in range(end + 1, min(end + 4, len(self.tokens))) if self._begins_number(n)), None)
            if first is None:
                break
            other = self._quantity(first)
            in_brackets = other.start == end and self._text(end) == "("
            if not in_brackets and (other.start != end + 1 or self._text(end) == "("):
                raise _NoValue
            if other.value.amount != quantity.value.amount:
                raise _NoValue
            end = other.end
        return end

    def _text(self, place: int) -> str:
        return self.tokens[place].text if place < len(self.tokens) else ""

    def _begins_number(self, place: int) -> bool:
        token = self.tokens[place]
        if token.kind == "number" or (token.word and is_number_word(token.word)):
            return True
        return token.word == "half" or (token.word in ("a", "an") and self._text(place + 1).lower() in COUNTABLE)

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
        return bool(before.word) and len(before.text) > 1 and (tight or self.tokens[place].kind == "word")

    def _number(self, first: int) -> tuple[Fraction, bool, int]:
        """The number that begins there, whether it is a part, and the index after it."""
        tokens, end = self.tokens, first + 1
        if tokens[first].kind == "number":
            number = number_in_digits(tokens[first].text)
            number, end = self._with_words(number, end)
            is_fraction = re.search(r"[/¼-¾⅐-⅞]|frac", tokens[first].text) is not None
        else:
            while end < len(tokens) and (belongs_to_number(self._text(end)) or self._separates_groups(end)):
                end += 1
            while self._text(end - 1).lower() in ("and", "a", "an", "point"):
                end -= 1
            number = number_in_words([token.text for token in tokens[first:end] if token.word])
            is_fraction = number is not None and number.denominator > 1
        if number is None:
            raise _NoValue
        return number, is_fraction or abs(number) < 1, end

    def _with_words(self, number: Fraction | None, end: int) -> tuple[Fraction | None, int]:
        """A whole number in digits with the words after it: "2 and a half"."""
        last = end
        while belongs_to_number(self._text(last)):
            last += 1
        if number is None or self._text(end) != "and" or self._text(last - 1) not in FRACTIONS:
            return number, end
        part = number_in_words([token.text for token in self.tokens[end + 1 : last]])
        return (number + part if part and part < 1 and number.denominator == 1 else None), last

    def _separates_groups(self, place: int) -> bool:
        """Whether it is the comma of "two thousand, five hundred"."""
        following = self._text(place + 1)
        return self._text(place) == "," and self._text(place - 1).lower() in SCALES and is_number_word(following)


def _currency(token: _Token) -> str:
    """The currency's unit: $ is named DOLLAR SIGN."""
    return unit_of(unicodedata.name(token.text).removesuffix(" SIGN"))


def _check_lead(lead: Sequence[_Token], value: _Token) -> None:
    """Check that the value is preceded by a sentence that leads up to it, or by a name that equals it."""
    words = [token.text for token in lead if token.word]
    if len(words) > MAX_WORDS or any(qualifies(word) for word in words):
        raise _NoValue
    if "answer" in (token.word for token in lead) and not ANNOUNCING.issuperset(filter(None, (t.word for t in lead))):
        raise _NoValue
    if is_elsewhere(words) and not all(announces(word) for word in words):
        raise _NoValue
    if words[1:] and lead[0].word in BEING:  # a question
        raise _NoValue
    if not lead:
        return
    if not value.after_blank and lead[-1].kind in ("word", "command"):
        raise _NoValue
    for place, token in enumerate(lead):
        last = place == len(lead) - 1
        named = token.text == "=" and last and (not place or lead[place - 1].word)
        if not (token.word or named or token.text in (":", ",")):
            raise _NoValue
    last_word = lead[-1].word
    if not last_word:
        return
    if (len(last_word) == 1 and last_word not in "aiéè") or last_word in BOUNDS | COUNTED:
        raise _NoValue
    if last_word in ("of", "to") and len(words) > 1 and words[-2].lower() in TAKES_A_PART | BOUNDS:
        raise _NoValue


def _tail(tail: Sequence[_Token], value: _Token) -> tuple[str, ...]:
    """The unit: the words after the value."""
    words: list[str] = []
    before: _Token = value
    for place, token in enumerate(tail):
        follower = tail[place + 1] if place + 1 < len(tail) else None
        if token.word:
            glued = place == 0 and not token.after_blank
            if _takes_back(token.text, before, is_first=place == 0) or not is_plain_word(token.text, glued):
                raise _NoValue
            words.append(unit_of(token.text))
        elif token.kind == "currency" and place == 0:
            words.append(_currency(token))
        elif token.text in _POWERS and (before.text == "^" or (token.text in _POWERS[2:] and before.word)):
            words.append(str(unicodedata.digit(token.text)))
        elif not _may_stand(token, before, follower):
            raise _NoValue
        before = token
    if len(words) > MAX_WORDS:
        raise _NoValue
    return tuple(words)


def _check_statement(lead: Sequence[_Token], tail: Sequence[_Token]) -> None:
    """Check that the words after the value do not begin a statement about it, other than that it is the answer."""
    words = [token.word for token in tail]
    if not COMMENTS.isdisjoint(words) or (words[:1] == ["times"] and not MEASURES.isdisjoint(words[1:2])):
        raise _NoValue
    announced = ANNOUNCING.issuperset(filter(None, (token.word for token in lead)))
    if announced and words[:1] and words[0] in PREPOSITIONS and not CLOSING.issuperset(filter(None, words)):
        raise _NoValue
    stated = any(token.word in BEING for token in lead)
    for place, token in enumerate(tail):
        is_verb = token.word in BEING and (place == 0 or (stated and words[place - 1] != "that"))
        if is_verb or (token.text == "," and place + 1 < len(tail)):
            if not CLOSING.issuperset(word for word in words[place:] if word and word not in BEING):
                raise _NoValue
            return


def _takes_back(word: str, before: _Token, is_first: bool) -> bool:
    """Whether a word after the number is a second number, or changes or retracts the first."""
    lower = word.lower()
    return (
        qualifies(word)
        or is_number_word(word)
        or lower in _PERCENT
        or (lower in AT_SUCH and before.text.lower() == "at")
        or (lower in CEILINGS and is_first)
    )


def _may_stand(token: _Token, before: _Token, follower: _Token | None) -> bool:
    """Whether a sign may occur between the words of a unit or a sentence."""
    after_word = bool(before.word) or before.text in (")", *_POWERS)
    match token.text:
        case ".":
            return (follower is None and not before.text.endswith(".")) or before.word in ABBREVIATED
        case "!":
            return follower is None and bool(before.word)
        case "^":
            return bool(before.word) and follower is not None and follower.text in ("2", "3")
        case "/" | "×":
            return follower is not None and follower.kind == "word" and (after_word or token.text == "/")
        case "-":
            return follower is not None and follower.kind == "word" and not (token.after_blank or follower.after_blank)
        case ",":
            return follower is not None and follower.kind == "word" and follower.after_blank
        case "(":
            return follower is not None and follower.kind == "word" and token.after_blank
        case ")":
            return bool(before.word)
    return False
