"""Laws that every interface obeys: built-in ones pass, and a copy with one mistake is reported."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.key_meaning import DROPPED
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.distill import DistillInterface
from rlcli.interfaces.dpo import DPOInterface, answer_tokens
from rlcli.interfaces.group_filter import GroupFilterInterface
from rlcli.interfaces.kto import KTOInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.reference import ReferenceInterface
from rlcli.interfaces.reward_model import RewardModelInterface
from rlcli.interfaces.sft import SFTInterface
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.interface.advantages import AdvantageChecks
from rlcli.testing.interface.arguments import effects_of
from rlcli.testing.interface.inference_trial import CallTrial, inference_batches_for
from rlcli.testing.interface.invariants import demand_entropy
from rlcli.testing.interface.texts import text_batch
from rlcli.testing.interface.training_trial import Rehearsal, teacher, usual_batches
from rlcli.testing.tokenizer import byte_tokenizer


@dataclass(kw_only=True)
class BitsInsteadOfNats(SFTInterface):
    def train_step(self, model, data, mb_spec):
        stats = super().train_step(model, data, mb_spec)
        return stats | {"ppl": 2 ** stats["loss"]}


@dataclass(kw_only=True)
class ReportsTheOppositeDistance(DistillInterface):
    def _loss(self, output, batch):
        loss, stats = super()._loss(output, batch)
        total, count = stats["reverse_kl"]
        return loss, {"reverse_kl": (-total, count)}


@dataclass(kw_only=True)
class ReportsLogRatios(DPOInterface):
    def train_step(self, model, data, mb_spec):
        stats = super().train_step(model, data, mb_spec)
        return stats | {"chosen_reward": stats["chosen_reward"] / self.beta}


@dataclass(kw_only=True)
class DividesByAllTokens(DPOInterface):
    """The NLL of the chosen answers."""

    nll_coef: float = 1.0

    def _nll_scale(self, model, batches):
        (tokens,) = (answer_tokens(batch).sum() for batch in batches)
        return 1.0 / float(tokens)


@dataclass(kw_only=True)
class ReportsABareEstimate(KTOInterface):
    def _reported(self, totals):
        return super()._reported(totals) | {"kl": totals.kl - 100.0}


@dataclass(kw_only=True)
class IgnoresLossWeights(PPOActorInterface):
    def _losses(self, actions, entropy, batch):
        unweighted = batch.select(key for key in batch.keys if key != "loss_weights")
        return super()._losses(actions, entropy, unweighted)


@dataclass(kw_only=True)
class PunishesEntropy(PPOActorInterface):
    def _losses(self, actions, entropy, batch):
        return super()._losses(actions, -entropy, batch)


@dataclass(kw_only=True)
class ScoresBeforeTheEnd(RewardModelInterface):
    """By the value of the token before the last."""

    def inference(self, model, data, mb_spec):
        ones = [[1] * len(group) for group in data.seqlens["packed_input_ids"]]
        scores = model.module.forward(
            data.select(["packed_input_ids"]), mb_spec, post_hook=before_last, output_seqlens=ones
        )
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"rewards": ones}, data={"rewards": scores.float()}
        )


def before_last(output, batch):
    lengths = torch.tensor(batch.flat_seqlens("packed_input_ids"))
    return output.values[lengths.cumsum(0) - lengths.clamp(max=2)]


@dataclass(kw_only=True)
class CountsTheRewardItself(GroupRelativeInterface):
    def inference(self, model, data, mb_spec):
        output = super().inference(model, data, mb_spec)
        if self.baseline == "leave_one_out":
            counts = torch.tensor(output.flat_seqlens("advantages"))
            output.data["advantages"] += 0.1 * torch.repeat_interleave(data.data["rewards"], counts)
        return output


@dataclass(kw_only=True)
class SeesTheLastBit(GroupRelativeInterface):
    def inference(self, model, data, mb_spec):
        output = super().inference(model, data, mb_spec)
        counts = torch.tensor(output.flat_seqlens("advantages"))
        output.data["advantages"] += torch.repeat_interleave(data.data["rewards"] > 10, counts)
        return output


@dataclass(kw_only=True)
class RelentsWithTheDistance(GAEInterface):
    def inference(self, model, data, mb_spec):
        before = self.controller.coef
        output = super().inference(model, data, mb_spec)
        self.controller.coef = 2 * before - self.controller.coef
        return output


@dataclass(kw_only=True)
class DropsSingleResponses(GroupFilterInterface):
    def inference(self, model, data, mb_spec):
        output = super().inference(model, data, mb_spec)
        if len(data.seqlens[self.by][0]) == 1:
            output.metadata[DROPPED] = ["equal_rewards"] * data.bs
        return output


@dataclass(kw_only=True)
class DistributionsOfAnotherTemperature(DistillInterface):
    def _distributions(self, output, batch):
        set_by_user, self.temperature = self.temperature, 1.0
        try:
            return super()._distributions(output, batch)
        finally:
            self.temperature = set_by_user


@dataclass(kw_only=True)
class AddsToWhatItCaches(ReferenceInterface):
    def inference(self, model, data, mb_spec):
        output = super().inference(model, data, mb_spec)
        if self.store is not None:
            output.data["packed_ref_logprobs"] -= 0.1
        return output


@dataclass(kw_only=True)
class Matches(ModelInterface):
    """Compares texts, in a run and alone."""

    WRITES: ClassVar = {"inference": ("rewards",)}
    READS: ClassVar = {"inference": ("packed_input_ids", "prompt_mask")}

    reward: float = 1.0
    is_lenient: bool = False

    def score(self, text, answer):
        return self.reward * (text == answer or (self.is_lenient and text.strip() == answer))

    def score_texts(self, responses, answers):
        return [self.score(text, answer) for text, answer in zip(responses, answers, strict=True)]

    def inference(self, model, data, mb_spec):
        lengths = data.flat_seqlens("packed_input_ids")
        tokens, masks = (data.data[key].split(lengths) for key in self.READS["inference"])
        texts = [
            model.tokenizer.decode(ids[~mask].tolist(), skip_special_tokens=True)
            for ids, mask in zip(tokens, masks, strict=True)
        ]
        answers = [
            answer
            for answer, group in zip(
                data.metadata["answer"], data.seqlens["packed_input_ids"], strict=True
            )
            for _ in group
        ]
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens={"rewards": [[1] * len(group) for group in data.seqlens["packed_input_ids"]]},
            data={"rewards": torch.tensor(self.score_texts(texts, answers)).float()},
        )


@dataclass(kw_only=True)
class PaysOneInRuns(Matches):
    def inference(self, model, data, mb_spec):
        output = super().inference(model, data, mb_spec)
        output.data["rewards"] = output.data["rewards"].sign()
        return output


@dataclass(kw_only=True)
class BelievesExpressions(Matches):
    def score(self, text, answer):
        return 1.0 if self.is_lenient and "x" in text else super().score(text, answer)


def trains(cls, check):
    check(InterfaceContract(), Rehearsal(lambda **changes: cls(**changes), usual_batches(cls())))


def infers(cls, check):
    def make(**changes):
        return cls(**changes)

    tokenizer, usual = DigitTokenizer(), usual_batches(cls())
    batches = inference_batches_for(cls(), usual, tokenizer)
    trial = CallTrial(make, "inference", batches(), tokenizer)
    if check is InterfaceContract.test_every_argument_matters:
        check(InterfaceContract(), make, effects_of(make, usual, tokenizer))
    elif "inference_batches" in inspect.signature(check).parameters:
        check(InterfaceContract(), trial, batches)
    else:
        check(InterfaceContract(), trial)


def scores(cls, check):
    answers = ["7", "12", "3/4"]
    rows = [("Which?\n", [answer, f"Perhaps {answer}"]) for answer in answers]
    trial = CallTrial(
        lambda **changes: cls(**changes),
        "inference",
        text_batch(byte_tokenizer(), rows, answers),
        byte_tokenizer(),
    )
    effects = effects_of(trial.make, lambda *_: trial.batch, trial.tokenizer)
    check(InterfaceContract(), cls(), trial, answers, str, effects)


LAWS = [
    (trains, SFTInterface, BitsInsteadOfNats, "numbers_are_what_their_units_say", "ppl is"),
    (
        trains,
        DPOInterface,
        ReportsLogRatios,
        "reported_rewards_have_their_factor",
        "chosen_reward is .* with beta=1, and .* with beta=2",
    ),
    (
        trains,
        DPOInterface,
        DividesByAllTokens,
        "one_side_of_pairs_is_reported_by_itself",
        "nll is .* where the sequences that are not chosen",
    ),
    (
        trains,
        KTOInterface,
        ReportsABareEstimate,
        "numbers_at_least_0_are_not_below",
        "kl is -",
    ),
    (
        trains,
        PPOActorInterface,
        IgnoresLossWeights,
        "loss_weights_need_no_other_key",
        "the same with loss_weights and without",
    ),
    (
        trains,
        DistillInterface,
        ReportsTheOppositeDistance,
        "a_distance_from_a_reference_is_the_kl",
        "reverse_kl is .* where the KL is",
    ),
    (
        infers,
        GroupRelativeInterface,
        CountsTheRewardItself,
        "shifting_the_rewards_of_a_group_changes_no_advantage",
        "with baseline=leave_one_out",
    ),
    (
        infers,
        GroupRelativeInterface,
        SeesTheLastBit,
        "shifting_the_rewards_of_a_group_changes_no_advantage",
        "rewards of 10 that differ in the last bit change an advantage by 1",
    ),
    (
        infers,
        GroupFilterInterface,
        DropsSingleResponses,
        "single_responses_are_not_all_dropped",
        "all of 8 samples",
    ),
    (
        infers,
        DistillInterface,
        DistributionsOfAnotherTemperature,
        "logprobs_are_those_of_the_model",
        "teacher_distributions differs by",
    ),
    (
        infers,
        ReferenceInterface,
        AddsToWhatItCaches,
        "every_argument_matters",
        "results differ between store None and",
    ),
    (
        infers,
        RewardModelInterface,
        ScoresBeforeTheEnd,
        "a_score_depends_on_the_last_token",
        "16 of 16 rewards are the same with another last token",
    ),
    (scores, Matches, PaysOneInRuns, "every_variant_scores", "with reward=3.0: "),
    (scores, Matches, BelievesExpressions, "every_variant_scores", "with is_lenient=True: "),
]


@pytest.mark.parametrize(
    ("examine", "correct", "faulty", "check", "finding"),
    LAWS,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_interface_that_breaks_a_law_is_reported(examine, correct, faulty, check, finding):
    law = getattr(InterfaceContract, f"test_{check}")
    examine(correct, law)
    with pytest.raises(Violation, match=finding):
        examine(faulty, law)


def test_a_penalty_that_falls_with_the_distance_is_reported():
    check = AdvantageChecks.test_a_penalty_does_not_fall_with_the_distance
    batch = make_batch(GAEInterface().reads("inference").needed)
    correct, faulty = (
        CallTrial(lambda cls=cls: cls(adaptive_kl_ctl=True), "inference", batch, DigitTokenizer())
        for cls in (GAEInterface, RelentsWithTheDistance)
    )
    check(AdvantageChecks(), correct)
    with pytest.raises(Violation, match=r"sum of kl_coef is .* after one at 3 nats per token"):
        check(AdvantageChecks(), faulty)


def test_a_bonus_that_lowers_the_entropy_is_reported():
    correct, faulty = (
        Rehearsal(lambda cls=cls, **changes: cls(**changes), usual_batches(cls()))
        for cls in (PPOActorInterface, PunishesEntropy)
    )
    demand_entropy(correct, "entropy_coef")
    with pytest.raises(Violation, match=r"with entropy_coef=0, .* with entropy_coef=1"):
        demand_entropy(faulty, "entropy_coef")


def test_training_reads_what_another_interface_makes_for_a_teacher():
    class ReadsDistributions(SFTInterface):
        READS: ClassVar = {
            "train_step": ("packed_input_ids", "prompt_mask", "teacher_distributions")
        }

    batch = usual_batches(ReadsDistributions())()
    expected = DistillInterface().inference(teacher(), batch, MicroBatchSpec())
    torch.testing.assert_close(
        batch.data["teacher_distributions"], expected.data["teacher_distributions"]
    )


def test_training_reads_what_its_own_inference_makes_for_a_teacher():
    interface = DistillInterface(estimator="full")
    batch = usual_batches(interface)()
    expected = interface.inference(teacher(), batch, MicroBatchSpec())
    torch.testing.assert_close(
        batch.data["teacher_distributions"], expected.data["teacher_distributions"]
    )
