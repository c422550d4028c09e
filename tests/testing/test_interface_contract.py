"""Interfaces with one fault: the contract reports its location, the number and the likely cause."""

import contextlib
import inspect
import random

import pytest
import torch

from rlcli.api.model import ModelInterface
from rlcli.ops.packing import action_mask
from rlcli.testing.batches import make_batch
from rlcli.testing.contract import Violation, place_of
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.interface.edge_cases import EdgeChecks
from rlcli.testing.interface.invariants import LawChecks
from rlcli.testing.interface.layouts import InvarianceChecks
from rlcli.testing.interface.learning import LearningChecks
from rlcli.testing.interface.training import TrainingChecks, lengths_of
from rlcli.testing.interface.training_trial import Rehearsal, usual_batches


class Correct(ModelInterface):
    """Likelihood of the answers; each faulty interface below changes one of its methods. As ports
    do, it sets the mode of the model, counts its version and saves it, which rlcli does as well."""

    READS = {
        "train_step": ("packed_input_ids", "prompt_mask"),
        "evaluate": ("packed_input_ids", "prompt_mask"),
    }

    def __init__(self):
        self.seen = 0

    def train_step(self, model, data, mb_spec):
        model.module.train()
        stats = model.module.train_batch(
            data, self.loss, self.weight, mb_spec=mb_spec, version_steps=model.version.global_step
        )
        model.inc_version()
        return stats

    def mask(self, batch):
        return action_mask(batch.data["prompt_mask"], batch.flat_seqlens("packed_input_ids"))

    def weight(self, batch):
        return self.mask(batch).sum()

    def loss(self, output, batch):
        return -output.logprobs[self.mask(batch)].sum()

    def save(self, model, save_dir):
        model.module.save_to_hf(tokenizer=model.tokenizer, save_dir=save_dir)


class Lean(Correct):
    """Leaves to rlcli what rlcli does, and lets groups be cut."""

    CUT = "sequence"

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(data, self.loss, self.weight, mb_spec=mb_spec, cut=self.CUT)


class ComparesWhatIsCut(Lean):
    """Each sequence against the longest of its group."""

    def loss(self, output, batch):
        weights = []
        for group in batch.seqlens["packed_input_ids"]:
            weights += [torch.full((length - 1,), length / max(group)) for length in group]
        return -(output.logprobs * torch.cat(weights))[self.mask(batch)].sum()


class CutsWithoutSayingSo(Lean):
    CUT = "sample"

    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(
            data, self.loss, self.weight, mb_spec=mb_spec, cut="sequence"
        )


class MeanOfTokens(Correct):
    def loss(self, output, batch):
        return -output.logprobs[self.mask(batch)].mean()


class MeanOfSamples(Correct):
    def loss(self, output, batch):
        return super().loss(output, batch) / batch.bs


class NormalisedInTheLoss(Correct):
    def loss(self, output, batch):
        scores = output.logprobs[self.mask(batch)]
        return ((scores - scores.mean()) * torch.arange(len(scores))).sum()


class StatIsAMean(Correct):
    def loss(self, output, batch):
        return super().loss(output, batch), {"confidence": output.logprobs.detach().exp().mean()}


class WeighsWhatItIsGiven(Correct):
    def weight(self, batch):
        return 7.0


class CountsPrompts(Correct):
    def weight(self, batch):
        return len(batch.data["prompt_mask"])


class TrainsPrompts(Correct):
    def loss(self, output, batch):
        return -output.logprobs.sum()


class TrainsAndCountsPrompts(TrainsPrompts, CountsPrompts):
    pass


class ShiftedByOne(Correct):
    def mask(self, batch):
        mask = super().mask(batch)
        return mask & mask.roll(1)


class Detached(Correct):
    def loss(self, output, batch):
        return super().loss(output, batch).detach() + 0 * output.logprobs.sum()


class AsksNothing(Correct):
    def loss(self, output, batch):
        return torch.zeros((), requires_grad=True) * 1.0


class Unfreezes(Correct):
    def train_step(self, model, data, mb_spec):
        for parameter in model.module.model.parameters():
            parameter.requires_grad_(True)
        return super().train_step(model, data, mb_spec)


class Refuses(Correct):
    def train_step(self, model, data, mb_spec):
        stats = model.module.train_batch(data, self.loss, self.weight, step_if=lambda stats: False)
        model.inc_version()
        return stats


class ReportsNaN(Correct):
    def train_step(self, model, data, mb_spec):
        return {**super().train_step(model, data, mb_spec), "kl": float("nan")}


class NeverTrains(Correct):
    def train_step(self, model, data, mb_spec):
        model.inc_version()
        return {"loss": 1.0}


class ReadsMore(Correct):
    READS = {"train_step": ("packed_input_ids", "prompt_mask")}

    def train_step(self, model, data, mb_spec):
        return {
            **super().train_step(model, data, mb_spec),
            "reward": float(data.data["rewards"].mean()),
        }


class ReadsMoreIfThere(Correct):
    def train_step(self, model, data, mb_spec):
        stats = super().train_step(model, data, mb_spec)
        return (
            {**stats, "solved": float(data.data["solved"].float().mean())}
            if "solved" in data.keys
            else stats
        )


class DeclaresMore(Correct):
    READS = {"train_step": ("packed_input_ids", "prompt_mask", "rewards")}


class ChangesItsInput(Correct):
    def train_step(self, model, data, mb_spec):
        data.data["prompt_mask"] |= data.data["packed_input_ids"] == 1
        return super().train_step(model, data, mb_spec)


class Shuffles(Correct):
    def train_step(self, model, data, mb_spec):
        order = random.sample(range(data.bs), data.bs)
        return {**super().train_step(model, data, mb_spec), "first": float(order[0])}


class CountsTwice(Correct):
    def train_step(self, model, data, mb_spec):
        model.inc_version()
        return super().train_step(model, data, mb_spec)


class LearnsAtRateZero(Correct):
    def train_step(self, model, data, mb_spec):
        return model.module.train_batch(
            data, self.loss, self.weight, mb_spec=mb_spec, version_steps=0
        )


class Forgets(Correct):
    def train_step(self, model, data, mb_spec):
        self.seen += 1
        return {**super().train_step(model, data, mb_spec), "seen": float(self.seen)}


class KeepsATensor(Correct):
    def state_dict(self):
        return {"seen": torch.zeros(1)}


class PerMicroBatch(Correct):
    def train_step(self, model, data, mb_spec):
        return {
            **super().train_step(model, data, mb_spec),
            "micro_batches": float(model.module.micro_batches),
        }


class PairsByPlace(Correct):
    def loss(self, output, batch):
        return super().loss(output, batch) * (1 + (batch.ids[0] == "s0"))


class PerRank(Correct):
    def train_step(self, model, data, mb_spec):
        return {**super().train_step(model, data, mb_spec), "samples": float(data.bs)}


class DoesTheOpposite(Correct):
    def loss(self, output, batch):
        return -super().loss(output, batch)


class DividesByNothing(Correct):
    def train_step(self, model, data, mb_spec):
        return {
            **super().train_step(model, data, mb_spec),
            "spread": float(torch.zeros(1) / (data.bs - 1)),
        }


class Reinforced(Correct):
    """A correct policy gradient with a KL penalty."""

    READS = {
        "train_step": (
            "packed_input_ids",
            "prompt_mask",
            "packed_logprobs",
            "packed_ref_logprobs",
            "rewards",
        )
    }

    def advantages(self, batch):
        """[N]"""
        counts = [length - 1 for length in batch.flat_seqlens("packed_input_ids")]
        kl = (batch.data["packed_logprobs"] - batch.data["packed_ref_logprobs"]) * self.mask(batch)
        return batch.data["rewards"] - self.kl_weight * torch.stack(
            [one.sum() for one in kl.split(counts)]
        )

    kl_weight = 0.1

    def loss(self, output, batch):
        counts = torch.tensor([length - 1 for length in batch.flat_seqlens("packed_input_ids")])
        advantages = torch.repeat_interleave(self.advantages(batch), counts)
        return -(output.logprobs * advantages)[self.mask(batch)].sum()


class RewardsTheNeighbour(Reinforced):
    def advantages(self, batch):
        return super().advantages(batch).roll(1)


class PaysForDistance(Reinforced):
    kl_weight = -0.1


class PunishesReward(Reinforced):
    def advantages(self, batch):
        return super().advantages(batch) - 2 * batch.data["rewards"]


class EvaluatesUnweighted(Correct):
    def evaluate(self, model, eval_dataloader):
        losses = [
            model.module.eval_batch(batch, self.loss, self.weight)["loss"]
            for batch in eval_dataloader
        ]
        return {"loss": sum(losses) / len(losses)}


def rehearsal_of(cls):
    return Rehearsal(lambda **changes: cls(), usual_batches(cls()))


@pytest.mark.parametrize(
    ("faulty", "check", "finding", "cause"),
    [
        (
            MeanOfTokens,
            "the_loss_is_a_sum",
            r"loss of 8 samples is [\d.]+ together and [\d.]+ one by",
            "over tokens",
        ),
        (MeanOfSamples, "the_loss_is_a_sum", "one by one", "over samples"),
        (
            MeanOfTokens,
            "micro_batches_change_nothing",
            "in 2 of them",
            "mean of the micro-batch; return a sum",
        ),
        (
            NormalisedInTheLoss,
            "the_loss_is_a_sum",
            "one by one",
            "depends on what shares its micro-batch",
        ),
        (StatIsAMean, "the_loss_is_a_sum", "the confidence", "sums"),
        (
            WeighsWhatItIsGiven,
            "the_loss_is_a_sum",
            "7 together and 56 one by one",
            "how many tokens",
        ),
        (CountsPrompts, "all_masked", "loss weight 10", "COUNTS_LEFT_OUT"),
        (CountsPrompts, "padding_changes_nothing", "with masked padding", "padding is counted"),
        (
            TrainsPrompts,
            "masked_tokens_get_no_gradient",
            r"\d+ of \d+ masked tokens get a",
            "action_mask",
        ),
        (
            ShiftedByOne,
            "every_response_token_is_trained",
            "the first token of each of",
            "shifted by one",
        ),
        (
            Detached,
            "gradient_reaches_every_parameter",
            "no gradient reaches the embedding",
            "detached",
        ),
        (
            AsksNothing,
            "gradient_reaches_every_parameter",
            "asks nothing of the model",
            "output.logprobs",
        ),
        (Refuses, "gradient_reaches_every_parameter", r"update_skipped is 1\.0", "step_if"),
        (Unfreezes, "frozen_parameters_stay", "frozen head changed by up to", "requires_grad"),
        (ReportsNaN, "the_loss_is_finite", "kl is nan", "finite"),
        (
            NeverTrains,
            "the_loss_is_finite",
            "never calls model.module.train_batch",
            "loss function",
        ),
        (ReadsMore, "works_with_what_it_declares", "KeyError: 'rewards'", "READS does not name"),
        (
            ReadsMoreIfThere,
            "reads_what_it_declares",
            "solved is nan without, .* with the key solved",
            "if given",
        ),
        (
            DeclaresMore,
            "reads_what_it_declares",
            "declares rewards, but does the same without",
            "READS",
        ),
        (
            ChangesItsInput,
            "its_input_stays_as_it_was",
            "entries of prompt_mask in its input",
            "copy",
        ),
        (Shuffles, "is_deterministic", "first is", "global random state"),
        (
            CountsTwice,
            "learning_rate_is_that_of_the_step",
            r"learning rate of \[4\]",
            "before anything increments it",
        ),
        (
            LearnsAtRateZero,
            "learning_rate_is_that_of_the_step",
            r"learning rate of \[0\]",
            "version_steps",
        ),
        (
            ComparesWhatIsCut,
            "groups_may_be_cut_where_it_says_so",
            "a micro-batch of its own",
            "compares sequences",
        ),
        (
            CutsWithoutSayingSo,
            "groups_may_be_cut_where_it_says_so",
            "CUT is 'sample', .* cut='sequence'",
            "rlcli plan",
        ),
        (
            Forgets,
            "goes_on_from_its_state",
            "seen is 2 without a break, 1 after a restart",
            "leaves out",
        ),
        (KeepsATensor, "goes_on_from_its_state", "state_dict is not JSON", "plain numbers"),
        (
            PerMicroBatch,
            "micro_batches_change_nothing",
            "micro_batches is 1 in one",
            "over a part of the batch",
        ),
        (PairsByPlace, "order_changes_nothing", "in one order", "rather than by sample"),
        (
            PairsByPlace,
            "micro_batches_change_nothing",
            "in one micro-batch",
            "that is not a sum",
        ),
        (
            PerRank,
            "ranks_change_nothing",
            "8 on one rank, 5 on 2 that have 5 samples",
            "one rank's share",
        ),
        (DoesTheOpposite, "it_learns", "log-prob of responses from .* it should rise", "sign"),
        (
            RewardsTheNeighbour,
            "a_reward_raises_its_own_response",
            "raises response i . 1 by",
            "paired by position",
        ),
        (
            PunishesReward,
            "a_reward_raises_its_own_response",
            "a higher reward lowers its own response",
            "a sign",
        ),
        (
            PaysForDistance,
            "a_reference_pulls_towards_itself",
            "lowers its own response",
            "the sign of the KL",
        ),
        (
            DividesByNothing,
            "edges_of_lengths",
            "a batch of one sample: spread becomes nan",
            "clamp",
        ),
        (
            TrainsAndCountsPrompts,
            "edges_of_lengths",
            "the weights still move",
            "that the mask keeps",
        ),
        (
            EvaluatesUnweighted,
            "evaluation_weighs_batches_by_their_tokens",
            "over the same in two",
            "weigh",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_faulty_interface_is_reported_with_its_cause(faulty, check, finding, cause):
    method = getattr(InterfaceContract(), f"test_{check}")
    arguments = {"make": faulty} if "evaluation" in check else {}
    with pytest.raises(Violation) as caught:
        method(rehearsal=rehearsal_of(faulty), **arguments)
    caught.match(finding)
    assert cause in caught.value.cause
    assert str(caught.value.where).startswith(__file__)


@pytest.mark.parametrize("correct", [Correct, Lean, Reinforced])
@pytest.mark.parametrize(
    "checks", [TrainingChecks, InvarianceChecks, EdgeChecks, LearningChecks, LawChecks]
)
def test_a_correct_interface_passes(correct, checks):
    rehearsal = rehearsal_of(correct)
    for name, method in vars(checks).items():
        if name.startswith("test_") and "make" not in inspect.signature(method).parameters:
            with contextlib.suppress(pytest.skip.Exception):
                method(checks(), rehearsal)


@pytest.mark.parametrize(
    ("faulty", "check", "guilty"),
    [
        (CountsPrompts, "all_masked", CountsPrompts.weight),
        (WeighsWhatItIsGiven, "the_loss_is_a_sum", WeighsWhatItIsGiven.weight),
        (MeanOfTokens, "micro_batches_change_nothing", MeanOfTokens.loss),
        (DividesByNothing, "edges_of_lengths", DividesByNothing.train_step),
    ],
)
def test_the_location_is_the_function_with_the_fault(faulty, check, guilty):
    with pytest.raises(Violation) as caught:
        getattr(InterfaceContract(), f"test_{check}")(rehearsal_of(faulty))
    assert caught.value.where == place_of(guilty)


def test_lengths_are_read_from_a_batch():
    pairs = [[(2, 3), (2, 1)], [(1, 0)]]
    assert lengths_of(make_batch(["packed_input_ids", "prompt_mask"], pairs)) == pairs
