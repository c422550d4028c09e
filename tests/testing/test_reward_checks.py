"""Rewards with one mistake each: its check reports the observation."""

from __future__ import annotations

import contextlib
import itertools
import re
import subprocess
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.model import ModelInterface
from rlcli.errors import WorkerError
from rlcli.interfaces.rewards._scores import one_each
from rlcli.interfaces.rewards._text import full_texts, response_texts
from rlcli.interfaces.rewards._text_reward import TextReward
from rlcli.testing.arguments import demand_use
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.interface.arguments import ArgumentChecks, effects_of
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import CallTrial
from rlcli.testing.interface.reward import RewardChecks, rule_trial
from rlcli.testing.interface.texts import accepted_form, texts_for
from rlcli.testing.interface.training_trial import place_of_call
from rlcli.testing.tokenizer import byte_tokenizer

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
    assert notes["note"] == "3/3 and 12 wrong ones"
    checks.test_nonsense_earns_nothing_and_breaks_nothing(scorer, ANSWERS, same, notes.__setitem__)
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
            "'12' earns 1, as much as '7' for '7'",
        ),
        (
            Contains,
            "test_right_answers_earn_more_than_wrong_ones",
            Violation,
            "'17' earns 1, as much as '7' for '7'",
        ),
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
        (Forgets, "test_right_answers_earn_more_than_wrong_ones", Violation, "1 rewards for 3"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_of_a_reward_is_reported(cls, check, error, finding):
    method = getattr(RewardChecks(), check)
    notes = [{}.__setitem__] if "record_property" in signature(method).parameters else []
    with pytest.raises(error, match=finding):
        method(cls(), ANSWERS, same, *notes)


@dataclass
class AsksAHelper(Compares):
    WRITES: ClassVar = {"inference": ("rewards",)}

    def score(self, response, answer):
        return float(subprocess.run(["true"]).returncode == 0 and response == answer)

    def inference(self, model, data, mb_spec):
        texts = [
            model.tokenizer.decode(ids)
            for ids in data.data["packed_input_ids"].split(data.flat_seqlens("packed_input_ids"))
        ]
        rewards = torch.tensor(self.score_texts(texts, texts))
        ones = [[1] * len(group) for group in data.seqlens["packed_input_ids"]]
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"rewards": ones}, data={"rewards": rewards}
        )


class ScoresAFailedHelper(AsksAHelper):
    def score(self, response, answer):
        try:
            return super().score(response, answer)
        except OSError:
            return 0.0


def test_a_reward_of_a_failed_helper_is_reported():
    def check(cls):
        batch = make_batch(["packed_input_ids"], [[(1, 2)]])
        inferring = CallTrial(cls, "inference", batch, DigitTokenizer())
        fixtures = {"inferring": inferring, "gold": same}
        request = SimpleNamespace(getfixturevalue=fixtures.__getitem__)
        RewardChecks().test_a_failing_helper_is_an_error(cls, request)

    for correct in (Compares, AsksAHelper):
        with contextlib.suppress(pytest.skip.Exception):
            check(correct)
    with pytest.raises(Violation, match="where no process starts"):
        check(ScoresAFailedHelper)


def test_a_reward_with_state_is_reported():
    scorer = Remembers()
    scorer.score("", "")
    with pytest.raises(Violation, match="in a thread"):
        RewardChecks().test_rewards_are_the_same_elsewhere(scorer, Remembers, ANSWERS, same)


@dataclass
class RunsPrograms(ModelInterface):
    """Its programs are sums, such as `2+2`."""

    EXAMPLES: ClassVar = (
        {"row": {"sum": 4}, "right": "2+2", "wrong": "2+1"},
        {"row": {"sum": 7, "prompt": "Add!"}, "right": "3+4", "wrong": "7+3"},
    )
    WRITES: ClassVar = {"inference": ("rewards",)}

    def inference(self, model, data, mb_spec):
        masks = data.data["prompt_mask"].split(data.flat_seqlens("prompt_mask"))
        tokens = data.data["packed_input_ids"].split(data.flat_seqlens("packed_input_ids"))
        texts = [
            model.tokenizer.decode(ids[~mask].tolist(), skip_special_tokens=True)
            for ids, mask in zip(tokens, masks, strict=True)
        ]
        groups = zip(data.metadata["sum"], data.seqlens["packed_input_ids"], strict=True)
        expected = [total for total, group in groups for _ in group]
        scores = [self.score(*pair) for pair in zip(texts, expected, strict=True)]
        ones = [[1] * len(group) for group in data.seqlens["packed_input_ids"]]
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"rewards": ones}, data={"rewards": torch.tensor(scores)}
        )

    def score(self, text, expected):
        is_sum = re.fullmatch(r"\d\+\d", text) is not None
        return float(is_sum and sum(map(int, text.split("+"))) == expected)


class RewardsAnySum(RunsPrograms):
    def score(self, text, expected):
        return float("+" in text)


class RewardsEveryText(RunsPrograms):
    def score(self, text, expected):
        return 1.0


class RewardsLength(RunsPrograms):
    def score(self, text, expected):
        return super().score(text, expected) + len(text) / 1000


def tried(cls):
    batch = make_batch(["packed_input_ids", "prompt_mask"], [[(1, 2)]])
    return CallTrial(cls, "inference", batch, byte_tokenizer())


def examples_hold(cls):
    RewardChecks().test_right_examples_earn_more_than_wrong_ones(tried(cls))


@dataclass
class RewardsSomeSums(RunsPrograms):
    """States what a sum earns that is wrong, too."""

    EXAMPLES: ClassVar = (
        {"row": {"sum": 4}, "right": "2+2", "wrong": "2+1", "rewards": {"1+3": 1.0, "3+3": 0.25}},
        {"row": {"sum": 7}, "right": "3+4", "wrong": "7+3"},
    )
    consolation: float = 0.25

    def score(self, text, expected):
        return max(super().score(text, expected), self.consolation * (text == "3+3"))


class RewardsFewerSums(RewardsSomeSums):
    def score(self, text, expected):
        return super().score(text, expected) * (text != "1+3")


def stated_rewards_hold(make):
    RewardChecks().test_examples_earn_what_they_state(tried(make))


@pytest.mark.parametrize("consolation", [0.25, 0.5])
def test_what_examples_state_is_earned_with_default_arguments(consolation):
    stated_rewards_hold(lambda: RewardsSomeSums(consolation=consolation))


def test_another_reward_than_examples_state_is_reported():
    with pytest.raises(Violation, match=r"'1\+3' earns 0, not 1 as EXAMPLES state"):
        stated_rewards_hold(RewardsFewerSums)


def test_a_reward_whose_examples_state_no_rewards_is_told_how():
    with pytest.raises(pytest.skip.Exception, match="state no rewards"):
        stated_rewards_hold(RunsPrograms)


def test_a_reward_of_rows_of_another_kind_is_tried_on_its_examples():
    examples_hold(RunsPrograms)


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (RewardsAnySum, r"'2\+2' earns 1, a wrong response 1"),
        (RewardsEveryText, r"'2\+2' earns 1, an empty response 1"),
        (RewardsLength, "earns 20, as much as"),
    ],
)
def test_a_reward_that_does_not_keep_to_its_examples_is_reported(cls, finding):
    with pytest.raises(Violation, match=finding):
        examples_hold(cls)


@dataclass
class RewardsEachSum(RunsPrograms):
    """Rewards the last token of a response, among all of its tokens."""

    WRITES: ClassVar = {"inference": ("dense_rewards",)}
    right: float = 1.0

    def inference(self, model, data, mb_spec):
        lengths = data.seqlens["packed_input_ids"]
        rewards = torch.zeros(sum(data.flat_seqlens("packed_input_ids")))
        for number, text in enumerate(response_texts(model.data_tokenizer, data)):
            end = sum(data.flat_seqlens("packed_input_ids")[: number + 1]) - 1
            rewards[end] = self.right * (text == "2+2")
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"dense_rewards": lengths}, data={"dense_rewards": rewards}
        )


def test_a_reward_of_each_token_is_tried_on_the_texts_of_its_examples():
    """Its argument has an effect on such texts alone; they state no rewards of responses."""
    with pytest.raises(pytest.skip.Exception, match="gives no `rewards`"):
        examples_hold(RewardsEachSum)
    batches = partial(make_batch, ["packed_input_ids", "prompt_mask"])
    effects = effects_of(RewardsEachSum, batches, byte_tokenizer())
    ArgumentChecks().test_every_argument_matters(RewardsEachSum, effects)


def test_a_mistake_in_an_inherited_method_is_located_at_the_class():
    """The file of a class that others inherit from holds no mistake of theirs."""

    class HasARule(TextReward):
        def score(self, response, answer):
            return 1.0

    assert place_of_call(HasARule(), "score_texts") == place_of(HasARule)
    assert place_of_call(RewardsEachSum(), "inference") == place_of(RewardsEachSum.inference)


@dataclass
class AsksItsRole(ModelInterface):
    """A judge, whose role thinks before it writes a number."""

    GENERATES: ClassVar = {"inference": {"prompt": (9,), "response": (4,)}}
    WRITES: ClassVar = {"inference": ("rewards",)}
    TURN: ClassVar = "<assistant>"
    END: ClassVar = -1

    def inference(self, model, data, mb_spec):
        texts = data.data["packed_input_ids"].split(data.flat_seqlens("packed_input_ids"))
        openings = [self.opening(model.tokenizer, text) for text in texts]
        thoughts = self.written(model, openings)
        pairs = zip(openings, thoughts, strict=True)
        numbers = self.written(model, [[*opening, *thought] for opening, thought in pairs])
        scores = [self.score(model.tokenizer.decode(number)) for number in numbers]
        ones = [[1] * len(group) for group in data.seqlens["packed_input_ids"]]
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"rewards": ones}, data={"rewards": torch.tensor(scores)}
        )

    def opening(self, tokenizer, text):
        digits = "".join(str(token) for token in text.tolist())
        asked = f"<user>{digits}{self.TURN}" if tokenizer.chat_template else digits
        return tokenizer(asked, add_special_tokens=False).input_ids

    def written(self, model, prompts):
        batch = SequenceSample.from_default(
            ids=[*range(len(prompts))],
            seqlens=[*map(len, prompts)],
            data={"packed_prompts": torch.tensor([*itertools.chain(*prompts)])},
        )
        settings = GenerationHyperparameters(max_new_tokens=4, greedy=True)
        written = model.module.generate(batch, model.tokenizer, settings, [0] * len(prompts))
        return [tokens.tolist()[: self.END] for tokens in written.tokens]

    def score(self, text):
        if not text:
            raise WorkerError("no score from the judge", code="F52")
        return float(text)


class KeepsTheEnd(AsksItsRole):
    END = None

    def score(self, text):
        return super().score(text[:1])


class LeavesItsTurnClosed(AsksItsRole):
    TURN = ""


class ScoresSilence(AsksItsRole):
    def score(self, text):
        return float(text or 0)


def ask(cls):
    batch = make_batch(["packed_input_ids"], [[(1, 2), (1, 3)]])
    inferring = CallTrial(cls, "inference", batch, DigitTokenizer())
    RewardChecks().test_a_role_is_asked_in_its_own_format(inferring)
    request = SimpleNamespace(getfixturevalue={"inferring": inferring}.__getitem__)
    RewardChecks().test_a_failing_helper_is_an_error(cls, request)


def test_a_judge_passes():
    ask(AsksItsRole)


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (KeepsTheEnd, "continues after the token that ended it"),
        (LeavesItsTurnClosed, "without the begin of its answer"),
        (ScoresSilence, "its role writes nothing"),
    ],
)
def test_a_mistake_of_a_judge_is_reported(cls, finding):
    with pytest.raises(Violation, match=finding):
        ask(cls)


class LikesFullStops(Compares):
    """A part of its reward is not for the answer."""

    def score(self, response, answer):
        return float(response.strip(".") == answer) + 0.2 * response.endswith(".")


class LikesFullStopsAlone(Compares):
    def score(self, response, answer):
        return 0.2 * response.endswith(".")


def test_the_form_of_a_right_response_tells_answers_apart():
    assert accepted_form(LikesFullStops(), ANSWERS) == "{answer}"
    assert accepted_form(LikesFullStopsAlone(), ANSWERS).endswith("{answer}.")


# -- rewards without answers ---------------------------------------------------------------------


@dataclass(kw_only=True)
class Lays(ModelInterface):
    """A share of its reward for each tag; the other classes have one mistake each."""

    READS: ClassVar = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar = {"inference": ("rewards",)}
    each: float = 0.5

    def __post_init__(self):
        if not 0 < self.each < 1:
            raise ValueError("each is between 0 and 1")

    def inference(self, model, data, mb_spec):
        texts = self.texts(model.data_tokenizer, data)
        rewards = torch.tensor(self.scored([self.score(text) for text in texts]))
        return one_each(data, {"rewards": rewards.to(torch.float32)}, {})

    def texts(self, tokenizer, data):
        return response_texts(tokenizer, data)

    def scored(self, scores):
        return scores

    def score(self, text):
        return self.each * ("<plan>" in text) + self.each * ("</plan>" in text)


class LaysInPrompts(Lays):
    def texts(self, tokenizer, data):
        return full_texts(tokenizer, data)


class LaysComparedWithTheBatch(Lays):
    def scored(self, scores):
        return [score - sum(scores) / max(len(scores), 1) for score in scores]


class LaysInAnyOrder(Lays):
    def scored(self, scores):
        return sorted(scores)


@dataclass(kw_only=True)
class ChecksAnArgumentAlone(TextReward):
    most: int = 5

    def __post_init__(self):
        if self.most < 1:
            raise ValueError("most is at least 1")

    def score(self, response, answer):
        return float(response[:5] == answer)


def trial_of(cls):
    """Inference as the contract tries it, of texts that the file of the class names."""
    batch = make_batch(cls.READS["inference"])
    return rule_trial(CallTrial(cls, "inference", batch, byte_tokenizer()), make_batch)


def test_a_rule_meets_the_texts_that_it_looks_for():
    assert {"<plan>", "</plan>", "<plan> a </plan>"} <= set(texts_for(Lays))
    trial = trial_of(Lays)
    assert len(set(trial.result.data["rewards"].tolist())) == 3
    RewardChecks().test_a_response_is_scored_without_its_prompt(trial)
    InferenceChecks().test_inference_does_not_depend_on_the_order(trial)
    InferenceChecks().test_inference_does_not_depend_on_the_other_samples(trial)
    demand_use(Lays())


@pytest.mark.parametrize(
    ("cls", "check", "finding"),
    [
        (
            LaysInPrompts,
            RewardChecks.test_a_response_is_scored_without_its_prompt,
            "another prompt",
        ),
        (
            LaysComparedWithTheBatch,
            InferenceChecks.test_inference_does_not_depend_on_the_other_samples,
            "alone in the batch",
        ),
        (LaysInAnyOrder, InferenceChecks.test_inference_does_not_depend_on_the_order, "reversed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_of_a_rule_is_reported(cls, check, finding):
    with pytest.raises(Violation) as caught:
        check(None, trial_of(cls))
    assert finding in caught.value.finding


def test_an_argument_that_is_only_checked_is_reported():
    with pytest.raises(Violation, match="most has no effect: no method uses it"):
        demand_use(ChecksAnArgumentAlone())
