"""How many of these answers does `math_reward` judge as they are labelled?

`python tests/interfaces/math_answers/exam.py` prints precision and recall of each half. The forms
are those of `hand_written.yaml` and those that the rules of `rules.yaml` write. The rules are
halved by a hash of their names: one half to develop with, together with what is written by hand,
and one held back, whose failures are shown only on demand (`--failures held_back`).

`further_open.jsonl` and `further_held_back.jsonl` are a second exam, written by somebody else after
that parser and before its successor: the first half was known while the successor was written, the
second was not, and its failures are shown by nothing here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
DEVELOPMENT, HELD_BACK = "development", "held_back"
FURTHER = {DEVELOPMENT: "further_open.jsonl", HELD_BACK: "further_held_back.jsonl"}
WHOLE = (("5", "5"), ("72", "72"), ("18", "18"), ("2125", "2125"))
ANY = (*WHOLE[:2], ("2,125", "2,125"), ("-7", "-7"), ("3.75", "3.75"), ("1/2", "\\frac{1}{2}"))
"""(gold, the same written plainly)."""
BASES = {"whole": WHOLE, "any": ANY}
PLACES = {"mark": "#### @", "box": "So it is \\boxed{@}.", "said": "The answer is @.", "all": "@"}
EACH = 3
"""Golds that each rule is tried with."""


@dataclass(frozen=True)
class Form:
    """A response to a row with this gold, and whether it is right."""

    gold: str
    response: str
    right: bool
    rule: str
    half: str


@dataclass(frozen=True)
class Result:
    """Of one half: how many right answers were accepted,
    and how many of the accepted ones were right."""

    forms: int
    accepted_right: int
    accepted_wrong: int
    right: int
    failures: tuple[Form, ...]

    @property
    def precision(self) -> float:
        return self.accepted_right / max(self.accepted_right + self.accepted_wrong, 1)

    @property
    def recall(self) -> float:
        return self.accepted_right / max(self.right, 1)


def forms() -> list[Form]:
    """All of them, without doubles."""
    return list(dict.fromkeys([*_hand_written(), *_written_by_rules()]))


def further_forms(half: str) -> list[Form]:
    """One half of the second exam."""
    lines = (HERE / FURTHER[half]).read_text(encoding="utf-8").splitlines()
    return [Form(**json.loads(line), half=half) for line in lines]


def results(accepted: Iterable[bool], of: Sequence[Form]) -> Mapping[str, Result]:
    judged = list(zip(of, accepted, strict=True))
    results_by_half = {}
    for half in (DEVELOPMENT, HELD_BACK):
        mine = [(form, ok) for form, ok in judged if form.half == half]
        results_by_half[half] = Result(
            forms=len(mine),
            accepted_right=sum(ok and form.right for form, ok in mine),
            accepted_wrong=sum(ok and not form.right for form, ok in mine),
            right=sum(form.right for form, _ in mine),
            failures=tuple(form for form, ok in mine if ok != form.right),
        )
    return results_by_half


def judged(of: Sequence[Form]) -> list[bool]:
    """What `math_reward` accepts."""
    from rlcli.api.config import ModelInterfaceAbstraction
    from rlcli.registry import make_interface

    reward = make_interface(ModelInterfaceAbstraction("math_reward", {}))
    scores = reward.score_texts([form.response for form in of], [form.gold for form in of])
    return [score == 1.0 for score in scores]


def _hand_written() -> Iterator[Form]:
    for entry in yaml.safe_load((HERE / "hand_written.yaml").read_text(encoding="utf-8")):
        for right in (True, False):
            for text in entry.get("right" if right else "wrong", ()):
                marked = any(marker in text for marker in ("\\boxed", "\\fbox", "<answer>"))
                response = text if marked else f"#### {text}"
                yield Form(entry["gold"], response, right, "written by hand", DEVELOPMENT)


def _written_by_rules() -> Iterator[Form]:
    for group in yaml.safe_load((HERE / "rules.yaml").read_text(encoding="utf-8")):
        for form in group["forms"]:
            rule = f"{group['group']} {form}"
            number = int.from_bytes(hashlib.sha256(rule.encode()).digest()[:8], "big")
            half = HELD_BACK if number % 2 else DEVELOPMENT
            bases, places = BASES[group["bases"]], group["in"]
            for turn in range(EACH):
                gold, plain = bases[(number // 2 + turn) % len(bases)]
                answer = form.replace("@", plain)
                response = PLACES[places[(number // 16 + turn) % len(places)]].replace("@", answer)
                yield Form(gold, response, group["right"], rule, half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--failures", choices=(DEVELOPMENT, HELD_BACK), help="show what this half gets wrong"
    )
    shown_half = parser.parse_args().failures
    exam = forms()
    for half, result in results(judged(exam), exam).items():
        print(
            f"{half:12} {result.forms:4} forms, {result.right} right: "
            f"precision {result.precision:.3f}, recall {result.recall:.3f}"
        )
        for form in result.failures if half == shown_half else ():
            verdict = "missed" if form.right else "PAID  "
            print(f"  {verdict} {form.response!r} for {form.gold!r}  [{form.rule}]")


if __name__ == "__main__":
    main()
