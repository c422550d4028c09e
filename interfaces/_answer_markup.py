"""Strips the decoration from answers: Markdown, LaTeX's text and spacing commands, maths delimiters."""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS = 500
"""A longer final answer does not count as one."""

_EMPHASIS = re.compile(r"(?<![\w)}\]*`])(\*{1,3}|`)(?=[^\s*`])([^*`]*)(?<=[^\s*`])\1(?![\w({\[*`])")
_UNDERLINE = re.compile(r"(?<![\w)}\]_])(_{1,2})(?=[^\s_])([^_]*)(?<=[^\s_])\1(?![\w({\[_])")
_WRAPPER = re.compile(r"\\(?:text(?:bf|it|rm|up|sf|normal)?|math(?:rm|bf|it|sf)|mbox|emph|boxed|fbox)\s*\{")
_NOTHING = re.compile(r"\\(?:left|right|displaystyle|textstyle|limits|big|Big|bigl|bigr)(?![A-Za-z])")
_GROUPS_OF_DIGITS = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!]|[\u2009\u202f])(?=\d{3})")
_SPACED_GROUPS = re.compile(r"(?<![\w.,/^])[1-9]\d{0,2}(?:[ ~]\d{3})+(?![\d/])")
"""1 234 567: groups of three digits separated by spaces."""
_SPACE = re.compile(r"\\(?:[,;:! ]|q?quad(?![A-Za-z])|$)|(?<=[\w}])~|\s")
_DEGREES = re.compile(r"\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\s*\\degree(?![A-Za-z])|\s*°")
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z ])\^\{([23])\}")
_THEREFORE = re.compile(r"^(?:=>|->|[→⇒∴]|\\(?:therefore|Rightarrow|implies|to)(?![A-Za-z]))\s*")
_MINUS = str.maketrans({"−": "-", "–": "-", "＋": "+", "⁄": "/", "’": "'", "“": '"', "”": '"'})


def is_clean(text: str) -> bool:
    """Whether it is short enough, and free of invisible characters and of those that reverse the text."""
    return len(text) <= MAX_CHARS and not any(
        unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs", "Cn") and character not in "\n\t"
        for character in text
    )


def undecorated(text: str) -> str:
    """The text without Markdown, quotation marks, surrounding spaces and its final full stop; digits of other scripts
    become 0 to 9."""
    text = re.sub(r"(?<=[^\s.])\.$", "", _ascii_digits(text).translate(_MINUS).strip())
    if text.count("**") == 1:
        text = text.removeprefix("**").removesuffix("**").strip()
    for _ in range(3):
        text = _UNDERLINE.sub(r"\2", _EMPHASIS.sub(r"\2", text)).strip()
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1].strip()
    return text


def readable(text: str) -> str:
    """The text with LaTeX's words as words, spacing as spaces and no maths delimiters; `$` remains for money."""
    text = _GROUPS_OF_DIGITS.sub(",", undecorated(text))
    text = _SPACED_GROUPS.sub(lambda found: re.sub("[ ~]", ",", found[0]), text)
    text = _DEGREES.sub(" degrees ", _NOTHING.sub(" ", text))
    text = _unwrapped(text).replace("\\$", "\x01").replace("\\%", "%")
    if text.count("$") % 2 == 0:
        text = text.replace("$", " ")
    text = _POWER_OF_UNIT.sub(r"^\1 ", text)
    text = re.sub(r"\\[()\[\]]", " ", text).replace("\x01", "$")
    text = _SPACE.sub(" ", text)
    return undecorated(_without_group(_THEREFORE.sub("", text.strip())))


def _ascii_digits(text: str) -> str:
    if text.isascii():
        return text
    return "".join(str(unicodedata.decimal(character)) if character.isdecimal() else character for character in text)


def closing_brace(text: str, opened: int) -> int | None:
    """The position of the brace that closes the one at `opened`, if it is near enough to belong to an answer."""
    depth = 0
    for place in range(opened, min(len(text), opened + MAX_CHARS + 2)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


def _unwrapped(text: str) -> str:
    """Replace `\\text{…}`, `\\boxed{…}` and the like by their content, set off by spaces."""
    while found := _WRAPPER.search(text):
        end = closing_brace(text, found.end() - 1)
        if end is None:
            return text
        text = f"{text[: found.start()]} {text[found.end() : end]} {text[end + 1 :]}"
    return text


def _without_group(text: str) -> str:
    """The text without braces around the whole of it."""
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text
