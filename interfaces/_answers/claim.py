"""Finds the answer that a response claims.

A claim is marked: by `####`, `\\boxed{…}`, `<answer>` or "answer is"; what is marked last counts. A claim that is
denied, doubted, attributed to somebody or taken back is withdrawn. It and an empty one are no answer, and no other is
looked for.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .languages import NAMES_OF_ANSWERS
from .markup import MAX_CHARS, closing_brace
from .number import is_number_word
from .stance import SPAN, is_attributed, is_denied, is_taken_back
from .words import FILLERS

_ATTEMPTS = 50
"""Marks tried from the end of a response; only the last complete one counts."""
_LINE = 4 * MAX_CHARS
_MARKED_BOX = re.compile(r"\\(?:boxed|fbox)")
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s*(?P<token>-?[0-9.,]*[0-9]|\s[^\s{}$\\.,]+))")
_JOINED = re.compile(r"[\s$.,;/|&]*(?:\\text\{)?\s*(?:or|and)?\s*\}?[\s$,;/|&]*", re.IGNORECASE)
_TAG = re.compile("<answer>", re.IGNORECASE)
_END_OF_TAG = re.compile("</answer>", re.IGNORECASE)
_SAID = re.compile(
    r"""(?<![^\W\d_])(?:answer|ans\.?|final[ ](?:result|solution|value)|(?:correct|right)[ ](?:option|choice))
    (?:[ ](?:to|for|of|in|as)(?:[ ][a-z]+){1,5}?)?[*_]*
    (?:\s*(?P<verb>is|equals|(?:must|will)[ ]be|becomes|turns[ ]out[ ]to[ ]be|comes[ ]out[ ]to)[*_]*\s*:?
    |\s*(?:=>|->|[:=→]|\\to(?![a-z]))|[ \t]*(?P<heading>\n))[ ]*\}?""",
    re.IGNORECASE | re.VERBOSE,
)
_HEADING = re.compile(r"[\s#*_]*(?:[^\W\d_]+\s)?")
"""Text before "answer" on a heading line, as in "### Final answer"."""
_HEADING_ALONE = re.compile(r"[\W_]*(?:the\s)?(?:final\s)?(?:answer|result|solution)[\W_]*", re.IGNORECASE)
_NAMED_ELSEWHERE = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(NAMES_OF_ANSWERS)})(?![A-Za-z])", re.IGNORECASE)
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)(?<!\b(?:sq|Rs)\.)[*_]*\s+|(?<=[。！？])")
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

    `is_value`: whether a text is one value. Another text after "answer is" does not replace an earlier `####` or box.
    """
    tag = next(_from_the_end(_TAG, response), None)
    if tag is None:
        return _last_claim(response, is_value)
    content, *rest = _END_OF_TAG.split(response[tag.end() :], maxsplit=1)
    claim = _last_claim(content, is_value)
    answer = content.strip() if claim is None else claim
    is_complete = bool(rest) and not is_taken_back("\n" + rest[0])
    return answer if is_complete and _last_claim(rest[0], is_value) in (None, answer) else ""


def marked_answer(text: str) -> str:
    """What a dataset's answer marks by `####` or a box, else all of it."""
    line = _after_marker(text)
    box = _boxed(text, line.end if line else 0)
    return (box and box.text) or (line and line.text) or text.strip()


def _last_claim(text: str, is_value: Callable[[str], bool]) -> str | None:
    """The claim at the last mark: an answer that is corrected later is not the final one."""
    line = _after_marker(text)
    mark = _boxed(text, line.end if line else 0) or line
    said = _said(text[mark.end if mark else 0 :])
    if said and (mark is None or is_value(said.claim)):
        return said.claim
    return mark.claim if mark else None


def _after_marker(text: str) -> _Mark | None:
    """The line after the last `####` that does not merely close a heading."""
    text = text.rstrip().rstrip("#")
    before, marker, rest = text.rpartition("####")
    if not marker:
        return None
    line = rest.lstrip()[:_LINE].split("\n", 1)[0]
    if _HEADING_ALONE.fullmatch(line):
        return None
    sentence, *others = _END_OF_SENTENCE.split(line, maxsplit=1)
    line = line if others and re.search("[0-9]", others[0]) else sentence
    end = len(text) - len(rest.lstrip()) + len(line)
    return _Mark(line.strip(), end, is_denied(before.rpartition("\n")[2]) or is_taken_back("\n" + text[end:]))


def _boxed(text: str, since: int) -> _Mark | None:
    """The last box; with the content "3, 5" for `\\boxed{3} or \\boxed{5}`, which are one answer, not two."""
    contents: list[str] = []
    start = end = len(text)
    for mark in _from_the_end(_MARKED_BOX, text, since):
        found = _BOX.match(text, mark.start())
        content, closed = _content(text, found) if found else (None, 0)
        if content is None:
            continue
        if contents and not (start - closed < 30 and _JOINED.fullmatch(text, closed, start)):
            break
        if not contents:
            end = closed
        if content not in contents:
            contents.insert(0, content)
        start = mark.start()
    if not contents:
        return None
    return _Mark(", ".join(contents), end, is_denied(text[max(0, start - SPAN) : start]) or is_taken_back(text[end:]))


def _content(text: str, found: re.Match[str]) -> tuple[str | None, int]:
    """The content of a box, None if it does not end; and the position after it."""
    if found["token"]:
        return found["token"].strip(), found.end()
    end = closing_brace(text, found.end() - 1)
    return (text[found.end() : end].strip(), end + 1) if end else (None, found.end())


def _said(text: str) -> _Mark | None:
    """The sentence after the last "answer is", or around the last word for it in another language."""
    elsewhere = next(_from_the_end(_NAMED_ELSEWHERE, text), None)
    for said in _from_the_end(_SAID, text):
        before = text[max(0, said.start() - SPAN) : said.start()]
        if said["heading"] and not _HEADING.fullmatch(before.rpartition("\n")[2]):
            continue
        if elsewhere and elsewhere.start() > said.start():
            break
        sentence, end = _sentence(text, said.end())
        is_withdrawn = is_attributed(before) or (bool(said["verb"]) and not _leads_up(sentence))
        return _Mark(_EXCLAMATION.sub("", sentence), end, is_withdrawn or is_taken_back("\n" + text[end:]))
    if elsewhere is None:
        return None
    start = max(text.rfind(mark, 0, elsewhere.start()) for mark in ".!?\n。！？") + 1
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
    first = _WORDS_FIRST.match(sentence)
    leading = first[1].lower().split() if first else []
    return leading[:1] == ["that"] or all(word in FILLERS or is_number_word(word) for word in leading)


def _from_the_end(pattern: re.Pattern[str], text: str, since: int = 0) -> Iterator[re.Match[str]]:
    """The last few matches, from the end."""
    return reversed(deque(pattern.finditer(text, since), maxlen=_ATTEMPTS))
