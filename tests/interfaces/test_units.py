"""Units of answers: which ones `math_reward` takes for the unit of a row's answer."""

import pytest

from rlcli.interfaces._answers.units import units_agree
from rlcli.interfaces._answers.verdict import Comparison, Verdict, gold_of, judge

OTHERS = [
    ("10 millimeters", "10 meters"),
    ("10 meters", "10 millimeters"),
    ("10 mm", "10 m"),
    ("10 m", "10 mm"),
    ("10 mm", "10 meters"),
    ("10 mg", "10 m"),
    ("10 mg", "10 megagrams"),
    ("10 mW", "10 megawatts"),
    ("10 centimeters", "10 cents"),
    ("10 minutes", "10 miles"),
    ("10 miles", "10 m"),
    ("10 minutes", "10 mi"),
    ("10 square feet", "10 square inches"),
    ("10 cubic feet", "10 cubic inches"),
    ("10 square meters", "10 square kilometers"),
    ("10 m", "10 m^2"),
    ("10 m^2", "10 m"),
    ("60 miles per hour", "60 miles per minute"),
    ("60 miles", "60 miles per hour"),
    ("10 km/h", "10 km"),
    ("10 m", "10 m/s"),
    ("5 m s", "5 m/s"),
    ("10 watt-hours", "10 watts"),
    ("10 dollars per hour", "10 dollars per day"),
    ("$10 a day", "$10 per hour"),
    ("10 apple pies", "10 apples"),
    ("10 red marbles", "10 red balls"),
    ("10 total hours", "10 apples"),
    ("5\\pi \\text{ cm}", "5\\pi \\text{ m}"),
    ("5\\pi \\text{ cm}", "5\\pi \\text{ cm}^2"),
]
"""(answer, gold with another unit)"""
SAME = [
    ("10 cm", "10 centimeters"),
    ("5 km", "5 kilometers"),
    ("5 L", "5 litres"),
    ("10 MW", "10 megawatts"),
    ("5 kWh", "5 kilowatt-hours"),
    ("3 hrs", "3 hours"),
    ("3 min", "3 minutes"),
    ("10 ft", "10 feet"),
    ("10 in.", "10 inches"),
    ("10 inches in total", "10 in"),
    ("5 lbs", "5 pounds"),
    ("5 sq. ft", "5 square feet"),
    ("5 square meters", "5 \\text{ m}^2"),
    ("60 mph", "60 miles per hour"),
    ("60 miles/hour", "60 mph"),
    ("5 meters per second", "5 m/s"),
    ("9.8 \\text{ m s}^{-2}", "9.8 m/s^2"),
    ("20°C", "20 degrees Celsius"),
    ("20 degrees", "20°C"),
    ("10", "10 apples"),
    ("10 apple", "10 apples"),
    ("5 boxes", "5 box"),
    ("5 cherries", "5 cherry"),
    ("5 knives", "5 knife"),
    ("5 men", "5 man"),
    ("10 of the apples", "10 apples"),
    ("10 apples in total", "10 apples left"),
    ("10 apples fell", "10 apples"),
    ("10 centimeters", "10 cm long"),
    ("10 USD", "$10"),
    ("10 dollars an hour", "$10 per hour"),
    ("$10", "10 dollars per hour"),
]
"""(answer, gold with the same unit)"""


@pytest.mark.parametrize(("answer", "gold"), OTHERS)
def test_another_unit_is_wrong(answer, gold):
    assert judge(answer, gold_of(gold)) is Verdict.WRONG


@pytest.mark.parametrize(("answer", "gold"), SAME)
def test_the_same_unit_is_right_however_it_is_written(answer, gold):
    assert judge(answer, gold_of(gold)) is Verdict.RIGHT
    assert judge(gold, gold_of(gold)) is Verdict.RIGHT


def test_an_abbreviated_unit_of_an_expression_is_the_same_unit():
    gold = gold_of("5\\pi \\text{ cm}")
    assert judge("5\\pi \\text{ centimeters}", gold) is Verdict.RIGHT
    assert judge("\\pi 5 \\text{ centimeters}", gold) == Comparison("\\pi 5", "5\\pi")


@pytest.mark.parametrize(("unit", "another"), [("apple", "pear"), ("day", "month"), ("m", "s")])
def test_units_agree_in_both_directions_with_themselves_only(unit, another):
    assert units_agree([unit], [unit])
    assert not units_agree([unit], [another])
    assert not units_agree([unit, "per", another], [unit])
    assert not units_agree([unit], [unit, "/", another])


def test_an_inverse_is_not_what_it_is_the_inverse_of():
    assert judge("x", gold_of("x^{-1}")) is not Verdict.RIGHT
