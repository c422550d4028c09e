"""Calls that compare the samples of a step, and training on what they write:
each mistake is found by its check."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import ModelInterface
from rlcli.ops.packing import action_mask
from rlcli.testing.batches import PAIRS, DigitTokenizer, make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import CallTrial
from rlcli.testing.interface.training_trial import Rehearsal, usual_batches

# -- a call that compares --------------------------------------------------------------------------


class Compares(ModelInterface):
    """Log-probs of tokens against their mean over the responses of all ranks;
    each class below has one mistake."""

    READS: ClassVar = {"inference": ("packed_input_ids", "prompt_mask", "packed_logprobs")}
    WRITES: ClassVar = {"inference": ("advantages", "old_logprobs")}
    TAKES_BATCH: ClassVar = ("inference",)

    def __init__(self):
        self.mean = 0.0

    def inference(self, model, data, mb_spec):
        lengths, logprobs = data.flat_seqlens("packed_input_ids"), data.data["packed_logprobs"]
        mask = action_mask(data.data["prompt_mask"], lengths)
        counted = self.counted(mask)
        total, count = self.reduced(
            model, torch.stack([logprobs[counted].double().sum(), counted.sum().double()])
        )
        self.mean = float(total / count.clamp(min=1))
        tensors = {
            "advantages": self.masked((logprobs - self.mean).float(), mask),
            "old_logprobs": torch.where(mask, logprobs, 0.0),
        }
        rows = data.seqlens["packed_logprobs"]
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens=dict.fromkeys(tensors, rows),
            data=tensors,
            metadata={"size": self.sums(data)},
        )

    def counted(self, mask):
        return mask

    def reduced(self, model, sums):
        return model.module.all_reduce(sums)

    def masked(self, advantages, mask):
        return torch.where(mask, advantages, 0.0)

    def sums(self, data):
        return [(float(sum(group)), len(group)) for group in data.seqlens["packed_input_ids"]]

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state):
        self.mean = state["mean"]


class ComparesOnOneRank(Compares):
    def reduced(self, model, sums):
        return sums


class ComparesPrompts(Compares):
    def counted(self, mask):
        return torch.ones_like(mask)


class RatesPrompts(Compares):
    def masked(self, advantages, mask):
        return advantages


class CountsInFloats(Compares):
    def sums(self, data):
        return [(total, float(count)) for total, count in super().sums(data)]


class ReportsByPlace(Compares):
    def sums(self, data):
        return [(float(place), 1) for place in range(data.bs)]


class RemembersItsShare(Compares):
    def sums(self, data):
        self.mean = float(data.bs)
        return super().sums(data)


class StaysAwayWithoutSamples(Compares):
    def reduced(self, model, sums):
        return super().reduced(model, sums) if sums[1] else sums


def batches_to_compare(lengths=PAIRS, seed=0):
    return make_batch(Compares.READS["inference"], lengths, seed)


def comparing(cls):
    return CallTrial(cls, "inference", batches_to_compare(), DigitTokenizer())


RANKS = "inference_is_the_same_on_any_ranks"
COMPARING = [
    (ComparesOnOneRank, RANKS, "between 1 rank and rank 0 of 2", "all_reduce"),
    (
        RemembersItsShare,
        RANKS,
        "state mean is 8 and 4 on 1 rank and rank 0 of 2",
        "same on all ranks",
    ),
    (ComparesPrompts, "only_responses_count", "with longer prompts", "action_mask"),
    (RatesPrompts, "only_responses_count", "advantages is not 0 for 48 actions", "action_mask"),
    (CountsInFloats, "inference_returns_plain_numbers", "the sum size of sample s0 is (", "an int"),
    (
        ReportsByPlace,
        "inference_does_not_depend_on_the_order",
        "the sum size of sample s7 is 7 of 1 once",
        "undo",
    ),
]


@pytest.mark.parametrize(("cls", "check", "finding", "cause"), COMPARING)
def test_mistake_in_comparing_samples_is_found(cls, check, finding, cause):
    method = getattr(InferenceChecks(), f"test_{check}")
    batches = {"inference_batches": batches_to_compare} if check == "only_responses_count" else {}
    method(comparing(Compares), **batches)
    with pytest.raises(Violation) as violation:
        method(comparing(cls), **batches)
    assert finding in violation.value.finding
    assert cause in violation.value.cause


def test_rank_without_samples_that_does_not_reduce_is_reported_at_once():
    with pytest.raises(RuntimeError, match="every rank calls all_reduce"):
        InferenceChecks().test_inference_is_the_same_on_any_ranks(
            comparing(StaysAwayWithoutSamples)
        )


def test_call_that_compares_samples_has_to_declare_it():
    class DoesNotSay(Compares):
        TAKES_BATCH: ClassVar = ()

    check = InferenceChecks().test_inference_does_not_depend_on_the_other_samples
    with pytest.raises(Violation, match="declare it in TAKES_BATCH"):
        check(comparing(DoesNotSay))
    with pytest.raises(pytest.skip.Exception, match="TAKES_BATCH"):
        check(comparing(Compares))


def test_copied_logprobs_are_not_compared_with_the_model():
    with pytest.raises(pytest.skip.Exception, match="computes no log-probs"):
        InferenceChecks().test_logprobs_are_those_of_the_model(comparing(Compares))


# -- advantages from rewards -----------------------------------------------------------------------


class Rates(Compares):
    """What each response earned against the mean of its prompt; each class below has one
    mistake."""

    READS: ClassVar = {"inference": ("packed_input_ids", "prompt_mask", "rewards")}
    WRITES: ClassVar = {"inference": ("advantages",)}

    def inference(self, model, data, mb_spec):
        lengths = data.flat_seqlens("packed_input_ids")
        mask = action_mask(data.data["prompt_mask"], lengths)
        pairs = data.data["rewards"].float().view(-1, 2)
        rated = self.rated(pairs - self.baseline(pairs)).flatten()
        of_actions = torch.repeat_interleave(rated, torch.tensor(lengths) - 1)
        rows = [[length - 1 for length in group] for group in data.seqlens["packed_input_ids"]]
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens={"advantages": rows},
            data={"advantages": self.masked(of_actions, mask)},
        )

    def baseline(self, pairs):
        return pairs.mean(1, keepdim=True)

    def rated(self, advantages):
        return advantages


class RatesTheWorseHigher(Rates):
    def rated(self, advantages):
        return -advantages


class SubtractsTheBaselineTwice(Rates):
    def baseline(self, pairs):
        return 2 * super().baseline(pairs)


class RatesTheNextPrompt(Rates):
    def rated(self, advantages):
        return advantages.roll(1, 0)


RATING = [
    (RatesTheWorseHigher, "lowers the advantages of its response by 0.5"),
    (SubtractsTheBaselineTwice, "by 0 on average, and those of others by -0.0667"),
    (RatesTheNextPrompt, "by 0 on average, and those of others by 0"),
]


@pytest.mark.parametrize(("cls", "finding"), RATING)
def test_mistake_in_advantages_from_rewards_is_found(cls, finding):
    def rating(cls):
        batch = make_batch(Rates.READS["inference"], PAIRS)
        return CallTrial(cls, "inference", batch, DigitTokenizer())

    check = InterfaceContract().test_a_higher_reward_raises_the_advantages_of_its_response
    check(rating(Rates))
    with pytest.raises(pytest.skip.Exception, match="makes no advantages from rewards"):
        check(comparing(Compares))
    with pytest.raises(Violation, match=finding):
        check(rating(cls))


# -- training on what it writes --------------------------------------------------------------------


class Learns(ModelInterface):
    """A policy gradient with weights for some tokens; each class below has one mistake."""

    READS: ClassVar = {
        "train_step": (
            "packed_input_ids",
            "advantages",
            "loss_mask",
            "loss_weights if given",
            "chosen if given",
        )
    }

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(
            data, self.loss, lambda batch: self.mask(batch).sum(), mb_spec=mb_spec
        )

    def mask(self, batch):
        return batch.data["loss_mask"] & self.chosen(batch)

    def chosen(self, batch):
        counts = torch.tensor([length - 1 for length in batch.flat_seqlens("packed_input_ids")])
        flags = batch.data.get("chosen", torch.ones(len(counts), dtype=torch.bool))
        return torch.repeat_interleave(flags, counts)

    def loss(self, output, batch):
        weights = batch.data.get("loss_weights", torch.ones(()))
        return -(output.logprobs * batch.data["advantages"] * weights)[self.mask(batch)].sum()


class LearnsWhatIsMasked(Learns):
    def mask(self, batch):
        return torch.ones_like(batch.data["loss_mask"]) & self.chosen(batch)


class LearnsWhatIsNotChosen(Learns):
    def chosen(self, batch):
        return ~super().chosen(batch) | True


class SkipsEverySeventhToken(Learns):
    def mask(self, batch):
        mask = super().mask(batch)
        return mask & (torch.arange(len(mask)) % 7 > 0)


class LearnsTheOpposite(Learns):
    def loss(self, output, batch):
        return -super().loss(output, batch)


class LearnsFromTheNextToken(Learns):
    def loss(self, output, batch):
        advantages = batch.data["advantages"].roll(-5)
        return -(output.logprobs * advantages)[self.mask(batch)].sum()


class NeedsItsWeights(Learns):
    def loss(self, output, batch):
        return super().loss(output, batch) * (1 if "loss_weights" in batch.keys else torch.nan)


class ForgetsItsWeights(Learns):
    def loss(self, output, batch):
        return -(output.logprobs * batch.data["advantages"])[self.mask(batch)].sum()


TRAINING = [
    (LearnsWhatIsMasked, "masked_tokens_get_no_gradient", "masked tokens get a gradient"),
    (LearnsWhatIsNotChosen, "masked_tokens_get_no_gradient", "masked tokens get a gradient"),
    (
        SkipsEverySeventhToken,
        "every_response_token_is_trained",
        "tokens that loss_mask keeps get no gradient",
    ),
    (
        LearnsTheOpposite,
        "a_reward_raises_its_own_response",
        "a higher advantage lowers its own response",
    ),
    (
        LearnsFromTheNextToken,
        "a_reward_raises_its_own_response",
        "a higher advantage of response i raises",
    ),
    (NeedsItsWeights, "works_with_what_it_declares", "loss is nan"),
    (
        ForgetsItsWeights,
        "reads_what_it_declares",
        "declares loss_weights, but does the same without it",
    ),
]


@pytest.mark.parametrize(("cls", "check", "finding"), TRAINING)
def test_mistake_in_training_on_advantages_is_found(cls, check, finding):
    method = getattr(InterfaceContract(), f"test_{check}")
    method(rehearsal=Rehearsal(lambda **_: Learns(), usual_batches(Learns())))
    with pytest.raises(Violation) as violation:
        method(rehearsal=Rehearsal(lambda **_: cls(), usual_batches(cls())))
    assert finding in violation.value.finding
