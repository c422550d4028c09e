"""Interfaces that are wrong for one value of a flag or a choice only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.sft import SFTInterface
from rlcli.ops.packing import action_mask
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface.arguments import effects_of
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import CallTrial, batches_with
from rlcli.testing.interface.training_trial import Rehearsal, usual_batches
from rlcli.testing.interface.variants import VariantChecks


@dataclass(kw_only=True)
class TrainsOnPromptsIfWeighted(SFTInterface):
    """With weights by length, the mask is forgotten."""

    weighting: Literal["token", "length"] = "token"

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(data, self.loss, self.weight, mb_spec=mb_spec)

    def mask(self, batch):
        mask = action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))
        return mask if self.weighting == "token" else torch.ones_like(mask)

    def loss(self, output, batch):
        return -output.logprobs[self.mask(batch)].sum(), {}

    def weight(self, batch):
        return self.mask(batch).count_nonzero()


@dataclass(kw_only=True)
class ComparesIfCentred(SFTInterface):
    """Without a declaration that it takes the whole batch."""

    is_centred: bool = False

    def inference(self, model, data, mb_spec):
        scores = data.data["packed_input_ids"].float()
        if self.is_centred:
            scores = scores - scores.mean()
        lengths = data.seqlens["packed_input_ids"]
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"values": lengths}, data={"values": scores}
        )


@dataclass(kw_only=True)
class ForgetsIfAdaptive(GroupRelativeInterface):
    """Its coefficient starts again when a run is resumed."""

    def load_state_dict(self, state):
        pass


@dataclass(kw_only=True)
class AddsAPenalty(SFTInterface):
    """Of the length of responses, which trains nothing; its weight is off by default."""

    penalty: float = 0.0
    penalty_by: Literal["response", "micro_batch"] = "response"

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(data, self.loss, self.weight, mb_spec=mb_spec)

    def loss(self, output, batch):
        mask = self.mask(batch)
        nll = -output.logprobs[mask].sum()
        return nll * (1 + self.penalty * self.share(batch)), {}

    def share(self, batch):
        return 1.0 if self.penalty_by == "response" else 1.0 / batch.bs

    def mask(self, batch):
        return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))

    def weight(self, batch):
        return self.mask(batch).count_nonzero()


@dataclass(kw_only=True)
class PenalisesMicroBatches(AddsAPenalty):
    def share(self, batch):
        return 1.0 / batch.bs


def training_variants(cls, check=VariantChecks.test_every_variant_trains):
    batches = usual_batches(cls())
    check(VariantChecks(), Rehearsal(cls, batches), effects_of(cls, batches, DigitTokenizer()))


def inference_variants(inferring, batches):
    effects = effects_of(inferring.make, batches, inferring.tokenizer)
    VariantChecks().test_every_variant_infers(batches, inferring, effects)


def test_a_flag_with_which_state_is_lost_is_found():
    cls, tokenizer = ForgetsIfAdaptive, DigitTokenizer()
    batches = batches_with(cls().reads("inference"), make_batch)
    inferring = CallTrial(lambda **changes: cls(**changes), "inference", batches(), tokenizer)
    InferenceChecks().test_state_of_inference_comes_back(inferring)
    with pytest.raises(Violation, match=r"adaptive_kl_ctl=True, .* and a restarted one"):
        inference_variants(inferring, batches)


def test_a_choice_with_which_prompts_are_trained_on_is_found():
    with pytest.raises(Violation, match="with weighting=length: "):
        training_variants(TrainsOnPromptsIfWeighted)


def test_a_flag_with_which_samples_are_compared_is_found():
    cls, tokenizer = ComparesIfCentred, DigitTokenizer()
    inferring = CallTrial(cls, "inference", make_batch(["packed_input_ids"]), tokenizer)
    with pytest.raises(Violation, match="with is_centred=True: "):
        inference_variants(inferring, usual_batches(cls()))


def test_a_choice_that_matters_only_beside_another_argument_is_tried_there():
    with pytest.raises(Violation, match=r"with penalty=2\.0, penalty_by=micro_batch: "):
        training_variants(AddsAPenalty)


def test_a_number_that_is_off_by_default_is_tried():
    checks = VariantChecks.test_what_is_off_by_default_trains
    training_variants(AddsAPenalty, checks)
    with pytest.raises(Violation, match=r"with penalty=2\.0: "):
        training_variants(PenalisesMicroBatches, checks)


def test_what_has_no_flags_and_choices_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="neither flags nor choices"):
        training_variants(SFTInterface)
