"""Units of answers: whether two of them are the same one, however they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .languages import words
from .words import BEING, CLOSING

_METRIC = {
    "m": "meter", "g": "gram", "s": "second", "l": "liter", "L": "liter", "Hz": "hertz",
    "Pa": "pascal", "Wh": "watt hour", "cal": "calorie", "W": "watt", "V": "volt", "N": "newton",
    "J": "joule", "B": "byte", "mol": "mole",
}  # fmt: skip
_PREFIXES = {
    "k": "kilo", "c": "centi", "m": "milli", "d": "deci", "µ": "micro", "μ": "micro", "n": "nano",
    "M": "mega", "G": "giga", "T": "tera",
}  # fmt: skip
_OTHERS = {
    "sq": "square", "cu": "cubic", "ft": "foot", "in": "inch", "yd": "yard", "mi": "mile",
    "lb": "pound", "lbs": "pound", "oz": "ounce", "gal": "gallon", "sec": "second",
    "secs": "second", "min": "minute", "mins": "minute", "h": "hour", "hr": "hour", "hrs": "hour",
    "mo": "month", "mos": "month", "yr": "year", "yrs": "year", "deg": "degree", "rad": "radian",
    "ha": "hectare", "kilos": "kilogram", "mph": "mile per hour", "kph": "kilometer per hour",
    "kmh": "kilometer per hour", "rpm": "revolution per minute",
}  # fmt: skip
_METRIC_NAMES = _METRIC | {
    short_prefix + short: prefix + name
    for short_prefix, prefix in _PREFIXES.items()
    for short, name in _METRIC.items()
}
"""By their exact case: mW and MW are different units."""
_TEMPERATURES = {"C": "celsius", "F": "fahrenheit"}
_CURRENCY_CODES = {
    "usd": "dollar", "eur": "euro", "gbp": "pound", "buck": "dollar", "bucks": "dollar",
}  # fmt: skip
_CURRENCIES = words("dollar euro pound cent rupee yen yuan peso franc")
_MEASURES = _CURRENCIES | {
    word for name in (_METRIC_NAMES | _OTHERS).values() for word in name.split()
} - words("per square cubic")
_IRREGULAR = {
    "feet": "foot", "inches": "inch", "men": "man", "women": "woman", "children": "child",
    "people": "person", "mice": "mouse", "geese": "goose", "teeth": "tooth",
}  # fmt: skip
_POWERS = {"square": "2", "cubic": "3"}
PER = words("/ per a an")
_REMARKS = (CLOSING | BEING | words(
    """
    on at by with from into out left remaining old long tall wide high deep thick away apart apiece
    each altogether later ago earlier today together combined them there
    """
)) - words("per a an day week month year question problem solution result")  # fmt: skip
"""Words that are not part of a unit: they come before it, or after it begins what else is said."""


def units_agree(expected: Sequence[str], words_after: Sequence[str]) -> bool:
    """Whether the words after a number name the expected unit. Both may go on after the unit, as
    in "5 apples fell"; a part of a unit is another one, as meters are of meters per second.

    A rate of money matters where both name one: "$5" may answer "$5 per hour".
    """
    shorter, longer = sorted((_unit(expected), _unit(words_after)), key=len)
    if not all(map(_is_same_word, shorter, longer)):
        return False
    if not shorter or len(shorter) == len(longer):
        return True
    last, same, following = shorter[-1], longer[len(shorter) - 1], longer[len(shorter)]
    if following == "per":
        return last in _CURRENCIES
    if following.isdigit() or following in _MEASURES:
        return False
    # "apples fell", but not "apple pies"
    return last in _MEASURES or (last == same and _is_plural(last))


def _unit(words_after: Sequence[str]) -> list[str]:
    """The words of the unit, each measure by its name in the singular."""
    unit: list[str] = []
    power = ""
    for word in _named(words_after):
        if word in _REMARKS:
            if unit:
                break
        elif word in _POWERS:
            power = _POWERS[word]
        else:
            unit += [word, power] if power else [word]
            power = ""
    return unit


def _named(words_after: Sequence[str]) -> Iterator[str]:
    """The words, with the names of what is abbreviated."""
    for index, word in enumerate(words_after):
        is_last = index + 1 == len(words_after) or words_after[index + 1] in ("/", "per", "2", "3")
        if word == "in" and not is_last:
            yield "of"  # a remark: "in total"
        else:
            yield from _name(word).split()


def _name(word: str) -> str:
    if word in PER:
        return "per"
    if word in _METRIC_NAMES or word in _TEMPERATURES:
        return _METRIC_NAMES.get(word) or _TEMPERATURES[word]
    lower = word.lower().replace("metre", "meter").replace("litre", "liter")
    if "-" in lower:
        return " ".join(map(_name, lower.split("-")))
    name = _OTHERS.get(lower) or _CURRENCY_CODES.get(lower) or lower
    singular = _IRREGULAR.get(name, name.removesuffix("s"))
    return singular if singular in _MEASURES else name


def _is_same_word(first: str, second: str) -> bool:
    """Whether they are equal up to the plural."""
    return first == second or _is_plural_of(first, second) or _is_plural_of(second, first)


def _is_plural_of(plural: str, singular: str) -> bool:
    regular = {f"{singular}s", f"{singular}es"}
    if singular.endswith("y"):
        regular.add(f"{singular[:-1]}ies")
    if singular.endswith(("f", "fe")):
        regular.add(f"{singular.removesuffix('e')[:-1]}ves")
    return plural in regular or _IRREGULAR.get(plural) == singular


def _is_plural(word: str) -> bool:
    return word in _IRREGULAR or (word.endswith("s") and not word.endswith("ss"))
