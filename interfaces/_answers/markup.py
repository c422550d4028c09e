"""Strips what is markup and not the answer: thoughts, tags, end-of-text tokens, emphasis, styles,
spacing, delimiters.

`without_tags` reads a whole response, `plain` what is claimed as the answer, and `readable` turns
that into words and numbers.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Mapping

from .languages import IDEOGRAPHS, words

MAX_CHARS = 500
"""A longer final answer does not count as one."""

_THOUGHT = r"[\w:-]{0,20}(?:think|thought|reason|reflect|scratch|monologue|analysis)[\w:-]{0,20}\s*"
_THOUGHT_BEGINS = re.compile(
    rf"<{_THOUGHT}>|<\|begin_of_thought\|>|\[THINK\]|◁think▷"
    r"|<\|channel\|>analysis<\|message\|>|(?:^|(?<=assistant))(?-i:analysis)(?=[\w\\$*#])",
    re.IGNORECASE | re.MULTILINE,
)
_THOUGHT_ENDS = re.compile(
    rf"</{_THOUGHT}>|<\|end_of_thought\|>|\[/THINK\]|◁/think▷"
    r"|<\|channel\|>final<\|message\|>|assistantfinal",
    re.IGNORECASE,
)
"""The channels of gpt-oss, too: with its special tokens, or as they are decoded without them."""
_STRUCK = re.compile(r"<(del|s|strike)>[^<]*</\1>|~~[^~\n]+~~", re.IGNORECASE)
_TAG = re.compile(
    r"""</?(?:b|i|u|em|strong|span|font|mark|code|small|big|center|ins|kbd|samp|var|tt|a|q|cite|math
    |mn|mrow|solution|result|output|response|final|final_answer|answer_final|conclusion|s|strike
    |del)(?:\s[^<>]*)?/?>
    | <\|[^<>|]{1,40}\|> | <｜[^<>｜]{1,40}｜>
    | <(?:eos|bos|pad|unk|eot|stop|end|(?:start|end)_?of_?\w{1,10})>
    | \[/?(?:EOS|PAD|INST|END|STOP)\]""",
    re.IGNORECASE | re.VERBOSE,
)
_LINE_TAG = re.compile(
    (
        r"</?(?:br|p|div|li|ul|ol|h[1-6]|hr|pre|table|tr|td|blockquote|section|html|body)"
        r"(?:\s[^<>]*)?/?>"
        r"|^[ \t]*```\w*[ \t]*$"
    ),
    re.IGNORECASE | re.MULTILINE,
)
_DISPLAYED = re.compile(r"(\$\$|\\\[)[ \t]*\n([^$\n]*)\n[ \t]*(\$\$|\\\])")
"""A formula on a line of its own."""
DENYING_PICTURES = "✕✖✗✘❌❎❓❔⛔🚫👎🤔🤷🙅🤥🤡🙃🤨"
_PICTURE = re.compile(
    rf"(?![{DENYING_PICTURES}\u2660-\u2667\u2776-\u2793])"
    "[\u25a0-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff][\ufe0f\u200d\U0001f3fb-\U0001f3ff]*"
)
_EMPHASIS = re.compile(
    r"(?<![\w)}\]*`])(\*{1,3}|`{1,3})(?=[^\s*`])([^*`]*)(?<=[^\s*`])\1(?![\w({\[*`])"
)
_UNDERLINE = re.compile(r"(?<![\w)}\]_.])(_{1,2})(?=[^\s_])([^_]*)(?<=[^\s_])\1(?![\w({\[_])")
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?")
_STYLES = {
    **dict.fromkeys(
        words(
            """
            underline uline boldsymbol bm pmb ensuremath framebox hbox smash emph textbf textit
            texttt textsf textsc textup textnormal mathbf mathit mathsf mathtt mathnormal bf it rm
            sf tt sl sc bfseries itshape rmfamily tiny small normalsize large Large LARGE huge Huge
            displaystyle textstyle scriptstyle limits nolimits left right middle big Big bigg Bigg
            bigl bigr Bigl Bigr biggl biggr Biggl Biggr strut mathstrut num bbox makebox mathop
            mathord underbrace underbar hl ul boldmath hfill thinspace medspace thickspace enspace
            noindent centering scriptscriptstyle
            """
        ),
        0,
    ),
    **dict.fromkeys(
        words(
            """
            style class color textcolor colorbox hspace vspace phantom hphantom vphantom label
            cancel bcancel xcancel sout st
            """
        ),
        1,
    ),
    "fcolorbox": 2,
}
"""Commands that are removed, and how many of their arguments are removed with them; a struck
argument is no answer."""
_WRAPPERS = dict.fromkeys(words("text textrm mathrm mbox boxed fbox operatorname"), 0)
_ARGUMENT = re.compile(r"\s*(?:\[[^\]{}]*\]\s*)?(?=\{)")
_CLOSING = re.compile(
    r"""(?:\\(?:blacksquare|square|Box|checkmark|qed|qedsymbol|qedhere|bigstar|newline)(?![A-Za-z])
    | \\(?:\\|,|;|:|!|[ ]|$)
    | \\q?quad(?![A-Za-z]) | ∎ | (?<!\w)Q\.?E\.?D\.? | (?<=\s)[:;]-?[)D] | [,;:\s])+$""",
    re.VERBOSE,
)
_GROUP_MARK = r"(?:\{,\}|\{\\,\}|\\thinspace\s|,\\![ ]|,?\\[,!;: ]|[ '_~\u00a0\u2007\u2009\u202f])"
_GROUPS_OF_DIGITS = re.compile(
    rf"(?<![\w.,/^'])[1-9][0-9]{{0,2}}({_GROUP_MARK})[0-9]{{3}}(?:\1[0-9]{{3}})*(?!\1?[0-9]|['_/])"
)
"""1'234'567, 1_234_567, 1{,}234{,}567, 1 234 567: groups of three digits,
all separated by the same mark."""
_OVER = re.compile(
    r"\{([^{}\\]*)\\over(?![A-Za-z])([^{}\\]*)\}|(-?\w+)\s*\\over(?![A-Za-z])\s*(\w+)"
)
_FRACTION = re.compile(r"\\(?:nicefrac|sfrac|flatfrac|xfrac)(?![A-Za-z])")
_FRACTION_OF_UNITS = re.compile(
    r"\\[dt]?frac\s*\{\s*([A-Za-z]+)\s*\}\s*\{\s*([A-Za-z]+\s*(?:\^[23])?)\s*\}"
)
_SPACE = re.compile(r"\\(?:[,;:! ]|q?quad(?![A-Za-z])|$)|(?<=[\w}])~|\s")
_DEGREES = re.compile(
    r"\s*\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\s*\\degree(?![A-Za-z])|\s*°"
)
_POWER_OF_UNIT = re.compile(r"(?<=[A-Za-z ])\^\{([23])\}")
_PER_UNIT = re.compile(r"(?<![A-Za-z\\])([A-Za-z]+)\s*\^\{-(?:1|([23]))\}")
_THEREFORE = re.compile(
    r"^(?:\#+\s|=>|->|[→⇒⟹➡∴]"
    r"|\\(?:therefore|Rightarrow|Longrightarrow|rightarrow|implies|to)(?![A-Za-z]))\s*"
)
LABEL = re.compile(
    r"\A(?:(?:option|choice|answer):?\s+)?[(\[]?(?:(?<=[(\[])|(?=.[).:]))([A-Ja-j])[)\].:]"
    r"(?:\s|~|\\[,;: ]|\\q?quad(?![A-Za-z]))+(?=[^\s+*/^=,<>\\-]|\\[A-Za-z($]|-[\d.\\$])"
)
"""The letter of a choice, before its content: "(B) 10"."""
_ASCII = str.maketrans(
    {
        "−": "-", "–": "-", "＋": "+", "⁄": "/", "’": "'", "“": '"', "”": '"', "。": ".", "，": ",",
        "：": ":", "；": ";", "！": "!", "？": "?", "（": "(", "）": ")", "％": "%", "＝": "=",
        "℃": "°C", "℉": "°F",
    }
)  # fmt: skip


def without_tags(response: str) -> str:
    """The response without thoughts, tags, end-of-text tokens, pictures and what is struck out; but
    with `<answer>`."""
    text = _STRUCK.sub(" ", _without_thoughts(html.unescape(response)))
    text = _LINE_TAG.sub("\n", _TAG.sub(" ", text))
    return _PICTURE.sub(" ", _DISPLAYED.sub(r"\1\2\3", text))


def _without_thoughts(response: str) -> str:
    """A thought that does not end takes the rest with it;
    one whose beginning is missing takes all before its end."""
    *thoughts, last = _THOUGHT_ENDS.split(response)
    spoken: list[str] = []
    for thought in thoughts:
        before, *rest = _THOUGHT_BEGINS.split(thought, maxsplit=1)
        if not rest:
            spoken.clear()
        else:
            spoken.append(before)
    return " ".join([*spoken, _THOUGHT_BEGINS.split(last, maxsplit=1)[0]])


def is_clean(text: str) -> bool:
    """Whether it is short enough, and free of invisible characters and of those that reverse the
    text."""
    return len(text) <= MAX_CHARS and not any(
        unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs", "Cn")
        and character not in "\n\t"
        for character in text
    )


def plain(text: str) -> str:
    """The text without Markdown, styles, quotation marks, marks between groups of digits, and what
    closes it (its final full stop, "QED"); digits and punctuation of other scripts become those of
    ASCII."""
    text = _without_commands(_ascii(text).strip(), _STYLES)
    text = _GROUPS_OF_DIGITS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    text = _OVER.sub(
        lambda match: rf"\frac{{{match[1] or match[3]}}}{{{match[2] or match[4]}}}", text
    )
    text = _unclosed(_FRACTION.sub(r"\\frac", text))
    if text.count("**") == 1:
        text = text.removeprefix("**").removesuffix("**").strip()
    for _ in range(3):
        text = _UNDERLINE.sub(r"\2", _EMPHASIS.sub(r"\2", text)).strip()
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
            text = text[1:-1].strip()
    return _unclosed(text)


def readable(text: str) -> str:
    """The plain text with LaTeX's words as words, spacing as spaces and no maths delimiters; `$`
    remains for money."""
    text = _without_commands(_DEGREES.sub(" degrees ", plain(text)), _WRAPPERS)
    text = text.replace("\\$", "\x01").replace("\\%", "%").replace("per cent", "percent")
    if text.count("$") % 2 == 0:
        text = text.replace("$", " ")
    text = _PER_UNIT.sub(
        lambda match: f"/{match[1]}^{match[2]} " if match[2] else f"/{match[1]} ", text
    )
    text = _FRACTION_OF_UNITS.sub(r" \1/\2", _POWER_OF_UNIT.sub(r"^\1 ", text))
    text = re.sub(r"\\[()\[\]]", " ", text).replace("\x01", "$")
    text = _SPACE.sub(" ", IDEOGRAPHS.sub(r" \g<0> ", text))
    return plain(_without_group(_THEREFORE.sub("", text.strip())))


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    return "".join(
        str(unicodedata.decimal(character)) if character.isdecimal() else character
        for character in text.translate(_ASCII)
    )


def _unclosed(text: str) -> str:
    return re.sub(r"(?<=[^\s.])\s?\.$", "", _CLOSING.sub("", text)).strip()


def closing_brace(text: str, opened: int) -> int | None:
    """The position of the brace that closes the one at `opened`,
    if it is near enough to belong to an answer."""
    depth = 0
    for position in range(opened, min(len(text), opened + MAX_CHARS + 2)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return None


def _without_commands(text: str, arguments: Mapping[str, int]) -> str:
    """Replace these commands by their content, set off by spaces;
    `arguments` of each before that are removed."""
    for command in reversed([*_COMMAND.finditer(text)]):
        if command[1] not in arguments:
            continue
        rest = text[command.end() :]
        for _ in range(arguments[command[1]]):
            rest = _argument(rest)[1]
        content, rest = _argument(rest)
        text = f"{text[: command.start()]} {content} {rest}"
    return text


def _argument(text: str) -> tuple[str, str]:
    """The content of the braces that the text begins with, if any, and the text after them."""
    match = _ARGUMENT.match(text)
    end = closing_brace(text, match.end()) if match else None
    return (text[match.end() + 1 : end], text[end + 1 :]) if match and end else ("", text)


def _without_group(text: str) -> str:
    """The text without braces around the whole of it."""
    while text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    return text
