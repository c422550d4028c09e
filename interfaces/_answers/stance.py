"""Decides whether the words around a claimed answer deny it, doubt it, leave it to somebody else,
or take it back."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .languages import denies_elsewhere, takes_back_elsewhere, words
from .markup import DENYING_PICTURES
from .words import (
    BEING,
    BOUNDS,
    COMMENTS,
    DETERMINERS,
    OF_THE_ANSWER,
    OPERATIONS,
    SAYINGS,
    SCALES,
    retracts,
)

SPAN = 200
"""Characters before a claim that are looked at."""
_SPAN_OF_BOX = 40
_SPAN_AFTER = 2000
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_END = re.compile(r"[.!?\n]")
_DOUBTS = SAYINGS | words(
    "maybe perhaps possibly probably presumably supposedly guess guessing unsure uncertain "
    "unclear doubt hopefully"
)
_TURNS = words(
    """
    or no nope nah not wait oops actually hmm hm sorry correction alternatively scratch ignore
    disregard forget rather only hold strike psych sike nevermind well make who but however unless
    """
)
"""At the beginning of a sentence or a clause they take back what was said before."""
_LINKS = BEING | words(
    "but which that this it though although however i we and can could may "
    "might will seems has does"
)
"""At the beginning of a clause, they continue what was said before."""
_REFERENCES = words("this that it which answer result value solution i it's that's")
_DENIALS = words("not never cannot hardly unlikely")
_REFUTATIONS = _DOUBTS | words(
    """
    wrong incorrect incorrectly false mistaken mistake untrue erroneous nonsense kidding joke joking
    lie lied lying bogus invalid actually instead oops wait meant opposite impossible refuted nobody
    reconsider recheck rethink thought contradicts contradiction bad
    """
)
_DISMISSALS = words("instead ignore disregard forget avoid reject scratch strike")
_RETREATS = (words("take back"), words("never mind"), words("it should be"))
_COURTESIES = (
    words("hope"),
    words("please"),
    words("let know"),
    words("feel free"),
    words("hesitate"),
)
_REMARKS = tuple(
    words(remark)
    for remark in (
        "cannot be simplified", "can't be simplified", "cannot be reduced", "can't be reduced",
        "other options incorrect", "other options wrong", "other choices incorrect",
        "other choices wrong", "matches expected", "as expected",
    )
)  # fmt: skip
"""Words of remarks on a right answer, which deny or doubt in other sentences."""
_OPERATOR_BEFORE = re.compile(
    r"(?:(?:\\(?:neq?|not\s*=|[gl]eq?|lnot|neg|sim|times|cdot|sqrt\s*\{?)|≠|!=|×|\w\s*[<>/])"
    r"\s*\$?\s*"
    r"|(?:^|[\w=}$(])\s*-|\d)\Z"
)
_OPERATOR_AFTER = re.compile(
    r"\.?\d|[a-z]|[ \t$)}\]]*(?:[=<>≠+/→×±]|[-–]\s*\d|\^\s*\{?\d"
    r"|\\(?:neq?|times|cdot|pm|to|rightarrow|cup|text\{\s*or)(?![A-Za-z]))"
)


def is_denied(before: str) -> bool:
    """Whether the words right before a claim deny or weaken it, or an operator there changes it."""
    before = _END.split(before[-_SPAN_OF_BOX:])[-1]
    last = _words(before)[-8:]
    changed = not (BOUNDS | OPERATIONS).isdisjoint(last[-1:]) or last[-2:] == ["half", "of"]
    return (
        changed
        or any(map(retracts, last))
        or not _DISMISSALS.isdisjoint(last)
        or _OPERATOR_BEFORE.search(before) is not None
    )


def is_attributed(before: str) -> bool:
    """Whether the sentence that leads up to "answer" denies it,
    doubts it or names another answer than one's own."""
    *earlier, clause = re.split("[,;:]", _END.split(before[-SPAN:])[-1])
    leading = _words(clause)
    while leading and leading[-1] in OF_THE_ANSWER:
        leading.pop()
    return (
        any(retracts(word) for word in leading)
        or bool(
            leading and (leading[-1] not in DETERMINERS or (leading[1:] and leading[0] in BEING))
        )
        or any(_doubts(_words(preceding)) for preceding in earlier)
    )


def is_taken_back(after: str) -> bool:
    """Whether the rest of the claim's sentence, or a later one, takes the claim back."""
    sentence, *later = re.split(r"(?<=[.!?\n])", after[:_SPAN_AFTER])
    if (
        sentence.endswith("?")
        or _OPERATOR_AFTER.match(after)
        or not set(DENYING_PICTURES).isdisjoint(after[:_SPAN_OF_BOX])
    ):
        return True
    clauses = [_words(clause) for clause in re.split("[,;:(—]", sentence)]
    multiplied = any(word in SCALES or word in OPERATIONS for word in clauses[0][:1])
    return (
        multiplied
        or any(_turns(clause) or not _DOUBTS.isdisjoint(clause) for clause in clauses)
        or any(_refutes(_words(sentence)) for sentence in later)
        or takes_back_elsewhere(after[:SPAN])
    )


def _words(text: str) -> list[str]:
    return [word.lower().replace("’", "'") for word in _WORD.findall(text)]


def _doubts(clause: Sequence[str]) -> bool:
    return not _DOUBTS.isdisjoint(clause) or (
        "sure" in clause and any(retracts(word) for word in clause)
    )


def _turns(clause: Sequence[str]) -> bool:
    """Whether a clause after the claim, in the same sentence, takes it back."""
    first = clause[0] if clause else ""
    return bool(first) and (
        first in _TURNS
        or retracts(first)
        or (first in _LINKS and any(retracts(word) or word in COMMENTS for word in clause[1:]))
    )


def _refutes(sentence: Sequence[str]) -> bool:
    """Whether a later sentence takes the claim back."""
    for remark in _REMARKS:
        if remark <= set(sentence):
            sentence = [word for word in sentence if word not in remark]
    if not sentence or any(courtesy <= set(sentence) for courtesy in _COURTESIES):
        return False
    return (
        sentence[0] in _TURNS
        or _denies(sentence[0])
        or not _REFUTATIONS.isdisjoint(sentence)
        or any(retreat <= set(sentence) for retreat in _RETREATS)
        or any(len(word) > 2 and denies_elsewhere(word) for word in sentence)
        or any(
            word in _REFERENCES
            and any(_denies(following) for following in sentence[position + 1 : position + 4])
            for position, word in enumerate(sentence)
        )
    )


def _denies(word: str) -> bool:
    return word in _DENIALS or word.endswith("n't")
