"""Interfaces whose declared head differs from the one that they use."""

from __future__ import annotations

from typing import ClassVar

import pytest

from rlcli.api.data import SequenceSample
from rlcli.api.model import ModelInterface
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.contract import Violation
from rlcli.testing.interface.heads import HeadChecks
from rlcli.testing.interface.inference_trial import CallTrial
from rlcli.testing.interface.training_trial import Rehearsal, usual_batches


class SumsValues(ModelInterface):
    """Trains, evaluates and infers with the value head."""

    READS: ClassVar = {
        "train_step": ("packed_input_ids",),
        "evaluate": ("packed_input_ids",),
        "inference": ("packed_input_ids",),
    }
    HEAD: ClassVar = {"train_step": ("value",), "evaluate": ("value",), "inference": ("value",)}

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(
            data, total_value, sequences, mb_spec=mb_spec, version_steps=0
        )

    def evaluate(self, model, eval_dataloader):
        return model.module.eval_batch(next(iter(eval_dataloader)), total_value, sequences)

    def inference(self, model, data, mb_spec):
        lengths = data.seqlens["packed_input_ids"]
        values = model.module.forward(
            data, mb_spec, post_hook=lambda output, _: output.values, output_seqlens=lengths
        )
        return SequenceSample.from_default(
            ids=data.ids, seqlens={"values": lengths}, data={"values": values.float()}
        )


def total_value(output, batch):
    return output.values.square().sum()


def sequences(batch):
    return len(batch.flat_seqlens("packed_input_ids"))


class AsksForAnotherHead(SumsValues):
    HEAD: ClassVar = {"train_step": ("lm",), "evaluate": ("lm",), "inference": ("lm",)}


class AsksForTwoHeads(SumsValues):
    HEAD: ClassVar = {
        "train_step": ("value", "lm"),
        "evaluate": ("value", "lm"),
        "inference": ("value", "lm"),
    }


class AsksForNoHead(SumsValues):
    HEAD: ClassVar = {"train_step": ("critic",), "evaluate": ("critic",), "inference": ("critic",)}


class SaysNothing(ModelInterface):
    READS = SumsValues.READS
    train_step = SumsValues.train_step
    evaluate = SumsValues.evaluate
    inference = SumsValues.inference


CALLS = ("training", "evaluation", "inference")


class Checks(HeadChecks):
    """The checks of a built-in interface: what it leaves unsaid is a violation."""

    def tell_unsaid(self, unsaid, record_property):
        for violation in unsaid:
            raise violation


def check(cls, call):
    batches = usual_batches(cls())
    if call == "inference":
        calls = CallTrial(
            lambda **changes: cls(), "inference", make_batch(["packed_input_ids"]), DigitTokenizer()
        )
        return Checks().test_inference_uses_the_head_that_it_declares(calls, print)
    rehearsal = Rehearsal(lambda **changes: cls(), batches)
    if call == "training":
        return Checks().test_training_uses_the_head_that_it_declares(rehearsal, print)
    return Checks().test_evaluation_uses_the_head_that_it_declares(rehearsal.make, rehearsal, print)


@pytest.mark.parametrize("call", CALLS)
def test_the_declared_head_may_be_used(call):
    check(SumsValues, call)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (AsksForAnotherHead, r"HEAD names lm, which it does not use \(it uses value\)"),
        (AsksForTwoHeads, "HEAD names lm, which it does not use"),
        (AsksForNoHead, "HEAD names critic for .*, which is not a head"),
        (SaysNothing, "uses the head value, but it is not in HEAD"),
    ],
)
def test_a_head_other_than_the_declared_is_a_violation(cls, message, call):
    with pytest.raises(Violation, match=message):
        check(cls, call)
