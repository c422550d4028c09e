"""Interfaces with one mistake each: its check reports the observation and the usual cause."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from rlcli.api.config import MicroBatchSpec, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.key_meaning import DROPPED, SEQUENCES
from rlcli.api.model import ModelInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface.generation import PROMPTS, GenerationChecks, SamplingTrial
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import CallTrial, batches_with, telling_trial
from rlcli.testing.interface.training_trial import usual_batches


@dataclass
class Good(ModelInterface):
    """Correct log-probs; each of the other classes has one mistake."""

    READS: ClassVar = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar = {"inference": ("packed_logprobs",)}
    temperature: float = 1.0

    def inference(self, model, data, mb_spec):
        lengths = [[n - 1 for n in group] for group in data.seqlens["packed_input_ids"]]
        scores = model.module.forward(
            data, mb_spec, post_hook=self.scores, output_seqlens=lengths
        ).float()
        return self.packed(data, lengths, scores)

    def scores(self, output, batch):
        output.temperature = self.temperature
        return output.logprobs

    def packed(self, data, lengths, scores):
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"packed_logprobs": lengths}, data={"packed_logprobs": scores}
        )


class OtherKey(Good):
    WRITES: ClassVar = {"inference": ("packed_ref_logprobs",)}


class SecretKey(Good):
    READS: ClassVar = {"inference": ("packed_input_ids",)}

    def inference(self, model, data, mb_spec):
        assert data.data["prompt_mask"] is not None
        return super().inference(model, data, mb_spec)


class TurnedRound(Good):
    def packed(self, data, lengths, scores):
        return super().packed(data.reorder(list(range(data.bs))[::-1]), lengths, scores)


class OnePerToken(Good):
    def packed(self, data, lengths, scores):
        return super().packed(data, [[sum(group)] for group in lengths], scores)


class Doubled(Good):
    def packed(self, data, lengths, scores):
        return super().packed(data, lengths, scores.double())


class Infinite(Good):
    def packed(self, data, lengths, scores):
        return super().packed(data, lengths, scores / torch.zeros(()))


class WithGradient(Good):
    def packed(self, data, lengths, scores):
        return super().packed(data, lengths, scores.requires_grad_())


class Centred(Good):
    def packed(self, data, lengths, scores):
        return super().packed(data, lengths, scores - scores.mean())


class CentredInMicroBatches(Good):
    def scores(self, output, batch):
        logprobs = super().scores(output, batch)
        return logprobs - logprobs.mean()


class ByPlace(Good):
    """One number too many moves every sample but the first."""

    def packed(self, data, lengths, scores):
        return super().packed(data, lengths, scores + torch.arange(len(scores)) / 10)


class InPlace(Good):
    def inference(self, model, data, mb_spec):
        data.data["prompt_mask"].logical_not_()
        return super().inference(model, data, mb_spec)


class Trains(Good):
    def inference(self, model, data, mb_spec):
        model.inc_version()
        return super().inference(model, data, mb_spec)


class DropsOut(Good):
    def inference(self, model, data, mb_spec):
        output = super().inference(model, data, mb_spec)
        model.module.train()
        model.module.forward(data, mb_spec)
        return output


class Noisy(Good):
    def packed(self, data, lengths, scores):
        return super().packed(data, lengths, scores + 1e-4 * torch.rand(()))


class Cold(Good):
    def scores(self, output, batch):
        return output.logprobs


class Shifted(Good):
    def scores(self, output, batch):
        return super().scores(output, batch).roll(1)


class NoEmptyBatch(Good):
    def packed(self, data, lengths, scores):
        return super().packed(
            data, lengths, scores if data.bs else torch.zeros(0, dtype=torch.int64)
        )


class MockOfTokens(Good):
    def mock(self, interface_type, model, data):
        lengths = data.seqlens["packed_input_ids"]
        return self.packed(data, lengths, torch.zeros(sum(map(sum, lengths))))


class RandomMock(Good):
    def mock(self, interface_type, model, data):
        lengths = [[n - 1 for n in group] for group in data.seqlens["packed_input_ids"]]
        return self.packed(data, lengths, torch.rand(sum(map(sum, lengths))))


def inferring(cls):
    return CallTrial(
        cls, "inference", make_batch(["packed_input_ids", "prompt_mask"]), DigitTokenizer()
    )


PLAIN = "test_inference_returns_plain_numbers"
INFERENCE = [
    (
        OtherKey,
        "test_inference_returns_what_it_declares",
        "WRITES names packed_ref_logprobs",
        "take it out of WRITES",
    ),
    (
        SecretKey,
        "test_inference_reads_what_it_declares",
        "KeyError: 'prompt_mask'",
        "name in READS",
    ),
    (
        TurnedRound,
        "test_inference_returns_what_it_declares",
        "the samples in another order: s7, s6",
        "ids=data.ids",
    ),
    (
        OnePerToken,
        "test_inference_has_a_row_for_every_token_or_sequence",
        "has lengths [6], not",
        "[T - N]",
    ),
    (Doubled, PLAIN, "packed_logprobs is float64, not float32", ".float()"),
    (Infinite, PLAIN, "are not finite", "0 / 0"),
    (WithGradient, PLAIN, "carries a gradient", "no_grad"),
    (
        Centred,
        "test_inference_does_not_depend_on_the_other_samples",
        "when it is alone",
        "looks across samples",
    ),
    (
        Centred,
        "test_inference_is_the_same_on_any_ranks",
        "between 1 rank and rank 0 of 2, which holds 4",
        "from itself",
    ),
    (
        ByPlace,
        "test_inference_does_not_depend_on_the_order",
        "when the batch is reversed",
        "undo any sorting",
    ),
    (
        InPlace,
        "test_inference_leaves_everything_alone",
        "entries of prompt_mask in its input",
        "never in place",
    ),
    (Trains, "test_inference_leaves_everything_alone", "the version moved", "only a training step"),
    (
        DropsOut,
        "test_inference_leaves_everything_alone",
        "in training mode",
        "leave the mode alone",
    ),
    (Noisy, "test_inference_is_deterministic", "between two calls alike", "stable_seed"),
    (Cold, "test_logprobs_are_those_of_the_model", "at temperature 0.7", "those of temperature 1"),
    (Shifted, "test_logprobs_are_those_of_the_model", "at temperature 0.7", "of its token t + 1"),
    (
        NoEmptyBatch,
        "test_inference_of_no_samples",
        "of no samples has 0 rows of torch.int64",
        "dtype",
    ),
    (MockOfTokens, "test_mock_of_inference", "other lengths than the call's", "as many rows"),
    (RandomMock, "test_mock_of_inference", "between two mocks alike", "sample's id"),
]


@pytest.mark.parametrize(
    ("cls", "check", "finding", "cause"),
    INFERENCE,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_of_inference_is_reported_with_its_cause(cls, check, finding, cause):
    with pytest.raises(Violation) as caught:
        getattr(InferenceChecks(), check)(inferring(cls))
    assert finding in caught.value.finding
    assert cause in caught.value.cause
    assert caught.value.where.partition(":")[0] == __file__


def test_inference_that_depends_on_micro_batches_is_reported():
    with pytest.raises(Violation, match="between one micro-batch and 2"):
        InferenceChecks().test_inference_is_the_same_for_any_micro_batches(
            inferring(CentredInMicroBatches), MicroBatchSpec(n_mbs=2)
        )


@pytest.mark.parametrize(
    "check", sorted({check for _, check, *_ in INFERENCE if "mock" not in check})
)
def test_correct_inference_passes(check):
    getattr(InferenceChecks(), check)(inferring(Good))


class InUnitsOfItsOwn(PPOCriticInterface):
    def inference(self, model, data, mb_spec):
        values = model.module.forward(
            data, mb_spec, post_hook=lambda output, _: output.values
        ).float()
        lengths = data.seqlens["packed_input_ids"]
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"values": lengths}, data={"values": values}
        )


def test_values_in_other_units_than_the_reward_are_reported():
    check = InferenceChecks().test_values_come_in_the_units_of_the_reward
    check(PPOCriticInterface, usual_batches(PPOCriticInterface()))
    check(
        lambda: PPOCriticInterface(value_norm=False),
        usual_batches(PPOCriticInterface(value_norm=False)),
    )
    with pytest.raises(Violation, match=r"all returns are 10; values are .* off at first"):
        check(InUnitsOfItsOwn, usual_batches(InUnitsOfItsOwn()))


# -- generation ------------------------------------------------------------------------------------


class Sampler(PPOActorInterface):
    """Changes what it sampled, as `change` says."""

    def generate(self, model, data, mb_spec):
        output = super().generate(model, data, mb_spec)
        self.change(output.data, output)
        return output

    def change(self, tensors, output):
        pass


class WrongMask(Sampler):
    def change(self, tensors, output):
        tensors["prompt_mask"] = ~tensors["prompt_mask"]


class WrongEnds(Sampler):
    def change(self, tensors, output):
        tensors["seq_no_eos_mask"] = ~tensors["seq_no_eos_mask"]


class WrongPrompt(Sampler):
    def change(self, tensors, output):
        tensors["packed_input_ids"] = tensors["packed_input_ids"].flip(0)


class WrongScores(Sampler):
    def change(self, tensors, output):
        tensors["packed_logprobs"] = tensors["packed_logprobs"] * 0.7


class Endless(Sampler):
    def generate(self, model, data, mb_spec):
        self.generation = dataclasses.replace(self.generation, max_new_tokens=9)
        return super().generate(model, data, mb_spec)


class NeverGreedy(Sampler):
    def generate(self, model, data, mb_spec):
        self.generation = dataclasses.replace(self.generation, greedy=False)
        return super().generate(model, data, mb_spec)


class OtherSeeds(Sampler):
    """Gives its engine other seeds than it should."""

    def generate(self, model, data, mb_spec):
        sample = model.module.generate

        def generate(prompts, tokenizer, settings, seeds):
            return sample(prompts, tokenizer, settings, self.seeds(model, list(seeds)))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.module, "generate", generate)
            return super().generate(model, data, mb_spec)


class OneSeed(OtherSeeds):
    def seeds(self, model, seeds):
        return [seeds[0]] * len(seeds)


class ByPlaceInTheBatch(OtherSeeds):
    def seeds(self, model, seeds):
        return [stable_seed(model.seed, index) for index in range(len(seeds))]


class ByStep(OtherSeeds):
    def seeds(self, model, seeds):
        return [stable_seed(seed, model.version.global_step) for seed in seeds]


class FirstAttempt(Sampler):
    """Forgets the attempt number of its samples."""

    def generate(self, model, data, mb_spec):
        data_without_attempt = data.select(data.keys)
        data_without_attempt.metadata.pop("attempt", None)
        return super().generate(model, data_without_attempt, mb_spec)


GENERATION = [
    (
        WrongMask,
        "test_groups_are_in_the_order_of_the_prompts",
        (),
        "prompt_mask marks",
        "and on no other",
    ),
    (WrongPrompt, "test_groups_are_in_the_order_of_the_prompts", (), "its prompt is", "n // group"),
    (WrongEnds, "test_responses_keep_their_limits", (6,), "seq_no_eos_mask is", "was cut off"),
    (
        Endless,
        "test_responses_keep_their_limits",
        (1,),
        "tokens with max_new_tokens 1",
        "count the response alone",
    ),
    (
        WrongScores,
        "test_sampled_logprobs_are_those_of_the_model",
        (0.7,),
        "at temperature 0.7",
        "of its token t + 1",
    ),
    (NeverGreedy, "test_greedy_takes_the_likeliest_token", (), "greedy answers", "unchanged"),
    (ByStep, "test_generation_is_deterministic", (), "at the next step", "when it is sampled"),
    (
        FirstAttempt,
        "test_generation_is_deterministic",
        (),
        "another attempt gives the same responses",
        "attempt",
    ),
    (
        OneSeed,
        "test_responses_of_a_group_differ",
        (),
        "all 2 responses to a prompt are alike",
        "in the seed",
    ),
    (
        ByPlaceInTheBatch,
        "test_responses_do_not_depend_on_the_batch",
        (),
        "when it is alone in the batch",
        "not by its position",
    ),
]


def sampling(cls):
    return SamplingTrial(cls, make_batch(["packed_prompts"], PROMPTS), DigitTokenizer())


@pytest.mark.parametrize(
    ("cls", "check", "arguments", "finding", "cause"),
    GENERATION,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_mistake_of_generation_is_reported_with_its_cause(cls, check, arguments, finding, cause):
    getattr(GenerationChecks(), check)(sampling(PPOActorInterface), *arguments)
    with pytest.raises(Violation) as caught:
        getattr(GenerationChecks(), check)(sampling(cls), *arguments)
    assert finding in caught.value.finding
    assert cause in caught.value.cause


@dataclass
class DropsWhatWasCutOff(ModelInterface):
    READS: ClassVar = {"inference": ("packed_input_ids", "seq_no_eos_mask")}
    WRITES: ClassVar = {"inference": ()}
    DROPS: ClassVar = {"inference": ("cut_off",)}

    def inference(self, model, data, mb_spec):
        flags = data.data["seq_no_eos_mask"].split(
            [len(group) for group in data.seqlens[SEQUENCES]]
        )
        dropped = ["cut_off" if group.all() else None for group in flags]
        return SequenceSample(ids=data.ids, seqlens={}, data={}, metadata={DROPPED: dropped})


def test_what_drops_samples_is_tried_on_a_batch_of_which_it_drops_some():
    batches = batches_with(DropsWhatWasCutOff().reads("inference"), make_batch)
    trial = telling_trial(DropsWhatWasCutOff, batches, DigitTokenizer())
    assert set(trial.result.metadata[DROPPED]) == {"cut_off", None}
