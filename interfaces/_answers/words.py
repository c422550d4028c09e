"""Words that change the meaning of an answer: closed classes of English, and numbers in words."""

from __future__ import annotations

import re

from .languages import announces, denies_elsewhere, is_elsewhere, words

GREEK = words(
    """
    alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi
    varphi chi psi omega Delta Gamma Lambda Omega Phi Sigma Theta
    """
)
"""Commands that write a letter."""

HEDGES = words(
    """
    maybe perhaps possibly probably presumably supposedly likely unlikely might could approximately
    approx roughly nearly almost circa guess guesses guessing suppose think believe assume assuming
    estimate estimated unsure uncertain unclear unknown something somewhere anything whatever if
    unless depends depending either or versus vs instead but close closest nearest ish seems
    apparently perchance conceivably potentially plausibly hopefully doubt doubts doubtful
    doubtfully dubious questionable debatable arguably allegedly reportedly any example instance sic
    far etc should looks sounds feels appears theory principle glance tentatively provisionally
    temporarily
    """
)
"""An answer that contains one of these commits to nothing."""

SAYINGS = words(
    """
    expect expected say says said tell tells claim claims claimed thinks thought believes believed
    supposes supposed assumes assumed suspect suspects suspected imagine imagines imagined pretend
    pretends pretended expects reckon reckons argue argues argued allege alleges insist insists hope
    wish bet swear swears suggest suggests suggested speculate joke joking kidding lie lied rumour
    rumor rumours rumors opinion dream dreams fool fools liar idiot naive naively mistakenly wrongly
    falsely incorrectly hypothetically according
    """
)
"""An answer next to one of these is somebody's opinion, and perhaps nobody's answer."""

NEGATIONS = words(
    """
    not no never none nor neither cannot cant dont isnt wont except excluding without wrong
    incorrect false nothing impossible unlike nobody nowhere hardly scarcely barely rarely seldom
    untrue mistaken mistake error erroneous invalid nonsense refuse refuses deny denies denied
    contradiction disproved refuted opposite nope bogus
    """
)

OPERATIONS = words(
    """
    plus minus negative times divided multiplied subtracted squared cubed root factorial mod modulo
    power fold binary octal hexadecimal log ln sin cos tan exp sqrt reciprocal inverse twice thrice
    double triple quadruple half halves halved doubled tripled dozen dozens bn mn mil k lakh lakhs
    crore crores gross grand kilo mega giga permille ppm
    """
)
"""Words that turn the number before or after them into another one."""

CODE = words(
    """
    lambda print echo eval exec assert def del import raise yield await return null undefined select
    let var const true class elif while
    """
)
"""What contains them is a program, not an answer."""

COUNTED = frozenset({"times"})
"""Operations that can also be counted: "5 times". A second operand would be a second number or a
variable."""

MEASURES = words(
    "as more less fewer larger greater bigger smaller longer shorter higher lower the that what"
)
"""After "times": the number compares something else with the answer."""

BOUNDS = words(
    """
    about around over under above below beyond than least most exceeding near nearing up within
    max min maximum minimum limit after before past until till between among besides against
    following preceding succeeding some page chapter equation
    """
)
"""Right before a number: the value is a different one, or unknown."""

SUPERLATIVES = words("least most best worst")
"""After a number, as in "5 at most": it is a bound."""

CEILINGS = words(
    "max maximum minimum tops and to up by then too odd below above under "
    "beneath short away off past"
)
"""Right after a number: it is a bound, or only a part of what is stated."""

TAKES_A_PART = words(
    """
    third quarter fourth fifth sixth seventh eighth ninth tenth multiple factor square cube
    successor predecessor power divisor part fraction percentage percent one some complement tens
    hundreds thousands millions billions
    """
)
"""Before "of": a fraction or a multiple of the number, or one of several."""

BEING = words("is are was were be does did do would should isn't aren't wasn't")
"""After a value they begin a statement about it; before everything else, a question."""

COMMENTS = words(
    """
    i i'm i'd me you your yours somebody someone everybody everyone anybody anyone whoever what
    whatever why how where whether because since although though whereas while except
    """
)
"""After a value they begin another sentence, which need not confirm it."""

CLOSING = words(
    """
    the a an this that which is are as in all it final correct right exact answer result solution
    total required requested desired needed asked wanted claimed indeed altogether respectively of
    course certainly done therefore my our thanks thank solved verified simplified together overall
    to for question problem per day week month year
    """
)
"""Words of a remark that only confirms a value."""

FILLERS = words(
    """
    simply therefore thus hence so just exactly precisely clearly obviously definitely certainly
    indeed plainly evidently merely only equal equals to given by found now also then of course the
    a number value total integer fraction amount option choice letter is equivalent minus negative
    usd eur gbp rs inr
    """
)
"""Words between "answer is" and the answer."""

OF_THE_ANSWER = words(
    "final correct right exact complete full simplified numerical numeric required desired "
    "requested overall total"
)
"""Adjectives of "answer" that leave it an answer."""

DETERMINERS = words(
    """
    the my our this an a so thus hence therefore then and finally is get gives that we now final as
    """
)
"""Words before "answer" and its adjectives."""

ABBREVIATED = words("Rs sq cu ft yd mi oz lb lbs hr hrs min mins sec secs deg in")

_UNDER_TWENTY = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen
""".split()  # noqa: SIM905
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
SMALL_NUMBERS = {word: value for value, word in enumerate(_UNDER_TWENTY)} | {
    word: 20 + 10 * n for n, word in enumerate(TENS)
}
NUMBERS = frozenset(SMALL_NUMBERS) | frozenset(SCALES)
FRACTIONS = {
    "half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7,
    "eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12, "sixteenth": 16,
    "twentieth": 20, "hundredth": 100, "thousandth": 1000,
}  # fmt: skip
_PARTS = re.compile(
    r"(?:thirds|fifths|eighths|ninths|twelfths|(?:" + "|".join(sorted(NUMBERS)) + r")ths?)"
)

_SHORT_UNIT = re.compile(
    r"[kcmdµμnMGT]?(?:m|g|s|l|L|Hz|Pa|Wh|cal|W|V|N|J|B|mol)|[hCF]|sq|cu|hrs?|yrs?|mins?|secs?"
    "|ft|in|yd|mi|lbs?|oz|mph|kph|kmh|rpm|am|pm|AM|PM|st|nd|rd|th"
)
_QUALIFYING = (HEDGES | SAYINGS | NEGATIONS | OPERATIONS | CODE) - COUNTED
_RETRACTING = (HEDGES | SAYINGS | NEGATIONS) - {"but", "instead"}


def qualifies(word: str) -> bool:
    """Whether the word retracts, weakens or changes a number anywhere near it. "May" is a month."""
    lower = word.lower()
    parts = {lower, *lower.split("-")}
    return retracts(word) or bool(parts & _QUALIFYING) or _PARTS.fullmatch(lower) is not None


def retracts(word: str) -> bool:
    """Whether a sentence with this word may deny or weaken what it leads up to."""
    lower = word.lower().replace("’", "'")
    return lower in _RETRACTING or lower.endswith("n't") or word == "may" or denies_elsewhere(lower)


def is_plain_word(word: str, glued: bool) -> bool:
    """Whether the word after a number can be a unit or part of a sentence,
    and not a variable or a multiplier.

    `glued`: no space before it, as in "5km" and "5x".
    """
    if _SHORT_UNIT.fullmatch(word):
        return True
    if is_elsewhere([word]):
        return announces(word)
    if not re.sub("['-]", "", word).isalpha():
        return False
    if glued:
        return len(word) >= 4 and word.islower() and _has_vowel(word)
    return word in ("a", "I") or (
        len(word) >= 2 and (_has_vowel(word) or not word.isascii()) and len(word) < 30
    )


def _has_vowel(word: str) -> bool:
    return any(letter in "aeiouyAEIOUY" for letter in word)
