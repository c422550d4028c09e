"""Losses of pairs: numbers worked by hand, limits, and what each setting does."""

import math

import pytest
import torch

from rlcli.ops.preference_losses import (
    PAIR_AGGREGATIONS,
    PREFERENCE_LOSSES,
    bradley_terry,
    chosen_and_rejected,
    prospect_loss,
    sequence_sums,
)

LEAD = torch.tensor([2.0, 0.0, -3.0], dtype=torch.float64)


def softplus(x):
    return math.log1p(math.exp(x))


@pytest.mark.parametrize(
    ("loss", "settings", "by_hand"),
    [
        ("sigmoid", {"beta": 0.5}, lambda lead: softplus(-0.5 * lead)),
        ("sigmoid", {"beta": 2.0, "gamma": 1.5}, lambda lead: softplus(1.5 - 2.0 * lead)),
        (
            "sigmoid",
            {"beta": 0.5, "label_smoothing": 0.2},
            lambda lead: 0.8 * softplus(-0.5 * lead) + 0.2 * softplus(0.5 * lead),
        ),
        (
            "robust",
            {"beta": 0.5, "label_smoothing": 0.2},
            lambda lead: (0.8 * softplus(-0.5 * lead) - 0.2 * softplus(0.5 * lead)) / 0.6,
        ),
        ("ipo", {"beta": 0.25}, lambda lead: (lead - 2.0) ** 2),
        ("hinge", {"beta": 0.5}, lambda lead: max(0.0, 1 - 0.5 * lead)),
    ],
)
def test_each_loss_equals_its_formula(loss, settings, by_hand):
    losses = PREFERENCE_LOSSES[loss](LEAD, **settings)
    assert losses.tolist() == pytest.approx([by_hand(lead) for lead in LEAD.tolist()], rel=1e-12)


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_every_loss_falls_when_the_chosen_answer_gains(loss):
    lead = torch.tensor([-1.0, 0.0, 0.5], requires_grad=True)
    PREFERENCE_LOSSES[loss](lead, beta=0.5).sum().backward()
    assert (lead.grad < 0).all()


def test_robust_without_label_noise_equals_sigmoid():
    sigmoid, robust = (PREFERENCE_LOSSES[name](LEAD, beta=0.3) for name in ("sigmoid", "robust"))
    torch.testing.assert_close(sigmoid, robust)


def test_robust_is_unbiased_under_label_noise():
    """The mean over labels that are turned round with probability ε is the loss with the right
    ones."""
    robust, share = PREFERENCE_LOSSES["robust"], 0.3
    mixed = (1 - share) * robust(LEAD, beta=1.0, label_smoothing=share) + share * robust(
        -LEAD, beta=1.0, label_smoothing=share
    )
    torch.testing.assert_close(mixed, PREFERENCE_LOSSES["sigmoid"](LEAD, beta=1.0))


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_losses_of_extreme_leads_are_finite(loss):
    lead = torch.tensor([-1e4, 1e4], requires_grad=True)
    losses = PREFERENCE_LOSSES[loss](lead, beta=1.0)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert lead.grad.isfinite().all()


def test_bradley_terry_applies_margin_and_centering():
    chosen, rejected = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 1.0])
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx(
        [softplus(-0.5), softplus(3.0)]
    )
    margins = torch.tensor([2.0, 0.0])
    assert bradley_terry(chosen, rejected, margins).tolist() == pytest.approx(
        [softplus(1.5), softplus(3.0)]
    )
    centred = bradley_terry(chosen, rejected, margins, centering=0.1)
    assert centred.tolist() == pytest.approx([softplus(1.5) + 0.225, softplus(3.0) + 0.1])


def test_only_centering_penalises_a_common_shift_of_scores():
    shift = torch.tensor(3.0, requires_grad=True)
    bradley_terry(shift + 1, shift - 1).backward()
    assert float(shift.grad) == 0
    bradley_terry(shift + 1, shift - 1, centering=0.5).backward()
    assert float(shift.grad) == pytest.approx(0.5 * 2 * 6 * 2)


def test_chosen_and_rejected_sequences_alternate():
    chosen, rejected = chosen_and_rejected(torch.arange(6))
    assert (chosen.tolist(), rejected.tolist()) == ([0, 2, 4], [1, 3, 5])


def test_sequence_sums_ignore_everything_outside_the_mask():
    actions = torch.tensor(
        [float("nan"), 1.0, 2.0, float("inf"), 4.0, float("nan")], requires_grad=True
    )
    mask = torch.tensor([False, True, True, False, True, False])
    sums = sequence_sums(actions, mask, [4, 1, 3, 2])
    assert sums.tolist() == [3.0, 0.0, 4.0, 0.0]
    sums.sum().backward()
    assert actions.grad.tolist() == [0, 1, 1, 0, 1, 0]


def test_pairs_or_prompts_have_equal_weights():
    counted = torch.tensor([True, True, True, True, False, False])
    pairs = [1, 2, 2, 1]
    assert PAIR_AGGREGATIONS["pair"](pairs, counted).tolist() == [1, 1, 1, 1, 0, 0]
    assert PAIR_AGGREGATIONS["prompt"](pairs, counted).tolist() == [1, 0.5, 0.5, 1, 0, 0]
    for aggregate in PAIR_AGGREGATIONS.values():
        assert aggregate([], counted[:0]).tolist() == []


def test_the_loss_of_an_answer_judged_alone_equals_its_formula():
    """1 - σ(0.5 (2 - 1)) and 1 - σ(0.5 (1 + 3)) = σ(-2)"""
    ratios, desirable = torch.tensor([2.0, -3.0]), torch.tensor([True, False])
    losses = prospect_loss(ratios, desirable, 1.0, beta=0.5)
    assert losses.tolist() == pytest.approx([1 / (1 + math.exp(0.5)), 1 / (1 + math.exp(2.0))])


def test_an_answer_judged_alone_is_pulled_its_way_most_at_the_reference_point():
    ratios = torch.tensor([-9.0, 1.0, 9.0] * 2, requires_grad=True)
    desirable = torch.tensor([True] * 3 + [False] * 3)
    prospect_loss(ratios, desirable, 1.0, beta=1.0).sum().backward()
    good, bad = ratios.grad.split(3)
    torch.testing.assert_close(good, -bad)
    assert float(good[1]) == pytest.approx(-0.25)
    assert (good[[0, 2]].abs() < 1e-3).all()
