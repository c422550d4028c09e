"""Rewards with one mistake each: its check reports the observation."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import signature

import pytest

from rlcli.api.model import ModelInterface
from rlcli.testing.contract import Violation
from rlcli.testing.interface.reward import RewardChecks

ANSWERS = ("7", "12", "3/4")


@dataclass
class Compares(ModelInterface):
    calls: int = field(init=False, default=0)

    def score_texts(self, responses, answers):
        return [
            self.score(response, answer)
            for response, answer in zip(responses, answers, strict=True)
        ]

    def score(self, response, answer):
        return float(response == answer)


class BelievesAll(Compares):
    def score(self, response, answer):
        return float(bool(response))


class Contains(Compares):
    def score(self, response, answer):
        return float(answer in response)


class Breaks(Compares):
    def score(self, response, answer):
        return 1.0 / len(response) if response != answer else 2.0


class Remembers(Compares):
    def score(self, response, answer):
        self.calls += 1
        return super().score(response, answer) + self.calls / 1000


class Forgets(Compares):
    def score_texts(self, responses, answers):
        return super().score_texts(sorted(set(responses)), answers[: len(set(responses))])


class FindsAnyLine(Compares):
    def score(self, response, answer):
        return float(answer in response.splitlines())


class ReadsTheEndAlone(Compares):
    def score(self, response, answer):
        return float(answer in response[-50:].splitlines())


class ReadsTheLastLineButPunishesLength(Compares):
    """Correct, though its rewards depend on more than the answer."""

    def score(self, response, answer):
        lines = [line for line in response.splitlines() if "settled" not in line]
        return float(lines[-1:] == [answer]) - len(response) / 1000


def same(answer):
    return answer


def test_a_correct_reward_passes():
    checks, scorer, notes = RewardChecks(), Compares(), {}
    checks.test_right_answers_earn_more_than_wrong_ones(scorer, ANSWERS, same, notes.__setitem__)
    assert notes["note"] == "3/3 and 9 wrong ones"
    checks.test_nonsense_earns_nothing_and_breaks_nothing(scorer, ANSWERS, same, notes.__setitem__)
    checks.test_a_text_is_worth_the_same_anywhere(scorer, ANSWERS, same)
    checks.test_rewards_are_the_same_elsewhere(scorer, Compares, ANSWERS, same)


@pytest.mark.parametrize("cls", [Compares, ReadsTheLastLineButPunishesLength])
def test_answers_may_be_read_in_any_definite_way(cls):
    RewardChecks().test_one_of_two_answers_counts(cls(), ANSWERS, same)
    RewardChecks().test_the_distance_of_an_answer_from_the_end_does_not_matter(cls(), ANSWERS, same)


@pytest.mark.parametrize(
    ("cls", "check", "error", "finding"),
    [
        (
            BelievesAll,
            "test_right_answers_earn_more_than_wrong_ones",
            Violation,
            "3 of 3 wrong answers earn as much",
        ),
        (Contains, "test_right_answers_earn_more_than_wrong_ones", Violation, "'17' for '7'"),
        (
            BelievesAll,
            "test_nonsense_earns_nothing_and_breaks_nothing",
            Violation,
            "earns 1, as much as '7'",
        ),
        (
            Breaks,
            "test_nonsense_earns_nothing_and_breaks_nothing",
            ZeroDivisionError,
            "division by zero",
        ),
        (
            FindsAnyLine,
            "test_one_of_two_answers_counts",
            Violation,
            "both earn as much as '7'",
        ),
        (
            ReadsTheEndAlone,
            "test_the_distance_of_an_answer_from_the_end_does_not_matter",
            Violation,
            "but not before 200 × that",
        ),
        (Remembers, "test_a_text_is_worth_the_same_anywhere", Violation, "'7' for '7' earns 1.0"),
        (Forgets, "test_a_text_is_worth_the_same_anywhere", Violation, "4 rewards for 9 responses"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_of_a_reward_is_reported(cls, check, error, finding):
    method = getattr(RewardChecks(), check)
    notes = [{}.__setitem__] if "record_property" in signature(method).parameters else []
    with pytest.raises(error, match=finding):
        method(cls(), ANSWERS, same, *notes)


def test_a_reward_with_state_is_reported():
    scorer = Remembers()
    scorer.score("", "")
    with pytest.raises(Violation, match="in a thread"):
        RewardChecks().test_rewards_are_the_same_elsewhere(scorer, Remembers, ANSWERS, same)
