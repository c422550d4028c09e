"""Answers that are mathematical expressions, and bounds on them.

Comparing expressions may take forever (`9^{9^9}`). Bounds on what is written, not a time limit,
decide beforehand what may be compared: a verdict must not depend on how busy a machine is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .bounds import as_interval, is_interval, upwards
from .languages import words
from .markup import is_clean, plain
from .words import GREEK, is_plain_word, qualifies

MAX_TOKENS = 120
MAX_DEPTH = 10
MAX_DIGITS = 20
MAX_EXPONENT = 3000
"""For a numeric base; MAX_DEGREE in expressions with functions, whose arguments may be factored."""
MAX_DEGREE = 100
"""Bound on the sum of the exponents of variables."""
MAX_GROUP_EXPONENT = 20
"""Bound on the product of the exponents of sums, functions and the like,
which may be multiplied out."""
MAX_EXPANSION = 400
"""Bound on that product times the number of tokens in the whole expression."""
MAX_FUNCTIONS = 10
MAX_UNIONS = 6
"""Unions and intersections; MAX_UNIONS_OF_VARIABLES where the bounds of intervals could be in any
order."""
MAX_UNIONS_OF_VARIABLES = 2
MAX_ARGUMENT = 50
"""Argument of a factorial or a binomial."""
MAX_CELLS = 25

_FUNCTIONS = words("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp sqrt")
_COMMANDS = (
    _FUNCTIONS
    | GREEK
    | words(
        """
    frac dfrac tfrac cfrac binom dbinom tbinom pi cdot times div pm mp infty cup cap setminus
    emptyset in notin le leq ge geq ne neq lt gt lfloor rfloor lceil rceil lvert rvert
    vert mid mathbb begin end
    """
    )
)
"""Commands allowed in an expression. Sums, integrals and limits are not:
their form does not show their cost."""
_FACTORIAL = re.compile(r"(?:(?P<number>[0-9.]+)|(?P<other>\S))\s*!(?P<again>\s*!)?")
_BINOMIAL = re.compile(r"\\[dt]?binom")
_TERM = r"\s*(?:[0-9]+\s*[A-Za-z]?|[A-Za-z])\s*"
_SUM = re.compile(rf"\{{{_TERM}(?:[+-]{_TERM})*\}}|[A-Za-z0-9]")
"""Argument of a binomial: a sum such as {2n+1}, or one letter or digit."""
_AS_LATEX = {
    "π": r"\pi ",
    "√": r"\sqrt",
    "∞": r"\infty ",
    "∅": r"\emptyset ",
    r"\varnothing": r"\emptyset ",
    "≤": r"\le ",
    "⩽": r"\le ",
    r"\leqslant": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    r"\geqslant": r"\ge ",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    "≠": r"\ne ",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": r"\div ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "±": r"\pm ",
    "θ": r"\theta ",
    "²": "^2",
    "³": "^3",
}
_TOKEN = re.compile(
    r"\\(?P<command>[A-Za-z]+)|\\[{}\\|,;:! "
    r"]|(?P<number>[0-9]+(?:\.[0-9]*)?)|(?P<letter>[A-Za-z])|(?P<sign>\S)"
)
_SIGNS = frozenset("+-*/^_=<>()[]{}|,.;:!&")
_MATRIX = re.compile(r"\\(?:begin|end)\{[pbvB]?matrix\}")
_NAME = re.compile(
    r"^\s*(?:(?:[A-Za-z]|\\[a-z]+)(?:_\w|_\{\w+\}|\([A-Za-z]\))?"
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\))"
    r"\s*(?:=(?!=)|\\in(?![a-z]))"
)
_INDEX = re.compile(r"\s|_\w|_\{\w+\}")
"""What the names of two values of a variable may differ in."""
_TOWER = re.compile(r"\^\s*[-+]?(?:[0-9.]+|[A-Za-z]|\\[A-Za-z]+)\s*\^")
_OTHER_BASE = re.compile(r"[0-9]\s*_")
"""A number in another base: math-verify would ignore the base, so it is compared as text."""
_SHORT_POWER = re.compile(r"-?[0-9.]+|\\[A-Za-z]+|.?", re.DOTALL)
_UNIT = re.compile(
    r"(?:\\[,;: ]|\s|~)*\\(?:text|mathrm|mbox|textrm|textup)\{(?P<unit>[^{}]*)\}"
    r"(?:\s*\^\{?(?P<power>[23])\}?)?\.?$"
)
_SPAN = re.compile(r"^([^$\\]*)(?:\$([^$]+)\$|\\\((.+?)\\\))([^$\\]*)$")
_PROSE = re.compile(r"[A-Za-z',:=\s-]*")
_DELIMITERS = re.compile(r"^\s*(?:\$\$?|\\[(\[])|(?:\$\$?|\\[)\]])\s*$")
_SPACING = re.compile(
    r"\\(?:left|right|displaystyle|big|Big|bigl|bigr)(?![A-Za-z])|(?<!\\)\\[!,;: "
    r"]|\\q?quad(?![A-Za-z])|~"
)
_AND = re.compile(
    r"(?:,\s*)?(?:\\(?:text|mathrm)\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))"
)
"""Joins the parts of a list. "1 or 2" is the list of both, and so is not 1."""
_NAMED_NUMERATOR = re.compile(
    r"(\\[dtc]?frac)\s*(\\(?:pi|" + "|".join(sorted(GREEK)) + r"))(?![A-Za-z])"
)
"""\\frac\\pi4, which math-verify's parser cannot read."""
_WITHOUT_BACKSLASH = re.compile(
    r"(?<![A-Za-z\\])(pi|infty|" + "|".join(sorted(_FUNCTIONS)) + r")(?![A-Za-z])"
)


@dataclass(frozen=True)
class Expression:
    """LaTeX that is small enough to be compared."""

    latex: str
    letters: frozenset[str]
    """Variables, and what could be one: letters and Greek letters."""
    unit: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Equal for texts that differ only in spaces and sizes."""
        return re.sub(r"\s+", "", re.sub(r"\\[dtc]frac", r"\\frac", self.latex))

    @property
    def is_relation(self) -> bool:
        return re.search(r"[=<>]|\\(?:l[et]q?|g[et]q?|neq?|in)(?![a-z])", self.latex) is not None

    @property
    def is_interval(self) -> bool:
        return is_interval(self.latex)

    def as_interval(self) -> Expression:
        """The bounds of a variable as an interval; others as they are."""
        interval = read_expression(as_interval(self.latex))
        return replace(interval, unit=self.unit) if interval else self

    def unnamed(self) -> Expression:
        """The expression without a leading "x =" or "x \\in", of a list in each of its parts."""
        bare = read_expression(_without_name(self.latex)) if _NAME.match(self.latex) else None
        return replace(bare, unit=self.unit) if bare else self


def read_expression(text: str) -> Expression | None:
    """Read the whole text as one expression; None if it is not one or if comparing it might take
    too long."""
    if not is_clean(text):
        return None
    latex, unit = _without_unit(_math_of(plain(text)))
    if latex is None or not latex.strip() or _OTHER_BASE.search(latex):
        return None
    names = _letters(_MATRIX.sub(" ", latex))
    if names is None or not _is_small(latex, has_variables=bool(names)):
        return None
    return Expression(latex.strip(), names, unit)


def _without_name(latex: str) -> str:
    """`x = 1, x = 2` as `1, 2`, and `x_1 = 1, x_2 = 2` too: of a list, all parts that have the
    name of the first."""
    equations = _parts(latex)
    name = _name_of(equations[0])
    for number, equation in enumerate(equations):
        if name and _name_of(equation) == name:
            equations[number] = _NAME.sub("", equation)
    return ",".join(equations)


def _name_of(equation: str) -> str:
    """What it names on the left, without an index; empty if that is nothing."""
    match = _NAME.match(equation)
    return _INDEX.sub("", match[0]) if match else ""


def _parts(latex: str) -> list[str]:
    """The parts of a list: what is between commas that are not in brackets."""
    parts, depth = [""], 0
    for character in latex:
        depth += (character in "{([") - (character in "})]")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _math_of(text: str) -> str:
    """The formula in a sentence that adds nothing to it; otherwise the text without delimiters."""
    span = _SPAN.match(text)
    if span and _is_plain_prose(span[1]) and _is_plain_prose(span[4].rstrip(".")):
        text = span[2] or span[3]
    text = _AND.sub(",", _SPACING.sub(" ", _DELIMITERS.sub("", text)))
    for sign, latex in _AS_LATEX.items():
        text = text.replace(sign, latex)
    text = text.replace("**", "^").replace("*", r" \cdot ").strip()
    text = _NAMED_NUMERATOR.sub(r"\1{\2}", text)
    return upwards(_WITHOUT_BACKSLASH.sub(r"\\\1", text).rstrip("."))


def _is_plain_prose(text: str) -> bool:
    """Whether it is words only, none of which hedges, denies or computes."""
    return _PROSE.fullmatch(text) is not None and not any(
        qualifies(word) for word in re.findall(r"[\w'-]+", text)
    )


def _without_unit(latex: str) -> tuple[str | None, tuple[str, ...]]:
    match = _UNIT.search(latex)
    if match is None:
        return latex, ()
    unit = match["unit"].split()
    if any(qualifies(word) or not is_plain_word(word, glued=False) for word in unit):
        return None, ()
    return latex[: match.start()], (*unit, *(match["power"] or ""))


def _letters(latex: str) -> frozenset[str] | None:
    """The variables, or None if it contains anything but mathematics."""
    letters: set[str] = set()
    for index, token in enumerate(_TOKEN.finditer(latex)):
        command, letter, sign = token["command"], token["letter"], token["sign"]
        if index >= MAX_TOKENS or (sign and sign not in _SIGNS):
            return None
        if command:
            if command not in _COMMANDS:
                return None
            if command in GREEK:
                letters.add(command)
        if letter:
            letters.add(letter)
        if token["number"] and len(token["number"]) > MAX_DIGITS:
            return None
    return frozenset(letters)


def _is_small(latex: str, has_variables: bool) -> bool:
    """Whether its depth, powers, functions, factorials, unions and matrices are within bounds."""
    commands = re.findall(r"\\([a-z]+)", latex)
    unions = commands.count("cup") + commands.count("cap")
    return (
        _depth(latex) <= MAX_DEPTH
        and latex.count("&") + latex.count("\\\\") < MAX_CELLS
        and sum(name in _FUNCTIONS for name in commands) <= MAX_FUNCTIONS
        and unions <= (MAX_UNIONS_OF_VARIABLES if has_variables else MAX_UNIONS)
        and _has_small_powers(
            latex, max_exponent=MAX_EXPONENT if _FUNCTIONS.isdisjoint(commands) else MAX_DEGREE
        )
        and all(_is_of_a_small_number(match) for match in _FACTORIAL.finditer(latex))
        and all(_has_small_arguments(latex[match.end() :]) for match in _BINOMIAL.finditer(latex))
    )


def _depth(latex: str) -> int:
    depth = deepest = 0
    for character in latex:
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return deepest


def _has_small_powers(latex: str, max_exponent: int) -> bool:
    """No power towers (but e^{x^2} is fine), and no large exponents."""
    if _TOWER.search(latex) or latex.count("\\exp") > 1:
        return False
    of_groups, degree = 1.0, 0.0
    for power in re.finditer(r"(?P<base>(?:(?<![A-Za-z\\])[A-Za-z]|[0-9])?)\s*\^\s*", latex):
        rest = latex[power.end() :]
        if rest[:1] in ("{", "("):
            exponent = rest[: _end_of_group(rest)]
        else:
            short = _SHORT_POWER.match(rest)
            assert short is not None  # it matches the empty text too
            exponent = short[0]
        if re.search(r"[0-9)}\]]\s*\^|!|binom|exp", exponent) or exponent.count("^") > 1:
            return False
        largest = max(
            (float(number) for number in re.findall(r"[0-9]+(?:\.[0-9]+)?", exponent)), default=1.0
        )
        if power["base"].isdigit():
            if largest > max_exponent:
                return False
        elif power["base"]:
            degree += largest
        else:
            of_groups *= max(largest, 1.0)
    expansion = of_groups * len(_TOKEN.findall(latex)) if of_groups > 2 else 0
    return degree <= MAX_DEGREE and of_groups <= MAX_GROUP_EXPONENT and expansion <= MAX_EXPANSION


def _end_of_group(text: str) -> int:
    depth = 0
    for index, character in enumerate(text):
        depth += {"{": 1, "(": 1, "}": -1, ")": -1}.get(character, 0)
        if depth == 0:
            return index + 1
    return len(text)


def _is_of_a_small_number(factorial: re.Match[str]) -> bool:
    if factorial["again"]:
        return False
    if factorial["number"] is not None:
        return factorial["number"].isdigit() and int(factorial["number"]) <= MAX_ARGUMENT
    return factorial["other"].isalpha()  # n!, but not (…)! or 3!!


def _has_small_arguments(rest: str) -> bool:
    """Whether the binomial before `rest` has no powers or products of numbers,
    which may be of any size."""
    for _ in range(2):
        argument = _SUM.match(rest := rest.lstrip())
        if argument is None or any(
            int(number) > MAX_ARGUMENT for number in re.findall(r"[0-9]+", argument[0])
        ):
            return False
        rest = rest[argument.end() :]
    return True
