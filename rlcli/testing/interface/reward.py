"""Checks of rewards: correct answers earn more than wrong ones, nonsense does no harm,
and each row gets its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from itertools import pairwise, permutations
from typing import Any

import pytest

from rlcli.api.interface import ModelInterface
from rlcli.testing.contract import Note, Violation, place_of
from rlcli.testing.interface.inference_trial import CallSubject, CallTrial, Gold
from rlcli.testing.interface.outputs import rows, tensor_of
from rlcli.testing.interface.training_trial import Make, overrides
from rlcli.testing.ranks import run_on_ranks

NONSENSE = (
    "",
    " ",
    "\n\n\n",
    "####",
    "#### ",
    "\\boxed{",
    "\\boxed{}",
    "}{",
    "\\boxed{" * 300,
    "####" * 300,
    "((((((" * 50,
    "\x00",
    "\x1b[31m",
    "\u202e8",
    "８",
    "é" * 500,
    "🙂" * 100,
    "#### ٣",
    "#### 1/0",
    "#### nan",
    "#### inf",
    "#### -",
    "#### 1e999",
    "#### " + "9" * 5000,
    "The answer is",
    "The answer is .",
    "answer: " * 200,
    "a" * 20000,
    "$" * 99,
    "#### \\frac{1}{0}",
    "#### None",
    "#### {answer}",
    "<think>",
    "%s %d {0} {}",
    "'; DROP TABLE rows; --",
)
"""What models write before they have been trained, and what breaks parsers."""

HARD = "x + 1"
"""An answer that cannot be rejected at a glance."""

REMARK = "So that is settled. "
MANY_REMARKS = 200

ONE_FOR_EACH = "one reward for each response, in their order"


class RewardChecks(CallSubject):
    @pytest.fixture
    def scorer(self, make: Make) -> ModelInterface:
        """The reward, if it reads texts."""
        interface = make()
        if not overrides(interface, "score_texts"):
            pytest.skip("does not score texts")
        return interface

    def test_one_finite_reward_for_each_sequence(
        self, make: Make, request: pytest.FixtureRequest
    ) -> None:
        """each response has one finite reward"""
        declared = make().writes("inference")
        if declared is None or "rewards" not in declared.all:
            pytest.skip("gives no rewards")
        inferring: CallTrial = request.getfixturevalue("inferring")
        groups = inferring.batch.seqlens["packed_input_ids"]
        for key in {"rewards", "solved", "answer_classes"} & set(inferring.result.keys):
            if inferring.result.seqlens[key] != [[1] * len(group) for group in groups]:
                finding = (
                    f"{key} has lengths {inferring.result.seqlens[key][:2]} … for "
                    f"groups of {len(groups[0])}"
                )
                raise Violation(finding, ONE_FOR_EACH, inferring.where)
        rewards = tensor_of(inferring.result, "rewards")
        if rewards.dim() != 1 or not rewards.isfinite().all():
            finding = (
                f"rewards has the shape {tuple(rewards.shape)}, "
                f"{int((~rewards.isfinite()).sum())} not finite"
            )
            raise Violation(finding, ONE_FOR_EACH, inferring.where)

    def test_votes_are_numbered_by_first_appearance(
        self, make: Make, request: pytest.FixtureRequest
    ) -> None:
        """answers to one prompt are numbered in their order"""
        declared = make().writes("inference")
        if declared is None or "answer_classes" not in declared.all:
            pytest.skip("gives no answer_classes")
        inferring: CallTrial = request.getfixturevalue("inferring")
        for id_, classes in rows(inferring.result, "answer_classes").items():
            numbers = classes.tolist()
            seen = list(dict.fromkeys(number for number in numbers if number != -1))
            if seen != list(range(len(seen))):
                finding = f"answer_classes of sample {id_} are {numbers}"
                cause = "number the answers to each prompt with rlcli.ops.evaluation.answer_classes"
                raise Violation(finding, cause, inferring.where)

    def test_right_answers_earn_more_than_wrong_ones(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold, record_property: Note
    ) -> None:
        """gold answers are accepted, wrong ones rejected"""
        where = place_of(type(scorer).score_texts)
        right = _scores(scorer, [gold(answer) for answer in answers], answers)
        nothing = _scores(scorer, [""] * len(answers), answers)
        refused = [
            a
            for a, score, none in zip(answers, right, nothing, strict=True)
            if not _above(score, none)
        ]
        if refused:
            accepted = f"{len(answers) - len(refused)}/{len(answers)}"
            finding = (
                f"gold answers accepted {accepted}: not {gold(refused[0])!r} for {refused[0]!r}"
            )
            raise Violation(
                finding,
                "compare by value what a response gives as its answer with the row's",
                where,
            )
        turned = [[*answers[turn:], *answers[:turn]] for turn in range(1, len(answers))]
        longer = ["1" + answer if answer[:1].isdigit() else "" for answer in answers]
        for others in (*turned, longer):
            wrong = _scores(scorer, [gold(answer) for answer in others], answers)
            believed = [n for n, score in enumerate(wrong) if not _above(right[n], score)]
            if believed:
                answer, response = answers[believed[0]], gold(others[believed[0]])
                finding = (
                    f"{len(believed)} of {len(answers)} wrong answers earn as much: "
                    f"{response!r} for {answer!r}"
                )
                raise Violation(
                    finding, "compare with the whole answer, and that of the same row", where
                )
        record_property(
            "note",
            f"{len(answers)}/{len(answers)} and {(len(turned) + 1) * len(answers)} wrong ones",
        )

    def test_nonsense_earns_nothing_and_breaks_nothing(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold, record_property: Note
    ) -> None:
        """malformed responses break nothing, and earn nothing"""
        answer = answers[0]
        (right,) = _scores(scorer, [gold(answer)], [answer])
        where = place_of(type(scorer).score_texts)
        for text, score in zip(
            NONSENSE, _scores(scorer, NONSENSE, [answer] * len(NONSENSE)), strict=True
        ):
            if score is not None and not math.isfinite(score):
                raise Violation(f"{text[:40]!r} earns {score}", "a reward is a number", where)
            if score is not None and right is not None and score >= right:
                raise Violation(
                    f"{text[:40]!r} earns {score:g}, as much as {gold(answer)!r}",
                    "accept nothing that is not the answer",
                    where,
                )
        record_property("note", f"{len(NONSENSE)}/{len(NONSENSE)}")

    def test_one_of_two_answers_counts(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold
    ) -> None:
        """a right and a wrong answer are not right in both orders"""
        where = place_of(type(scorer).score_texts)
        for right, wrong in pairwise((*answers, answers[0])):
            texts = [gold(right), *map("\n".join, permutations((gold(right), gold(wrong))))]
            alone, *together = _scores(scorer, texts, [right] * len(texts))
            if not any(_above(alone, score) for score in together):
                raise Violation(
                    f"{texts[1]!r} and {texts[2]!r} both earn as much as {texts[0]!r}",
                    "read one of the answers, such as the last: otherwise listing many pays",
                    where,
                )

    def test_the_distance_of_an_answer_from_the_end_does_not_matter(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold
    ) -> None:
        """an answer counts, or does not, whether little or much follows it"""
        where = place_of(type(scorer).score_texts)
        for answer in answers:
            remarks = [REMARK, REMARK * MANY_REMARKS]
            answered = [f"{gold(answer)}\n{remark}" for remark in remarks]
            scores = _scores(scorer, [*answered, *remarks], [answer] * 4)
            pays_before_one, pays_before_many = map(_above, scores[:2], scores[2:])
            if pays_before_one != pays_before_many:
                pays, does_not = (1, MANY_REMARKS) if pays_before_one else (MANY_REMARKS, 1)
                raise Violation(
                    f"{gold(answer)!r} pays before {pays} × {REMARK!r}, "
                    f"but not before {does_not} × that",
                    "look for the answer in the whole response",
                    where,
                )

    def test_a_text_is_worth_the_same_anywhere(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold
    ) -> None:
        """a text earns the same alone, twice and in any order"""
        texts = [
            text for answer in answers for text in (gold(answer), gold(HARD), gold(answers[0]))
        ]
        rows = [answer for answer in answers for _ in range(3)]
        usual = _scores(scorer, texts, rows)
        where = place_of(type(scorer).score_texts)
        ways = {
            "in reverse order": list(reversed(_scores(scorer, texts[::-1], rows[::-1]))),
            "one by one": [
                _scores(scorer, [text], [row])[0] for text, row in zip(texts, rows, strict=True)
            ],
            "the second time": _scores(scorer, texts, rows),
        }
        for way, scores in ways.items():
            changed = [
                n
                for n, (score, other_score) in enumerate(zip(usual, scores, strict=True))
                if score != other_score
            ]
            if changed:
                n = changed[0]
                finding = f"{texts[n]!r} for {rows[n]!r} earns {usual[n]}, but {scores[n]} {way}"
                raise Violation(
                    finding, "score each text by itself and its own row's answer", where
                )
        if _scores(scorer, [], []):
            raise Violation("no texts earn something", ONE_FOR_EACH, where)

    def test_a_run_gives_what_score_texts_gives(
        self, scorer: ModelInterface, inferring: CallTrial, tokenizer: Any
    ) -> None:
        """inference gives each row what score_texts gives"""
        batch = inferring.batch
        tokens = tensor_of(batch, "packed_input_ids").split(batch.flat_seqlens("packed_input_ids"))
        masks = tensor_of(batch, "prompt_mask").split(batch.flat_seqlens("prompt_mask"))
        texts = [
            tokenizer.decode(ids[~mask].tolist(), skip_special_tokens=True)
            for ids, mask in zip(tokens, masks, strict=True)
        ]
        groups = batch.seqlens["packed_input_ids"]
        rows = [
            row for row, group in zip(batch.metadata["answer"], groups, strict=True) for _ in group
        ]
        scores = _scores(scorer, texts, rows)
        rewards = tensor_of(inferring.result, "rewards").tolist()
        wrong = [
            n
            for n, score in enumerate(scores)
            if score is not None and not math.isclose(score, rewards[n], rel_tol=1e-6)
        ]
        if wrong:
            n = wrong[0]
            finding = (
                f"{len(wrong)} of {len(scores)} rewards are not those of "
                f"score_texts: {rewards[n]:g}, "
            )
            finding += f"not {scores[n]:g}, for {texts[n]!r} where the row says {rows[n]!r}"
            cause = (
                "score the response alone, without prompt and special tokens, by "
                "the answer of its own row"
            )
            raise Violation(finding, cause, inferring.where)

    def test_rewards_are_the_same_elsewhere(
        self, scorer: ModelInterface, make: Make, answers: Sequence[str], gold: Gold
    ) -> None:
        """rewards are the same from a thread and from a worker process"""
        texts = [*(gold(answer) for answer in answers), "No idea."]
        rows = [*answers, answers[0]]
        here = _scores(scorer, texts, rows)
        where = place_of(type(scorer).score_texts)
        for location, scores in (
            ("a thread", _in_thread(make(), texts, rows)),
            (
                "a worker process",
                run_on_ranks(1, lambda _: {"scores": _scores(make(), texts, rows)})[0]["scores"],
            ),
        ):
            if scores != here:
                finding = f"the rewards are {here} here, {scores} in {location}"
                raise Violation(
                    finding,
                    (
                        "keep no state between calls, and no signals: they "
                        "work in the main thread only"
                    ),
                    where,
                )


def _scores(
    interface: ModelInterface, texts: Sequence[str], answers: Sequence[str]
) -> list[float | None]:
    rewards = list(interface.score_texts(list(texts), list(answers)))
    if len(rewards) != len(texts):
        where = place_of(type(interface).score_texts)
        raise Violation(
            f"score_texts returns {len(rewards)} rewards for {len(texts)} responses",
            ONE_FOR_EACH,
            where,
        )
    return rewards


def _above(score: float | None, base: float | None) -> bool:
    """Whether a text earns more than another; one that could not be scored earns nothing."""
    return score is not None and (base is None or score > base)


def _in_thread(
    interface: ModelInterface, texts: Sequence[str], answers: Sequence[str]
) -> list[float | None]:
    """The scores as another thread computes them; raises what it raises."""
    results: list[list[float | None]] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(_scores(interface, texts, answers))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
