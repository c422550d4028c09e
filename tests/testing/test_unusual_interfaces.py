"""Correct interfaces unlike the built-in ones: without prompts, with pairs, keys of their own,
or state."""

import contextlib
import inspect
from typing import ClassVar

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import ModelInterface
from rlcli.ops.packing import action_mask
from rlcli.testing.batches import PAIRS, DigitTokenizer, make_batch
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.interface.edge_cases import EdgeChecks
from rlcli.testing.interface.inference import InferenceChecks
from rlcli.testing.interface.inference_trial import CallTrial, batches_with, usual_batch
from rlcli.testing.interface.invariants import LawChecks
from rlcli.testing.interface.layouts import InvarianceChecks
from rlcli.testing.interface.learning import LearningChecks
from rlcli.testing.interface.real_model import RealModelChecks
from rlcli.testing.interface.training import TrainingChecks
from rlcli.testing.interface.training_trial import Rehearsal, untried, usual_batches


class Trains(ModelInterface):
    def train_step(self, model, data, mb_spec):
        model.module.train()
        stats = model.module.train_batch(
            data, self.loss, self.weight, mb_spec=mb_spec, version_steps=model.version.global_step
        )
        model.inc_version()
        return stats

    def save(self, model, save_dir):
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)


class Pretrains(Trains):
    """Likelihood of whole texts: there are no prompts."""

    READS = {"train_step": ("packed_input_ids",)}

    def loss(self, output, batch):
        return -output.logprobs.sum()

    def weight(self, batch):
        lengths = batch.flat_seqlens("packed_input_ids")
        return sum(lengths) - len(lengths)


class FavoursLikelyTokens(Trains):
    """Raises the probability of tokens, not their log-prob (DFT): likely ones at first, at the
    expense of the others. Its loss, the weighted log-prob, rises."""

    READS = {"train_step": ("packed_input_ids", "prompt_mask")}

    def mask(self, batch):
        return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))

    def loss(self, output, batch):
        logprobs = output.logprobs[self.mask(batch)]
        return -(logprobs.detach().exp() * logprobs).sum()

    def weight(self, batch):
        return self.mask(batch).sum()


class AvoidsLikelyTokens(FavoursLikelyTokens):
    def loss(self, output, batch):
        return -super().loss(output, batch)


class PredictsRewards(Trains):
    """The value of each last token approaches the reward."""

    READS = {"train_step": ("packed_input_ids", "rewards")}

    def loss(self, output, batch):
        ends = torch.tensor(batch.flat_seqlens("packed_input_ids"), dtype=torch.long).cumsum(0) - 1
        return (output.values[ends] - batch.data["rewards"]).square().sum()

    def weight(self, batch):
        return len(batch.data["rewards"])


class ComparesPairs(Trains):
    """The first response of each pair becomes likelier than the second; the weight counts pairs."""

    READS = {"train_step": ("packed_input_ids", "prompt_mask")}
    NEEDS_GROUP = {"train_step": ("2",)}

    def mask(self, batch):
        return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))

    def scores(self, output, batch):
        return output.logprobs

    def loss(self, output, batch):
        counts = [length - 1 for length in batch.flat_seqlens("packed_input_ids")]
        gains = [
            one.sum()
            for one in torch.where(self.mask(batch), self.scores(output, batch), 0.0).split(counts)
        ]
        sizes = [len(group) for group in batch.seqlens["packed_input_ids"]]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        pairs = [
            gains[at + i + 1] - gains[at + i]
            for at, n in zip(starts, sizes, strict=True)
            for i in range(n - 1)
        ]
        return (
            torch.nn.functional.softplus(torch.stack(pairs)).sum()
            if pairs
            else output.logprobs.sum() * 0
        )

    def weight(self, batch):
        return sum(len(group) - 1 for group in batch.seqlens["packed_input_ids"])


class ComparesPairsWithAReference(ComparesPairs):
    READS = {"train_step": ("packed_input_ids", "prompt_mask", "packed_ref_logprobs")}

    def scores(self, output, batch):
        return output.logprobs - batch.data["packed_ref_logprobs"]


class PadsTheReference(ComparesPairsWithAReference):
    """Takes the sum over padding too."""

    def mask(self, batch):
        return torch.ones_like(super().mask(batch))


def rehearsal_of(cls):
    return Rehearsal(lambda **changes: cls(), usual_batches(cls()))


@pytest.mark.parametrize(
    "interface",
    [
        Pretrains,
        FavoursLikelyTokens,
        PredictsRewards,
        ComparesPairs,
        ComparesPairsWithAReference,
    ],
)
@pytest.mark.parametrize(
    "checks", [TrainingChecks, InvarianceChecks, EdgeChecks, LearningChecks, LawChecks]
)
def test_unusual_training_passes(interface, checks):
    rehearsal = rehearsal_of(interface)
    for name, method in vars(checks).items():
        if name.startswith("test_") and "make" not in inspect.signature(method).parameters:
            with contextlib.suppress(pytest.skip.Exception):
                method(checks(), rehearsal)


def test_padding_of_every_key_is_tested():
    check = InvarianceChecks().test_padding_changes_nothing
    check(rehearsal_of(ComparesPairsWithAReference))
    with pytest.raises(Violation, match="with masked padding"):
        check(rehearsal_of(PadsTheReference))


class SavesNoTokenizer(Pretrains):
    def save(self, model, save_dir):
        model.module.save_to_hf(tokenizer=None, save_dir=save_dir)


def test_a_model_is_saved_with_its_tokenizer(tmp_path):
    check = RealModelChecks().test_saves_what_transformers_loads
    check(rehearsal_of(Pretrains), tmp_path / "whole")
    with pytest.raises(Violation, match="no tokenizer"):
        check(rehearsal_of(SavesNoTokenizer), tmp_path / "half")


class Weighs(ModelInterface):
    """Rewards that are the author's own weights, times the number of samples seen."""

    READS: ClassVar = {"inference": ("packed_input_ids", "sequence_weight", "other if given")}
    WRITES: ClassVar = {"inference": ("rewards",)}
    seen = 0

    def inference(self, model, data, mb_spec):
        self.seen += data.bs
        return SequenceSample.from_default(
            ids=data.ids,
            seqlens={"rewards": data.seqlens["sequence_weight"]},
            data={"rewards": self.seen * data.data["sequence_weight"]},
        )

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class CountsInATensor(Weighs):
    def state_dict(self):
        return {"seen": torch.tensor(self.seen)}


class StartsAgain(Weighs):
    def load_state_dict(self, state):
        pass


def weighted(lengths=PAIRS, seed=0):
    batch = make_batch(["packed_input_ids", "rewards"], lengths, seed)
    batch.remap_keys_({"rewards": "sequence_weight"})
    return batch


def test_the_state_of_inference_must_be_restored():
    def check(cls):
        calls = CallTrial(cls, "inference", weighted(), DigitTokenizer())
        InferenceChecks().test_state_of_inference_comes_back(calls)

    check(Weighs)
    with pytest.raises(Violation, match="not JSON"):
        check(CountsInATensor)
    with pytest.raises(Violation, match="without a break and a restarted one"):
        check(StartsAgain)


def test_unknown_keys_come_from_the_batches_of_the_author():
    keys = Weighs().reads("inference")
    assert set(batches_with(keys, weighted)().keys) == {"packed_input_ids", "sequence_weight"}
    lacking = batches_with(keys, lambda *_: make_batch(["packed_input_ids"]))
    with pytest.raises(ValueError, match="the content of 'sequence_weight' is unknown"):
        lacking()
    with pytest.raises(pytest.skip.Exception, match="not tried: no batch"):
        usual_batch(lacking)
    violation = untried(
        "my-interface", "inference", "inference_batches", Weighs(), ValueError("why")
    )
    assert violation.where == place_of(Weighs)
    assert "tests/interfaces/test_my_interface.py a fixture `inference_batches`" in violation.cause


def test_what_makes_all_answers_less_likely_is_reported():
    with pytest.raises(Violation, match="the log-prob of responses"):
        LearningChecks().test_it_learns(rehearsal_of(AvoidsLikelyTokens))


class WidensMargins(FavoursLikelyTokens):
    """The squared error of the margin between the two sequences of a pair: at a learning rate at
    which others learn, this loss diverges."""

    def loss(self, output, batch):
        counts = [length - 1 for length in batch.flat_seqlens("packed_input_ids")]
        logprobs = (output.logprobs * self.mask(batch)).split(counts)
        chosen, rejected = torch.stack([each.sum() for each in logprobs]).view(-1, 2).unbind(1)
        return (chosen - rejected - 1).square().sum()

    def weight(self, batch):
        return len(batch.flat_seqlens("packed_input_ids")) // 2


class NarrowsMargins(WidensMargins):
    def loss(self, output, batch):
        loss = super().loss(output, batch)
        return loss.detach() * 2 - loss


def test_a_steep_loss_is_tried_with_smaller_steps():
    LearningChecks().test_it_learns(rehearsal_of(WidensMargins))
    with pytest.raises(Violation, match="minus the loss"):
        LearningChecks().test_it_learns(rehearsal_of(NarrowsMargins))
