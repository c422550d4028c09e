"""Final answers: found, read as one value or an expression, and judged without symbolic maths."""

import unicodedata
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlcli.interfaces._answers.bounds import as_interval
from rlcli.interfaces._answers.expression import read_expression
from rlcli.interfaces._answers.number import number_in_words
from rlcli.interfaces._answers.value import read_value
from rlcli.interfaces._answers.verdict import (
    Comparison,
    Verdict,
    answer_key,
    final_answer,
    gold_of,
    judge,
)
from rlcli.interfaces._answers.words import HEDGES, NEGATIONS, OPERATIONS

GSM8K_GOLDS = (
    "72",
    "10",
    "5",
    "1,450",
    "-3",
    "0",
    "2,125",
    "5600",
    "0.5",
    "18.50",
    "1,000,000",
    "07",
)
"""Golds of each kind that GSM8K has."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### 6\nno, wait\n#### 7 \nthe end", "7"),
        ("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("first \\boxed{1}, then \\boxed{{2}+3}", "{2}+3"),
        ("\\boxed{unfinished", None),
        ("\\boxed 5", "5"),
        ("\\boxed5", "5"),
        ("\\fbox{5}.", "5"),
        ("\\boxed{3} or \\boxed{5}", "3, 5"),
        ("\\boxed{1}, \\boxed{2} and \\boxed{3}", "1, 2, 3"),
        ("\\boxed{5}, that is \\boxed{5}", "5"),
        ("it is not \\boxed{5}", None),
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no: <ANSWER>#### 5</ANSWER>", "5"),
        ("<answer> \\boxed{5} apples </answer>", "5"),
        ("The answer is 3.5. Good.", "3.5."),
        ("Final answer: 12\nmore", "12"),
        ("**Answer:** 12", "12"),
        ("Answer:\n12", "12"),
        ("an answer is 1, but the answer is 2!", "2"),
        ("The answer is not 5.", None),
        ("The answer isn't 5.", None),
        ("I don't think the answer is 5.", None),
        ("The answer is 5. Or maybe 6.", None),
        ("My answers are 5 and 6", None),
        ("\\boxed{1} #### 2", "2"),
        ("7 8 9", None),
        ("####", None),
        ("", None),
        ("#### " + "1" * 501, None),
    ],
)
def test_the_final_answer_is_found(text, expected):
    assert final_answer(text) == expected


def test_the_last_number_is_used_only_on_request_and_as_a_fallback():
    assert final_answer("we get 1,200 then -3/4 left", last_number=True) == "-3/4"
    assert final_answer("not 3 but 1,200.5 apples", last_number=True) == "1,200.5"
    assert final_answer("1,200.5 apples", last_number=True) == "1,200.5 apples"  # one value, whole
    assert final_answer("#### 5\nsee page 9", last_number=True) == "5"
    assert final_answer("nothing", last_number=True) is None


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("Ann has 3 + 4 = <<3+4=7>>7 apples.\n#### 7", "7", 7),
        (" 42 ", "42", 42),
        ("thus \\boxed{x+1}", "x+1", None),
        ("May 5", "May 5", None),
        ("\\text{Monday}", "\\text{Monday}", None),
    ],
)
def test_the_gold_answer_is_read_from_a_row(answer, text, value):
    gold = gold_of(answer)
    assert gold.text == text
    assert (gold.value.number if gold.value else None) == value


@pytest.mark.parametrize("gold", GSM8K_GOLDS)
@pytest.mark.parametrize(
    "form",
    ["#### {}", "\\boxed{{{}}}", "The answer is {}.", "<answer>${}</answer>", "#### {} apples"],
)
def test_golds_of_gsm8k_are_accepted(form, gold):
    assert (
        judge(final_answer(form.format(gold)), gold_of(f"3 + 4 = <<3+4=7>>7\n#### {gold}"))
        is Verdict.RIGHT
    )


@pytest.mark.parametrize(
    ("answer", "expected", "verdict"),
    [
        ("7", "7", "right"),
        ("$7$", "7", "right"),
        ("$1,234.50", "1234.5", "right"),
        ("07", "7", "right"),
        ("8", "7", "wrong"),
        ("-7", "7", "wrong"),
        ("700", "7", "wrong"),
        ("int(7)", "7", "unparsed"),
        ("apples(7)", "7", "unparsed"),
        ("cm (7)", "7", "right"),
        ("1/2", "0.5", "right"),
        ("\\frac{1}{2}", ".5", "right"),
        ("\\dfrac{1}{3}", "0.333", "wrong"),
        ("50\\%", "50", "right"),
        ("50%", "0.5", "right"),
        ("0.5", "50%", "right"),
        ("0.5", "50", "wrong"),
        ("5000%", "50%", "wrong"),
        ("\\therefore 5", "5", "right"),
        ("=> $5.00 USD", "$5", "right"),
        ("$5€", "5", "unparsed"),
        ("5 tens", "5", "unparsed"),
        ("5 at most", "5", "unparsed"),
        ("50%", "5000%", "wrong"),
        ("1/0", "1", "unparsed"),
        ("10/2", "5", "unparsed"),
        ("2^{-1}", "\\frac{1}{2}", "unparsed"),
        ("Paris", "paris", "right"),
        ("siraP", "Paris", "wrong"),
        ("1,2", "12", "unparsed"),
        ("9" * 5000, "7", "unparsed"),
        ("5 inches", "5 \\text{ cm}", "wrong"),
        ("5 centimeters", "5 \\text{ cm}", "right"),
        ("5 cm", "5 \\text{ cm}^2", "wrong"),
        ("(B)", "\\text{(B)}", "right"),
        ("3:2", "3 : 2", "right"),
        ("y+1", "x+1", "wrong"),
        ("2 = x+1", "x+1", "wrong"),
        ("1011_{12}", "1011_12", "right"),
        ("24_6", "24_5", "wrong"),
        ("24", "24_5", "wrong"),
        ("5\\pi \\text{ inches}", "5\\pi \\text{ cm}", "wrong"),
        ("7", "", "no gold"),
        ("7", "9" * 600, "no gold"),
        (None, "7", "wrong"),
    ],
)
def test_answers_are_judged_without_symbolic_maths(answer, expected, verdict):
    assert judge(answer, gold_of(expected)) == verdict


@pytest.mark.parametrize(
    ("bounds", "interval"),
    [
        ("1 \\le x < 2", "[1,2)"),
        ("1 < x \\le 2", "(1,2]"),
        ("2 > x \\ge 1", "[1,2)"),
        ("x \\ge 1", "[1,\\infty)"),
        ("1 < 3", "1 < 3"),
    ],
)
def test_bounds_of_a_variable_are_an_interval_with_the_same_ends(bounds, interval):
    assert as_interval(bounds) == interval


@pytest.mark.parametrize(
    ("vote", "others"),
    [
        ("50\\%", ["0.5", "\\frac{1}{2}", "50 percent"]),
        ("1,000", ["1000", "10^3", "1000.0", "1000 m"]),
        ("x+1", ["x + 1"]),
    ],
)
def test_votes_for_equal_answers_are_counted_together(vote, others):
    assert {answer_key(other) for other in others} == {answer_key(vote)}
    assert answer_key("50") not in {answer_key(vote), *map(answer_key, others)}


CHOICES = {
    "A. red": {
        "right": ["A", "(A)", "a.", "Option A", "\\text{A}", "A. red", "(a) Red", "red"],
        "wrong": ["B", "B. red", "blue", "A. blue", "A or B", "(A) or (B)", "A. red or B. blue"],
    },
    "\\textbf{(B) } 12 \\text{ cm}": {
        "right": ["B", "(B)", "(B) 12", "12", "B: 12 cm", "12.0 centimeters"],
        "wrong": ["C", "C. 12", "13", "(B) 13", "(B) 12 m"],
        "unparsed": ["12 or 13", "maybe B", "A, B"],
    },
    "(J) 12": {
        "right": ["J", "(j)", "option J", "12"],
        "wrong": ["F", "(I) 12"],
        "unparsed": ["K"],
    },
    "(D) \\frac{\\sqrt{3}}{2}": {
        "right": ["D", "(D) \\dfrac{\\sqrt{3}}{2}", "\\frac{\\sqrt{3}}{2}"],
        "wrong": ["A", "(E) \\frac{\\sqrt{3}}{2}"],
    },
}
"""Golds that name a choice with its content."""


@pytest.mark.parametrize("gold", CHOICES)
def test_a_choice_is_named_by_its_letter_or_its_content(gold):
    for verdict, answers in CHOICES[gold].items():
        verdicts = {answer: judge(answer, gold_of(gold)) for answer in answers}
        assert verdicts == dict.fromkeys(answers, verdict)


@pytest.mark.parametrize("gold", ["(a) 3, (b) 4", "(A) red and (B) blue", "x. y", "AB", "A"])
def test_several_labels_or_none_are_no_choice(gold):
    assert not gold_of(gold).letter
    assert judge(gold, gold_of(gold)) is Verdict.RIGHT
    assert judge("(a) 3", gold_of("(a) 3, (b) 4")) is not Verdict.RIGHT


@pytest.mark.parametrize("answer", ["\\sqrt{3}/2", "(D) \\sqrt{3}/2"])
def test_the_content_of_a_choice_is_compared_like_an_answer(answer):
    compared = Comparison("\\sqrt{3}/2", "\\frac{\\sqrt{3}}{2}")
    assert judge(answer, gold_of("(D) \\frac{\\sqrt{3}}{2}")) == compared


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        ("3:45", "3:45", "right"),
        ("03:45", "3:45", "right"),
        ("3:45 PM", "3:45", "right"),
        ("3:45", "3:45 PM", "right"),
        ("3:45 PM", "3:45\\text{ p.m.}", "right"),
        ("3:45 a.m.", "3:45 PM", "wrong"),
        ("1:15", "3:45", "wrong"),
        ("1:05", "2:10", "wrong"),
        ("1:15 PM", "3:45 PM", "wrong"),
        ("1/15", "3:45 PM", "wrong"),
        ("1/5", "2:10", Comparison("1/5", "2:10")),
        ("6:8", "3:4", Comparison("6:8", "3:4")),
        ("3/4", "3:4", Comparison("3/4", "3:4")),
        ("6:30", "1:5", Comparison("6:30", "1:5")),
        ("15:99", "5:33", Comparison("15:99", "5:33")),
    ],
)
def test_a_time_of_day_is_no_ratio(answer, gold, verdict):
    assert judge(answer, gold_of(gold)) == verdict


@pytest.mark.parametrize("answer", ["\\varnothing", "\\emptyset", "∅", "$\\varnothing$"])
@pytest.mark.parametrize("gold", ["\\emptyset", "\\varnothing"])
def test_the_empty_set_has_several_signs(answer, gold):
    assert judge(answer, gold_of(gold)) is Verdict.RIGHT
    assert judge(answer, gold_of("0")) is not Verdict.RIGHT


@pytest.mark.parametrize(
    ("answer", "gold", "compared"),
    [
        ("1+x", "x+1", ("1+x", "x+1")),
        ("y = 1+x", "x+1", ("1+x", "x+1")),
        ("x \\in (-\\infty, 6)", "(-\\infty, 5)", ("(-\\infty, 6)", "(-\\infty, 5)")),
        ("the set is $\\{2, 1\\}$", "\\{1,2\\}", ("\\{2, 1\\}", "\\{1,2\\}")),
        (
            "√3/2 \\text{ cm}",
            "\\frac{\\sqrt{3}}{2}\\text{ cm}",
            ("\\sqrt3/2", "\\frac{\\sqrt{3}}{2}"),
        ),
    ],
)
def test_answers_that_need_symbolic_maths_are_returned_as_comparisons(answer, gold, compared):
    assert judge(answer, gold_of(gold)) == Comparison(*compared)


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^9}",
        "10^{10^{10}}",
        "9^9^9",
        "9**9**9",
        "2^{99999}",
        "x^{101}",
        "(x+1)^{21}",
        "((x+1)^{9})^{9}",
        "1000000!",
        "(10!)!",
        "3!!",
        "\\binom{1000}{500}",
        "9" * 21,
        "\\sqrt{" * 11 + "2" + "}" * 11,
        "(" * 11 + "2" + ")" * 11,
        "\\binom{10^9}{5}",
        "\\binom{9}{5*9*9*9}",
        "\\binom{50 50 50}{5}",
        "\\binom{5(9)(9)(9)}{5}",
        "\\binom{9i9i9i9}{5}",
        "\\binom{" + "n+" * 30 + "n}{99999}",
        "\\binom\\pi{99999}",
        "1+" * 61 + "1",
        "x" * 121,
        "\\sin" * 11 + " x",
        "\\sum_{n=1}^{9} n",
        "\\int_0^1 x dx",
        "\\lim x",
        "2^{50!}",
        "\\begin{pmatrix}" + "1&" * 25 + "1\\end{pmatrix}",
        "x+\u202e1",
        "x+\x001",
        "x = 1 ; DROP @",
        "2^{2^{2^x}}",
    ],
)
def test_expressions_out_of_bounds_are_not_compared(answer):
    assert read_expression(answer) is None
    assert judge(answer, gold_of("\\frac{\\sqrt{3}}{2}")) is Verdict.UNPARSED


@pytest.mark.parametrize(
    "gold",
    [
        "x+1",
        "\\frac{\\sqrt{3}}{2}",
        "(-\\infty, 5)",
        "[2,5)",
        "\\{1,2\\}",
        "2^{2004}",
        "x^{100}",
        "(x+1)^{10}",
        "e^{x^2}",
        "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
        "\\binom{20}{10}",
        "\\binom52 + 100",
        "\\binom{2n + 1}{n-1}",
        "n!",
        "y = 2x + 3",
        "x \\le 3",
        "1,-2",
        "5\\pi",
        "\\log_2 3",
        "(0,1) \\cup (2,3)",
        "3 + 4i",
        "\\sqrt[3]{2}",
        "\\frac{1}{1+\\frac{1}{1+\\frac{1}{x}}}",
    ],
)
def test_usual_golds_are_within_bounds(gold):
    assert gold_of(gold).expression is not None


# -- properties of all answers ---------------------------------------------------------------------

WHOLE = st.integers(0, 10**12)
PLAIN_FORMS = (
    "{}",
    "{:,}",
    "{}.0",
    "$ {} $",
    "${:,}",
    "**{}**",
    "`{}`",
    "\\text{{{}}}",
    "x = {}",
    "({})",
    "{} apples",
    "0{}",
    "{} km/h",
    "{:,} \\text{{ cm}}^2",
    "Tom has {} left.",
    "it is {:,}.",
    "{}%",
    "+{}",
    "\\boxed{{{}}}",
)


@given(WHOLE, st.sampled_from(PLAIN_FORMS))
def test_a_number_is_read_in_every_form(number, form):
    value = read_value(form.format(number))
    assert value is not None
    assert value.number == number


@given(st.integers(1, 10**6), st.integers(2, 10**6))
def test_fractions_are_read_as_their_quotient(top, bottom):
    quotient = Fraction(top, bottom)
    for form in ("{}/{}", "\\frac{{{}}}{{{}}}", "\\dfrac{{{}}}{{{}}}", "{} / {} hours"):
        value = read_value(form.format(top, bottom))
        assert (value.number if value else None) == (quotient if quotient.denominator > 1 else None)


@given(
    WHOLE,
    WHOLE,
    st.sampled_from(
        [" ", ", ", "; ", " or ", "+", " - ", " = ", "/3/", ":", "^", " and ", "x", "!", " (", "_"]
    ),
)
def test_two_numbers_are_not_a_value(first, second, between):
    assume(between not in " _" or not 100 <= second < 1000 or first == 0)  # "1 200" is 1200
    assume(between not in (" = ", " or ") or first != second)  # the same value twice is one value
    assert read_value(f"{first}{between}{second}") is None


@given(
    WHOLE,
    st.sampled_from(sorted(HEDGES | NEGATIONS | (OPERATIONS - {"minus", "negative", "times"}))),
    st.booleans(),
)
def test_qualifying_words_before_or_after_a_number_are_refused(number, word, before):
    assert read_value(f"{word} {number}" if before else f"{number} {word}") is None


@given(WHOLE, st.sampled_from("xyznabijkKMπθ"))
def test_a_variable_is_refused(number, letter):
    assert read_value(f"{number}{letter}") is None


@given(st.integers(0, 999_999))
def test_numbers_in_words_are_read(number):
    assert number_in_words(spelled_out(number)) == number
    assert read_value(spelled_out(number)).number == number
    assert read_value(f"{spelled_out(number)} or {spelled_out(number + 1)}") is None


@given(st.text(max_size=600), st.sampled_from(["5", "x+1", "Monday", "\\frac{1}{2}", "(2,3)"]))
def test_any_text_gets_a_verdict(text, gold):
    for response in (
        f"#### {text}",
        f"\\boxed{{{text}}}",
        f"The answer is {text}.",
        f"<answer>{text}",
    ):
        verdict = judge(final_answer(response), gold_of(gold))
        assert isinstance(verdict, Comparison | Verdict)


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), min_size=1, max_size=60))
def test_every_readable_gold_is_its_own_answer(text):
    gold = gold_of(text)
    assert judge(gold.text, gold) is (Verdict.RIGHT if gold.is_readable else Verdict.NO_GOLD)


@given(st.characters(categories=["Cc", "Cf"]).filter(lambda character: character not in "\n\t"))
def test_invisible_characters_are_refused(character):
    assert unicodedata.category(character) in ("Cc", "Cf")
    assert read_value(f"5{character}") is None


ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()  # noqa: SIM905
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def spelled_out(number):
    if number >= 1000:
        rest = number % 1000
        return f"{spelled_out(number // 1000)} thousand" + (f" {spelled_out(rest)}" if rest else "")
    if number >= 100:
        rest = number % 100
        return f"{ONES[number // 100]} hundred" + (f" and {spelled_out(rest)}" if rest else "")
    if number >= 20:
        return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
    return ONES[number]
