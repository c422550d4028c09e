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


def test_a_flag_with_which_state_is_lost_is_found():
    cls, tokenizer = ForgetsIfAdaptive, DigitTokenizer()
    batches = batches_with(cls().reads("inference"), make_batch)
    inferring = CallTrial(lambda **changes: cls(**changes), "inference", batches(), tokenizer)
    InferenceChecks().test_state_of_inference_comes_back(inferring)
    with pytest.raises(Violation, match=r"adaptive_kl_ctl=True, .* and a restarted one"):
        VariantChecks().test_every_variant_infers(inferring.make, batches, inferring, tokenizer)


def test_a_choice_with_which_prompts_are_trained_on_is_found():
    cls = TrainsOnPromptsIfWeighted
    rehearsal = Rehearsal(cls, usual_batches(cls()))
    with pytest.raises(Violation, match="with weighting=length: "):
        VariantChecks().test_every_variant_trains(cls, rehearsal, DigitTokenizer())


def test_a_flag_with_which_samples_are_compared_is_found():
    cls, tokenizer = ComparesIfCentred, DigitTokenizer()
    inferring = CallTrial(cls, "inference", make_batch(["packed_input_ids"]), tokenizer)
    with pytest.raises(Violation, match="with is_centred=True: "):
        VariantChecks().test_every_variant_infers(cls, usual_batches(cls()), inferring, tokenizer)


def test_what_has_no_flags_and_choices_is_skipped():
    rehearsal = Rehearsal(SFTInterface, usual_batches(SFTInterface()))
    with pytest.raises(pytest.skip.Exception, match="neither flags nor choices"):
        VariantChecks().test_every_variant_trains(SFTInterface, rehearsal, DigitTokenizer())
