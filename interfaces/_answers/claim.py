"""Finds the answer that a response claims.

A claim is marked: by `####`, `\\boxed{…}`, `<answer>` or "answer is"; what is marked last counts. A
claim that is denied, doubted, attributed to somebody or taken back is withdrawn. It and an empty
one are no answer, and no other is looked for.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .languages import NAMES_OF_ANSWERS
from .markup import MAX_CHARS, closing_brace
from .number import is_number_word
from .stance import is_attributed, is_denied, is_taken_back
from .words import FILLERS

_ATTEMPTS = 50
"""Marks tried from the end of a response; only the last complete one counts."""
_LINE = 4 * MAX_CHARS
_BOX = re.compile(
    r"\\(?:boxed|fbox)(?:\s*(?P<brace>\{)|\s*(?P<token>-?[0-9.,]*[0-9]|\s[^\s{}$\\.,]+)|)"
)
_JOINED = re.compile(r"[\s$.,;/|&]*(?:\\text\{)?\s*(?:or|and)?\s*\}?[\s$,;/|&]*", re.IGNORECASE)
_TAG = re.compile("<answer>", re.IGNORECASE)
_END_OF_TAG = re.compile("</answer>|$", re.IGNORECASE)
_NAMED = re.compile(
    r"""(?<![^\W\d_])
    (?:answer|ans|final[ ](?:result|solution|value)|(?:correct|right)[ ](?:option|choice))
    (?:[ ](?:to|for|of|in|as)(?:[ ][a-z]+){1,5}?)?[*_]*
    (?:\s*(?P<verb>is|equals|(?:must|will)[ ]be|becomes|turns[ ]out[ ]to[ ]be|comes[ ]out[ ]to)
    [*_]*\s*:?
    |\s*(?:=>|->|[:=→]|\\to(?![a-z]))|[ \t]*\n)(?:(?:\*{1,3}|__?)(?=\s))?[ ]*\}?""",
    re.IGNORECASE | re.VERBOSE,
)
_NAMED_ELSEWHERE = re.compile(
    rf"(?<![A-Za-z])(?:{'|'.join(NAMES_OF_ANSWERS)})(?![A-Za-z])", re.IGNORECASE
)
_HEADING = re.compile(r"[\W_]*(?:the\s)?(?:final\s)?answer[\W_]*", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])(?<!\bRs\.)[*_]*\s+|(?<=[。！？])")
_WORDS_FIRST = re.compile(r"((?:[A-Za-z']+\s+)+)[$\\(+*{-]*[0-9]")
"""Words before a number in digits."""
_EXCLAMATION = re.compile(r"!+(?=[*_\s]*$)")


@dataclass(frozen=True)
class _Mark:
    """A place where an answer is stated; `text` is empty where nothing is."""

    text: str
    end: int
    is_withdrawn: bool

    @property
    def claim(self) -> str:
        return "" if self.is_withdrawn else self.text


def claimed_answer(response: str, is_value: Callable[[str], bool]) -> str | None:
    """The answer that is claimed; "" if it is empty or withdrawn, None if none is marked.

    `is_value`: whether a text is one value. Another text after "answer is" does not replace an
    earlier `####` or box.
    """
    tag = next(_from_the_end(_TAG, response), None)
    if tag is None:
        return _last_claim(response, is_value)
    content, rest = _END_OF_TAG.split(response[tag.end() :], maxsplit=1)
    claim = _last_claim(content, is_value)
    answer = content.strip() if claim is None else claim
    is_withdrawn = is_taken_back("\n" + rest) or _last_claim(rest, is_value) not in (None, answer)
    return "" if is_withdrawn else answer


def marked_answer(text: str) -> str:
    """What a dataset's answer marks by `####` or a box, else all of it."""
    line, box = _line_and_box(text)
    return (box and box.text) or (line and line.text) or text.strip()


def _last_claim(text: str, is_value: Callable[[str], bool]) -> str | None:
    """The claim at the last mark: an answer that is corrected later is not the final one."""
    line, box = _line_and_box(text)
    mark = box or line
    sentence = _sentence_of_answer(text[mark.end if mark else 0 :])
    if sentence and (mark is None or is_value(sentence.claim)):
        return sentence.claim
    return mark.claim if mark else None


def _line_and_box(text: str) -> tuple[_Mark | None, _Mark | None]:
    """The last `####`, and the last box after it."""
    line = _after_marker(text)
    return line, _boxed(text, line.end if line else 0)


def _after_marker(text: str) -> _Mark | None:
    """The sentence after the last `####` that does not merely open a heading."""
    before, marker, rest = text.rpartition("####")
    sentence, end = _sentence(text, len(text) - len(rest))
    if not marker or _HEADING.fullmatch(sentence):
        return None
    return _Mark(sentence, end, is_denied(before) or is_taken_back("\n" + text[end:]))


def _boxed(text: str, since: int) -> _Mark | None:
    """The last box; with the content "3, 5" for `\\boxed{3} or \\boxed{5}`,
    which are one answer, not two."""
    contents: list[str] = []
    start = end = len(text)
    for box in _from_the_end(_BOX, text, since):
        closed = closing_brace(text, box.end() - 1) if box["brace"] else box.end()
        if closed is None or not (box["brace"] or box["token"]):
            continue
        content = text[box.end() : closed] if box["brace"] else box["token"]
        closed += bool(box["brace"])
        if contents and not _JOINED.fullmatch(text, closed, start):
            break
        end = end if contents else closed
        if content.strip() not in contents:
            contents.insert(0, content.strip())
        start = box.start()
    if not contents:
        return None
    return _Mark(", ".join(contents), end, is_denied(text[:start]) or is_taken_back(text[end:]))


def _sentence_of_answer(text: str) -> _Mark | None:
    """The sentence after the last "answer is", or around the last word for it in another
    language."""
    name = next(_from_the_end(_NAMED, text), None)
    if name is not None:
        sentence, end = _sentence(text, name.end())
        is_withdrawn = is_attributed(text[: name.start()]) or (
            bool(name["verb"]) and not _leads_up(sentence)
        )
        return _Mark(
            _EXCLAMATION.sub("", sentence), end, is_withdrawn or is_taken_back("\n" + text[end:])
        )
    name = next(_from_the_end(_NAMED_ELSEWHERE, text), None)
    if name is None:
        return None
    start = max(text.rfind(mark, 0, name.start()) for mark in ".!?\n。！？") + 1
    sentence, end = _sentence(text, start)
    return _Mark(sentence, end, is_taken_back("\n" + text[end:]))


def _sentence(text: str, start: int) -> tuple[str, int]:
    """The sentence that begins there or on the next line with text, and its end."""
    start += len(text[start:]) - len(text[start:].lstrip())
    line = text[start : start + _LINE].split("\n", 1)[0]
    sentence = _END_OF_SENTENCE.split(line, maxsplit=1)[0]
    return sentence.strip(), start + len(sentence)


def _leads_up(sentence: str) -> bool:
    """Whether the words between "answer is" and a number only lead up to it."""
    match = _WORDS_FIRST.match(sentence)
    return match is None or all(
        word in FILLERS or is_number_word(word) for word in match[1].lower().split()
    )


def _from_the_end(pattern: re.Pattern[str], text: str, since: int = 0) -> Iterator[re.Match[str]]:
    """The last few matches, from the end."""
    return reversed(deque(pattern.finditer(text, since), maxlen=_ATTEMPTS))
