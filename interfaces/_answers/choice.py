"""Answers to questions with several choices: a letter, its content, or both."""

from __future__ import annotations

import re

from .markup import LABEL, readable

ANNOUNCED = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:the )?(?:(?:final|correct|right) "
    r")*(?:answer|option|choice)(?: is:?|:| =) ?"
)
LETTER = re.compile(r"(?:(?:option|choice) )?[(\[]?(\w)[)\]]?[.:]?")
_LETTERS = "abcdefghij"
_ANOTHER_LABEL = re.compile(r"(?<!\w)(?:[(\[][A-J][)\]]|[A-J][.):]\s)", re.IGNORECASE)


def letter_and_content(text: str) -> tuple[str, str]:
    """The lower-case letter of a choice, and what it says: ("b", "12") for "(B) 12", ("b", "") for
    "option B", ("", text) for what names no choice, or several."""
    words = readable(text)
    letter = LETTER.fullmatch(ANNOUNCED.sub("", words.casefold()))
    if letter and letter[1] in _LETTERS:
        return letter[1], ""
    labelled = text if LABEL.match(text) else words
    label = LABEL.match(labelled)
    if label is None or _ANOTHER_LABEL.search(labelled, label.end()):
        return "", text
    return label[1].lower(), labelled[label.end() :].strip()
