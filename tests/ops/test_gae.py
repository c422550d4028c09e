import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcli.ops.gae import TurnSteps, gae


def slow_gae(rewards, values, lengths, bootstrap, discount, gae_lambda):
    """GAE by its definition, one sequence and one action at a time."""
    advantages, returns = [], []
    token = action = 0
    for length, cut in zip(lengths, bootstrap, strict=True):
        v = values[token : token + length]
        r = rewards[action : action + length - 1]
        v = [*v[:-1], v[-1] if cut else 0.0]
        result, running = [0.0] * (length - 1), 0.0
        for t in reversed(range(length - 1)):
            delta = r[t] + discount * v[t + 1] - v[t]
            running = delta + discount * gae_lambda * running
            result[t] = running
        advantages += result
        returns += [a + b for a, b in zip(result, v, strict=False)]
        token, action = token + length, action + length - 1
    return advantages, returns


def run(rewards, values, lengths, bootstrap, discount=1.0, gae_lambda=1.0):
    return gae(
        torch.tensor(rewards),
        torch.tensor(values),
        lengths,
        torch.tensor(bootstrap),
        discount,
        gae_lambda,
    )


def test_gae_of_an_ended_response_worked_by_hand():
    advantages, returns = run([0.0, 0.0, 1.0], [0.5, 0.4, 0.3, 9.0], [4], [False])
    torch.testing.assert_close(advantages, torch.tensor([0.5, 0.6, 0.7]))
    torch.testing.assert_close(returns, torch.tensor([1.0, 1.0, 1.0]))


def test_gae_with_lambda_worked_by_hand():
    advantages, _ = run([0.0, 0.0, 1.0], [0.5, 0.4, 0.3, 9.0], [4], [False], gae_lambda=0.95)
    torch.testing.assert_close(advantages, torch.tensor([0.43675, 0.565, 0.7]))


def test_gae_of_a_truncated_response_bootstraps():
    advantages, _ = run([0.0, 0.0, 1.0], [0.5, 0.4, 0.3, 0.2], [4], [True])
    torch.testing.assert_close(advantages, torch.tensor([0.7, 0.8, 0.9]))


EPISODE = torch.tensor([True, True, False, True, True])
"""Two turns of two tokens each, with an observed one between them."""


def of_turns(gae_lambda, turn_discount, mask=EPISODE):
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0])
    values = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    ended, turns = torch.tensor([False]), TurnSteps(mask, turn_discount)
    return gae(rewards, values, [6], ended, 1.0, gae_lambda, turns)


def test_gae_over_turns_worked_by_hand():
    """Deltas 0.2 - 0.1, 1 + 0.5 * 0.4 - 0.2, 0.5 - 0.4 and 2 - 0.5: the value 0.3, after what was
    observed began, is not read."""
    advantages, returns = of_turns(1.0, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([1.9, 1.8, 0.0, 1.6, 1.5]))
    torch.testing.assert_close(returns[EPISODE], torch.tensor([2.0, 2.0, 2.0, 2.0]))


def test_gae_over_turns_with_lambda_worked_by_hand():
    advantages, _ = of_turns(0.8, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([1.316, 1.52, 0.0, 1.3, 1.5]))


def test_a_single_turn_is_not_discounted():
    """A turn that begins after its prompt follows no other turn."""
    mask = torch.tensor([False, True, True, True, True])
    advantages, _ = of_turns(1.0, 0.5, mask)
    torch.testing.assert_close(advantages[1:], torch.tensor([2.8, 1.7, 1.6, 1.5]))


def test_turns_of_one_sequence_do_not_follow_those_of_another():
    mask = torch.tensor([True, False, True, False, True])
    owner = torch.tensor([0, 0, 1, 1, 1])
    assert TurnSteps(mask, 0.5).begins(owner).tolist() == [False, False, False, False, True]
    assert TurnSteps(mask[:0], 0.5).begins(owner[:0]).tolist() == []


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=0, max_size=6))
    number = st.floats(-3, 3, width=32)
    values = draw(st.lists(number, min_size=sum(lengths), max_size=sum(lengths)))
    n_actions = sum(lengths) - len(lengths)
    rewards = draw(st.lists(number, min_size=n_actions, max_size=n_actions))
    bootstrap = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    factor = st.floats(0, 1)
    return rewards, values, lengths, bootstrap, draw(factor), draw(factor)


@given(batches())
def test_gae_equals_its_definition(batch):
    rewards, values, lengths, bootstrap, discount, gae_lambda = batch
    tensors = (
        torch.tensor(rewards),
        torch.tensor(values),
        lengths,
        torch.tensor(bootstrap, dtype=torch.bool),
    )
    before = [t.clone() for t in tensors[:2]]
    advantages, returns = gae(*tensors, discount, gae_lambda)
    expected = slow_gae(*batch)
    torch.testing.assert_close(advantages, torch.tensor(expected[0]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, torch.tensor(expected[1]), atol=1e-5, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=False)), (
        "inputs were mutated"
    )


def test_a_nan_spoils_only_its_own_sequence():
    generator = torch.Generator().manual_seed(0)
    lengths = [1000, 3, 517]
    values, rewards = torch.randn(1520, generator=generator), torch.randn(1517, generator=generator)
    expected = slow_gae(
        rewards.tolist(), values.tolist(), lengths, [True, True, False], 0.99, 0.95
    )[0]
    values[1001] = float("nan")  # spoils its own sequence only
    advantages, _ = gae(rewards, values, lengths, torch.tensor([True, True, False]), 0.99, 0.95)
    torch.testing.assert_close(advantages[:999], torch.tensor(expected[:999]), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        advantages[1001:], torch.tensor(expected[1001:]), atol=1e-4, rtol=1e-4
    )
    assert advantages[999:1001].isnan().any()
