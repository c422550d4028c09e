"""Checks of rewards: correct answers earn more than wrong ones, nonsense does no harm,
and each row gets its own."""

from __future__ import annotations

import errno
import math
import multiprocessing
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise, permutations
from operator import gt
from typing import Any

import pytest

from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import PROMPT_MASK, REWARDS, SEQUENCES
from rlcli.errors import DataError, RlcliError
from rlcli.testing.arguments import run_each
from rlcli.testing.contract import Note, Violation, skip_if, skip_unless
from rlcli.testing.interface.actions import padded
from rlcli.testing.interface.call_engine import JudgeEngine
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import CallTrial
from rlcli.testing.interface.outputs import check_same, gap, sequences, tensor_of
from rlcli.testing.interface.reward_examples import RewardExampleChecks
from rlcli.testing.interface.rules import (
    rule_trial,
    skip_unless_responses_are_rewarded,
    with_later_beginnings,
    with_other_prompts,
)
from rlcli.testing.interface.texts import (
    NONSENSE,
    UNSCORED,
    Gold,
    reads_answers,
    scores,
    text_batch,
)
from rlcli.testing.interface.training_trial import Batches, Make, overrides, place_of_call
from rlcli.testing.ranks import run_on_ranks
from rlcli.testing.tokenizer import byte_tokenizer

WORDS = ("paris", "Paris", "PARIS", "São Paulo", "two of them")
"""Answers that are words, the plainest first."""

HARD = "x + 1"
"""An answer that cannot be rejected at a glance."""
HARD_TO_COMPARE = "1 + x"
"""The same, written in another way."""
HARD_TO_REJECT = "x + 2"

REMARK = "So that is settled. "
MANY_REMARKS = 200

HELPERS = (
    (subprocess.Popen, "__init__"),
    (multiprocessing.Process, "start"),
    (socket.socket, "connect"),
)
"""What starts a process, or connects to one."""


class RewardChecks(RewardExampleChecks):
    @pytest.fixture
    def scorer(self, make: Make) -> ModelInterface:
        """The reward, if it reads texts."""
        interface = make()
        skip_unless(overrides(interface, "score_texts"), "does not score texts")
        return interface

    def test_a_failing_helper_is_an_error(self, make: Make, request: pytest.FixtureRequest) -> None:
        """where no process starts, nothing connects and its role writes nothing, rewards are the
        same, or an error"""
        declared = make().writes("inference")
        if declared is None or "rewards" not in declared.all:
            pytest.skip("gives no rewards")
        inferring = request.getfixturevalue("inferring")
        batch = inferring.batch
        if reads_answers(make()):
            gold = request.getfixturevalue("gold")
            texts = [("What is it?", [gold(HARD), gold(HARD_TO_COMPARE)])]
            batch = text_batch(inferring.tokenizer, texts, [HARD])
        usual, alone, model = inferring.run(batch), make(), inferring.model()
        model.module.is_mute = True
        try:
            with _helpers_refused():
                without_helpers = inferring.run(batch, model=model, interface=alone)
        except Exception:
            return
        check_same(
            usual,
            without_helpers,
            "where no process starts, nothing connects and its role writes nothing",
            "raise WorkerError where a reward cannot be computed",
            inferring.where,
        )

    def test_a_role_is_asked_in_its_own_format(self, inferring: CallTrial) -> None:
        """a role that writes is asked up to where it answers, and reads no end of its own texts"""
        model = inferring.model()
        if not isinstance(model.module, JudgeEngine):
            pytest.skip("its role writes nothing")
        inferring.run(model=model, interface=inferring.make())
        engine = model.module
        texts = [p + reply for p, reply in zip(engine.prompts, engine.replies, strict=True)]
        if any(prompt[: len(text)] == text for text in texts for prompt in engine.prompts):
            raise Violation(
                "what its role wrote continues after the token that ended it",
                "leave out the last token of a reply that ended",
                inferring.where,
            )
        chat = inferring.model()
        chat.tokenizer = byte_tokenizer(chat=True)
        inferring.run(model=chat, interface=inferring.make())
        for prompt in map(chat.tokenizer.decode, chat.module.prompts):
            if prompt.rfind("<user>") > prompt.rfind("<assistant>"):
                raise Violation(
                    f"a chat model is asked without the begin of its answer: {prompt[-40:]!r}",
                    "fill in its template with add_generation_prompt=True",
                    inferring.where,
                )

    def test_rules_meet_what_they_look_for(self, inferring: CallTrial, batches: Batches) -> None:
        """responses that rules tell apart are rewarded whatever their prompts, their order and the
        other samples"""
        trial = rule_trial(inferring, batches)
        with _helpers_refused():
            try:
                assert trial.result is not None
            except (RlcliError, BlockingIOError) as refusal:
                pytest.skip(f"not tried: refuses texts, or needs a process: {refusal}")
            run_each(OF_RULES, self, trial)

    def test_a_response_is_scored_without_its_prompt(self, inferring: CallTrial) -> None:
        """another prompt, or a longer one, changes no reward, unless it matters where the response
        begins"""
        skip_unless_responses_are_rewarded(inferring)
        batch = inferring.batch
        usual, cut = inferring.result, inferring.run(with_later_beginnings(batch))
        if gap(usual.select([REWARDS]), cut.select([REWARDS])) is not None:
            return
        for change, changed in (
            ("another prompt", with_other_prompts(batch)),
            ("a longer prompt", padded(batch, in_front=True)),
        ):
            check_same(
                usual,
                inferring.run(changed),
                f"with {change}, though not with a part of the response that counts as prompt",
                "score the tokens outside prompt_mask; or leave that out of READS",
                inferring.where,
            )

    def test_right_answers_earn_more_than_wrong_ones(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold, record_property: Note
    ) -> None:
        """gold answers are accepted, wrong ones rejected"""
        right = _rewards_of_right_answers(scorer, answers, gold)
        nothing = [""] * len(answers)
        cause = "compare by value what a response gives as its answer with the row's"
        _demand_less(scorer, nothing, answers, gold, right, cause)
        turned = [[*answers[turn:], *answers[:turn]] for turn in range(1, len(answers))]
        wrong = [*turned, [*map(_longer, answers)], [*map(_shorter, answers)]]
        for others in wrong:
            cause = "compare with the whole answer, and that of the same row"
            _demand_less(scorer, [*map(gold, others)], answers, gold, right, cause)
        of_hard = _rewards_of_right_answers(scorer, [HARD], gold)
        (of_nothing,) = scores(scorer, [""], [HARD])
        if of_hard[HARD] > of_nothing:
            cause = "what cannot be compared is not right"
            _demand_less(scorer, [gold(HARD_TO_REJECT)], [HARD], gold, of_hard, cause)
        count = len(answers)
        record_property("note", f"{count}/{count} and {len(wrong) * count} wrong ones")

    def test_words_are_answers_as_well(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold
    ) -> None:
        """a reward that accepts words as answers accepts them with capitals and accents too"""
        plain, *others = WORDS
        try:
            usual, of_plain = scores(scorer, [gold(answers[0]), gold(plain)], [answers[0], plain])
        except DataError:
            pytest.skip("refuses rows whose answers are words")
        skip_if(of_plain < usual, "accepts no words as answers")
        earned = scores(scorer, [*map(gold, others)], others)
        for word, reward in zip(others, earned, strict=True):
            _demand(
                scorer,
                reward >= of_plain,
                f"{gold(word)!r} earns {reward} for {word!r}, less than {gold(plain)!r} for "
                f"{plain!r}",
                "what is done to a response before it is compared is done to the answer, too",
            )

    def test_nonsense_earns_nothing_and_breaks_nothing(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold, record_property: Note
    ) -> None:
        """malformed responses break nothing, and earn nothing"""
        right = _rewards_of_right_answers(scorer, answers[:1], gold)
        rows = [answers[0]] * len(NONSENSE)
        cause = "accept nothing that is not the answer"
        _demand_less(scorer, NONSENSE, rows, gold, right, cause)
        record_property("note", f"{len(NONSENSE)}/{len(NONSENSE)}")

    def test_one_of_two_answers_counts(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold
    ) -> None:
        """a right and a wrong answer are not right in both orders"""
        for right, wrong in pairwise((*answers, answers[0])):
            texts = [gold(right), *map("\n".join, permutations((gold(right), gold(wrong))))]
            alone, *together = scores(scorer, texts, [right] * len(texts))
            _demand(
                scorer,
                alone > min(together),
                f"{texts[1]!r} and {texts[2]!r} both earn as much as {texts[0]!r}",
                "read one of the answers, such as the last: otherwise listing many pays",
            )

    def test_the_distance_of_an_answer_from_the_end_does_not_matter(
        self, scorer: ModelInterface, answers: Sequence[str], gold: Gold
    ) -> None:
        """an answer counts, or does not, whether little or much follows it"""
        for answer in answers:
            remarks = [REMARK, REMARK * MANY_REMARKS]
            answered = [f"{gold(answer)}\n{remark}" for remark in remarks]
            earned = scores(scorer, [*answered, *remarks], [answer] * 4)
            pays_before_one, pays_before_many = map(gt, earned[:2], earned[2:])
            pays, does_not = (1, MANY_REMARKS) if pays_before_one else (MANY_REMARKS, 1)
            _demand(
                scorer,
                pays_before_one == pays_before_many,
                f"{gold(answer)!r} pays before {pays} × {REMARK!r}, but not before {does_not} × "
                "that",
                "look for the answer in the whole response",
            )

    def test_a_run_gives_what_score_texts_gives(
        self, scorer: ModelInterface, inferring: CallTrial, tokenizer: Any
    ) -> None:
        """inference gives each row what score_texts gives it alone"""
        batch = inferring.batch
        columns = zip(sequences(batch, SEQUENCES), sequences(batch, PROMPT_MASK), strict=True)
        texts = [
            tokenizer.decode(ids[~mask].tolist(), skip_special_tokens=True) for ids, mask in columns
        ]
        groups = zip(batch.metadata["answer"], batch.seqlens[SEQUENCES], strict=True)
        rows = [row for row, group in groups for _ in group]
        rewards = tensor_of(inferring.result, REWARDS).tolist()
        for text, row, reward in zip(texts, rows, rewards, strict=True):
            (score,) = scores(scorer, [text], [row])
            if score != UNSCORED and not math.isclose(score, reward, rel_tol=1e-6):
                raise Violation(
                    f"{text!r} earns {reward:g} where the row says {row!r}; score_texts gives it "
                    f"{score:g}",
                    "score the response alone, without prompt and special tokens, by "
                    "the answer of its own row",
                    inferring.where,
                )

    def test_rewards_are_the_same_elsewhere(
        self, scorer: ModelInterface, make: Make, answers: Sequence[str], gold: Gold
    ) -> None:
        """rewards are the same from a thread and from a worker process"""
        texts = [*(gold(answer) for answer in answers), "No idea."]
        rows = [*answers, answers[0]]
        here = scores(scorer, texts, rows)
        with ThreadPoolExecutor(1) as thread:
            in_thread = thread.submit(scores, make(), texts, rows).result()
        (of_process,) = run_on_ranks(1, lambda _: {"scores": scores(make(), texts, rows)})
        elsewhere = {"a thread": in_thread, "a worker process": of_process["scores"]}
        for location, rewards in elsewhere.items():
            _demand(
                scorer,
                rewards == here,
                f"the rewards are {here} here, {rewards} in {location}",
                "keep no state between calls, and no signals: they work in the main thread only",
            )


OF_RULES = (
    InferenceChecks.test_inference_returns_plain_numbers,
    InferenceChecks.test_inference_does_not_depend_on_the_order,
    InferenceChecks.test_inference_does_not_depend_on_the_other_samples,
    InferenceChecks.test_inference_is_deterministic,
    RewardChecks.test_a_response_is_scored_without_its_prompt,
)


def _longer(answer: str) -> str:
    """Another number that ends with the answer; empty unless that is one."""
    return "1" + answer if answer[:1].isdigit() else ""


def _shorter(answer: str) -> str:
    """The first digit of an answer of several; empty unless it begins with one."""
    return answer[:1] if answer[:1].isdigit() and answer[1:] else ""


@contextmanager
def _helpers_refused() -> Iterator[None]:
    """Nothing starts a process, or connects to one."""
    with pytest.MonkeyPatch.context() as patch:
        for cls, method in HELPERS:
            patch.setattr(cls, method, _refuse)
        yield


def _refuse(*args: Any, **settings: Any) -> None:
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def _rewards_of_right_answers(
    scorer: ModelInterface, answers: Sequence[str], gold: Gold
) -> dict[str, float]:
    return dict(zip(answers, scores(scorer, [*map(gold, answers)], answers), strict=True))


def _demand_less(
    scorer: ModelInterface,
    texts: Sequence[str],
    answers: Sequence[str],
    gold: Gold,
    right: Mapping[str, float],
    cause: str,
) -> None:
    """Raise Violation if a text, as a response to a row with its answer, earns as much as the right
    one."""
    for text, answer, earned in zip(texts, answers, scores(scorer, texts, answers), strict=True):
        _demand(
            scorer,
            earned < right[answer],
            f"{text[:40]!r} earns {earned:g}, as much as {gold(answer)!r} for {answer!r}",
            cause,
        )


def _demand(scorer: ModelInterface, holds: bool, finding: str, cause: str) -> None:
    """Raise Violation, for its `score_texts`, unless something holds."""
    if not holds:
        raise Violation(finding, cause, place_of_call(scorer, "score_texts"))
