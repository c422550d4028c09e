"""KTO, written out one answer at a time; `InterfaceContract` checks what holds for every
interface."""

import math

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec
from rlcli.interfaces.kto import KTOInterface
from rlcli.testing.batches import make_batch
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.tiny_engine import TinyLM, TinyOutput, TinyRanks, tiny_model

SPEC = MicroBatchSpec()
KEYS = KTOInterface().reads("train_step").needed
UNEVEN = [[(2, 3), (2, 4)], [(1, 2)], [(3, 0)], [(1, 6), (1, 1), (1, 0)], [(3, 2)]]
"""Samples of one to three answers: of one token, and two without any."""
VARIANTS = [
    {},
    {"beta": 0.5, "desirable_weight": 1.5},
    {"undesirable_weight": 0.3},
    {"loss": "apo_zero_unpaired", "beta": 0.3, "desirable_weight": 2.0},
]


class TestContract(InterfaceContract):
    name = "kto"
    args = {"beta": 0.3, "desirable_weight": 1.5}


@pytest.fixture
def answers():
    batch = make_batch(KEYS, UNEVEN)
    batch.data["desirable"] = torch.tensor([True, False, True, True, False, True, False, False])
    return batch


def log_ratios(module, batch, prefix="packed", mask="prompt_mask", reference="packed_ref_logprobs"):
    """For each sequence, its answer's log-prob less the reference's; None without a token."""
    lengths = batch.flat_seqlens(f"{prefix}_input_ids")
    tokens, masks = (batch.data[key].split(lengths) for key in (f"{prefix}_input_ids", mask))
    references = batch.data[reference].split([length - 1 for length in lengths])
    ratios = []
    for row, prompt, reference_row in zip(tokens, masks, references, strict=True):
        gaps = TinyOutput(module, row, [len(row)]).logprobs - reference_row
        answer = ~prompt[1:]
        ratios.append(gaps[answer].double().sum() if answer.any() else None)
    return ratios


def kl_by_hand(args, module, batch):
    if args.loss != "kto":
        return 0.0
    keys = (f"mismatched_{key}" for key in ("prompt_mask", "ref_logprobs"))
    ratios = [r for r in log_ratios(module, batch, "mismatched", *keys) if r is not None]
    return max(0.0, float(sum(ratios).detach()) / len(ratios))


def by_hand(args, module, batch):
    """(loss as it is minimised, number of answers, KL, mean reward of desirable answers, and of
    the others)."""
    kl = kl_by_hand(args, module, batch)
    losses, rewards = [], {True: [], False: []}
    labels = batch.data["desirable"].tolist()
    for ratio, good in zip(log_ratios(module, batch), labels, strict=True):
        if ratio is not None:
            value = torch.sigmoid(args.beta * (ratio - kl if good else kl - ratio))
            weight = args.desirable_weight if good else args.undesirable_weight
            losses.append(weight * (1 - value))
            rewards[good].append(args.beta * float(ratio.detach()))
    good, bad = (sum(side) / len(side) for side in rewards.values())
    return sum(losses) / len(losses), len(losses), kl, good, bad


@pytest.mark.parametrize(
    "settings", VARIANTS, ids=lambda settings: ",".join(map(str, settings.values())) or "kto"
)
def test_loss_and_gradient_are_those_of_the_formula(answers, settings):
    """loss and gradient of each variant are those of its formula"""
    args, model, twin = KTOInterface(**settings), tiny_model(), TinyLM()
    loss, weight, kl, good, bad = by_hand(args, twin, answers)
    loss.backward()
    stats = args.train_step(model, answers, SPEC)
    assert stats["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert stats["loss_weight"] == weight == 6
    assert stats.get("kl", 0.0) == pytest.approx(kl, rel=1e-6)
    assert (stats["desirable_reward"], stats["undesirable_reward"]) == pytest.approx((good, bad))
    assert stats["margin"] == pytest.approx(good - bad)
    for name in ("embedding", "head"):
        torch.testing.assert_close(
            model.module.gradient[name], getattr(twin, name).grad, atol=1e-6, rtol=1e-5
        )


def test_the_kl_of_a_closer_policy_is_not_below_0(answers):
    """a negative estimate of the KL counts as 0"""
    assert KTOInterface().train_step(tiny_model(), answers, SPEC)["kl"] > 0.5
    answers.data["mismatched_ref_logprobs"] = torch.zeros_like(
        answers.data["mismatched_ref_logprobs"]
    )
    below = KTOInterface().train_step(tiny_model(), answers, SPEC)
    without = KTOInterface(loss="apo_zero_unpaired").train_step(tiny_model(), answers, SPEC)
    assert below["kl"] == 0
    assert below["loss"] == pytest.approx(without["loss"])


@pytest.fixture
def two_answers():
    """A good and a bad one, of one token each."""
    two, ones, prompt = [[2], [2]], [[1], [1]], torch.tensor([True, False, True, False])
    columns = {
        "packed_input_ids": (two, torch.tensor([3, 4, 5, 6])),
        "prompt_mask": (two, prompt),
        "packed_ref_logprobs": (ones, torch.tensor([-4.302585, -3.302585])),
        "desirable": (ones, torch.tensor([True, False])),
        "mismatched_input_ids": (two, torch.tensor([3, 6, 5, 4])),
        "mismatched_prompt_mask": (two, prompt),
        "mismatched_ref_logprobs": (ones, torch.tensor([-3.302585, -2.302585])),
    }
    lengths = {key: column[0] for key, column in columns.items()}
    numbers = {key: column[1] for key, column in columns.items()}
    return SequenceSample.from_default(ids=["good", "bad"], seqlens=lengths, data=numbers)


def test_a_small_example_has_the_numbers_worked_out_by_hand(two_answers):
    """under a policy that gives each of ten tokens the same log-prob, -2.302585"""
    model = tiny_model(vocab=10)
    model.module.model.head.data.zero_()
    stats = KTOInterface(beta=1.0, undesirable_weight=3.0).train_step(model, two_answers, SPEC)
    # log-ratios 2 and 1, KL (1 + 0) / 2: 1 - σ(2 - 0.5) = 0.182426, 3 (1 - σ(0.5 - 1)) = 1.867378
    assert stats["kl"] == pytest.approx(0.5, abs=1e-6)
    assert stats["loss"] == pytest.approx((0.182426 + 1.867378) / 2, abs=1e-6)
    assert (stats["desirable_reward"], stats["undesirable_reward"]) == pytest.approx((2, 1))
    assert stats["desirable_logprob"] == pytest.approx(-math.log(10))


def test_evaluation_gives_the_training_loss_for_any_batches(answers):
    """evaluation reports what training would, over all batches"""
    args, model = KTOInterface(beta=0.3), tiny_model()
    parts = [answers.select_indices(indices) for indices in ([0, 3], [1], [2, 4])]
    evaluation = args.evaluate(model, parts)
    loss, count, kl, good, bad = by_hand(args, model.module.model, answers)
    expected = (float(loss.detach()), count, kl, good - bad)
    names = ("loss", "answers", "kl", "margin")
    assert [evaluation[name] for name in names] == pytest.approx(expected, rel=1e-6)
    assert args.evaluate(model, [])["answers"] == 0


def test_uneven_ranks_and_micro_batches_change_no_gradient(answers):
    """the KL is that of all ranks' answers"""
    alone, ranks = tiny_model(), TinyRanks(3)
    expected = KTOInterface().train_step(alone, answers, SPEC)

    def one_rank(rank):
        model = tiny_model(ranks=ranks, rank=rank)
        share = answers.select_indices([[1, 4], [], [0, 2, 3]][rank])
        return KTOInterface().train_step(model, share, MicroBatchSpec(n_mbs=2)), model

    for stats, model in ranks.run(one_rank):
        assert stats == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(model.module.gradient["head"], alone.module.gradient["head"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "bco"}, "loss is 'bco'; it must be one of kto, apo_zero_unpaired"),
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"desirable_weight": -1.0}, "desirable_weight is -1.0; it must be at least 0"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    """settings without a meaning are refused"""
    with pytest.raises(ValueError, match=message):
        KTOInterface(**settings)


@pytest.mark.parametrize(("desirable", "absent"), [(True, "undesirable"), (False, "desirable")])
def test_a_step_with_one_kind_of_answers_reports_no_mean_of_the_other(answers, desirable, absent):
    answers.data["desirable"][:] = desirable
    stats = KTOInterface(loss="apo_zero_unpaired").train_step(tiny_model(), answers, SPEC)
    assert {f"{absent}_reward", f"{absent}_logprob", "margin"}.isdisjoint(stats)
