"""Rule-based reward: how near is the response to the row's answer, letter by letter?"""

from __future__ import annotations

from dataclasses import dataclass

from rlcli.api.interface import register_interface

from .rewards._text_reward import TextReward


@dataclass(kw_only=True)
class MyEditReward(TextReward):
    """1 minus the edit distance of response and `answer`, as a share of the longer one's length. A
    response that contains `####` is judged by what follows the last one."""

    ignore_case: bool = True
    """Count capital and small letters as the same."""

    def score(self, response: str, answer: str) -> float:
        given = response.rpartition("####")[2].strip()
        wanted = answer.strip()
        if self.ignore_case:
            given, wanted = given.casefold(), wanted.casefold()
        longest = max(len(given), len(wanted))
        return 1 - _distance(given, wanted) / longest if longest else 1.0


def _distance(one: str, other: str) -> int:
    """The fewest insertions, deletions and substitutions that turn one text into the other."""
    before = list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        current = [row]
        for column, mark in enumerate(other, start=1):
            changed = before[column - 1] + (letter != mark)
            current.append(min(before[column] + 1, current[-1] + 1, changed))
        before = current
    return before[-1]


register_interface("my_edit_reward", MyEditReward)
