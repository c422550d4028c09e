import pytest
import torch

from rlcli.ops.packing import action_mask
from rlcli.ops.rewards import dense_rewards, overlong_penalties, shape_scores, token_rewards

NO_EOS = torch.tensor([False, True])


def test_scores_are_biased_then_scaled_then_clipped():
    scores = torch.tensor([3.0, -50.0])
    shaped = shape_scores(scores, NO_EOS, scaling=2.0, bias=1.0, clip=20.0)
    assert shaped.tolist() == [4.0, -20.0]
    assert shape_scores(scores, NO_EOS, mask_no_eos_with_zero=True).tolist() == [3.0, 0.0]
    masked = shape_scores(scores, NO_EOS, scaling=2.0, bias=1.0, mask_no_eos_with_zero=True)
    assert masked.tolist() == [4.0, 0.0]


def test_the_score_is_added_to_the_kl_penalty_of_the_last_response_token():
    prompt_mask = torch.tensor([True, True, False, False, True, False])
    mask = action_mask(prompt_mask, [4, 2])
    assert mask.tolist() == [False, True, True, True]
    kl = torch.tensor([float("nan"), 1.0, 2.0, -1.0])
    rewards = token_rewards(torch.tensor([5.0, 7.0]), kl, mask, [4, 2], kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([0.0, -0.1, -0.2 + 5.0, 0.1 + 7.0]))


def test_a_last_action_that_is_not_of_the_response_gets_no_score():
    mask = torch.tensor([True, False, False, True])
    rewards = token_rewards(torch.tensor([9.0, 1.0]), torch.zeros(4), mask, [3, 3], 0.1)
    assert rewards.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_a_sequence_without_actions_gets_no_reward():
    mask = torch.tensor([False, True])
    rewards = token_rewards(torch.tensor([9.0, 1.0, 9.0]), torch.zeros(2), mask, [1, 3, 1], 0.1)
    assert rewards.tolist() == [0.0, 1.0]


def test_the_soft_overlong_penalty_equals_that_worked_by_hand():
    """At most 10 tokens, the last 4 of which cost a quarter each."""
    lengths = torch.tensor([0, 1, 6, 7, 9, 10, 12])
    assert overlong_penalties(lengths, limit=10, buffer=4).tolist() == [
        0,
        0,
        0,
        -0.25,
        -0.75,
        -1,
        -1,
    ]


def test_dense_rewards_are_differences_or_scaled_scores():
    scores = torch.tensor([0.0, 0.5, 2.0, 1.0, 4.0])
    assert dense_rewards(scores, [3, 2], delta=True).tolist() == [0.5, 1.5, 3.0]
    assert dense_rewards(scores, [3, 2], delta=False, scaling=2.0, clip=5.0).tolist() == [
        1.0,
        4.0,
        5.0,
    ]
    total = token_rewards(
        torch.zeros(2),
        torch.zeros(3),
        torch.tensor([False, True, True]),
        [3, 2],
        0.0,
        dense_rewards(scores, [3, 2], True),
    )
    assert total.tolist() == [0.0, 1.5, 3.0]


def test_lengths_that_do_not_fit_the_mask_are_refused():
    with pytest.raises(ValueError, match="cannot describe"):
        action_mask(torch.zeros(3, dtype=torch.bool), [2, 2])
