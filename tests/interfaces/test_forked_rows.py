"""Responses of several rows: an engine computes each row by itself, and everything else counts the
response once."""

import copy

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.forked_rows import in_rows
from rlcli.api.model import MicroBatchSpec, call_interface
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.interfaces.reference import ReferenceInterface
from rlcli.interfaces.reward_model import RewardModelInterface
from rlcli.interfaces.rewards._text import full_texts, prompt_texts, response_texts
from rlcli.testing.batches import DigitTokenizer
from rlcli.testing.tiny_models import tiny_model

from .training import rate, with_settings
from .trl_parity import ours, role

PROMPT, TURN, OTHER, HEARD = [3, 4, 5, 6], [7, 8, 9, 10], [11, 12], [13, 14, 15]
FIRST, SECOND = PROMPT + TURN, PROMPT + OTHER + HEARD + TURN
"""Two rows: the template has written a turn as `OTHER`, and what follows is read after that."""
PLAIN = PROMPT + HEARD


def mask(context, turn):
    """True for the tokens that were not sampled."""
    return [True] * len(context) + [False] * len(turn)


FIRST_MASK, SECOND_MASK = mask(PROMPT, TURN), mask(PROMPT + OTHER + HEARD, TURN)
PLAIN_MASK = mask(PROMPT, HEARD)


def packed(sequences, masks, groups, **data):
    """A batch of samples that have so many sequences each."""
    lengths, rest = [], iter(map(len, sequences))
    for size in groups:
        lengths.append([next(rest) for _ in range(size)])
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    generator = torch.Generator().manual_seed(1)
    sampled = -torch.rand(len(tokens), generator=generator)
    return SequenceSample.from_default(
        ids=list(range(len(groups))),
        seqlens=lengths,
        data={
            "packed_input_ids": tokens,
            "prompt_mask": torch.tensor([flag for each in masks for flag in each]),
            "packed_logprobs": sampled[: len(tokens) - len(sequences)],
            "seq_no_eos_mask": torch.zeros(len(sequences), dtype=torch.bool),
            **data,
        },
    )


def forked(**data):
    """Two samples of two responses each; the first response has two rows."""
    sequences = [FIRST + SECOND, PLAIN, PLAIN, SECOND]
    masks = [FIRST_MASK + SECOND_MASK, PLAIN_MASK, PLAIN_MASK, SECOND_MASK]
    forks = torch.zeros(sum(map(len, sequences)), dtype=torch.bool)
    forks[len(FIRST)] = True
    return packed(sequences, masks, [2, 2], forks=forks, **data)


def as_rows(**data):
    """The same texts, each a sequence of its own."""
    masks = [FIRST_MASK, SECOND_MASK, PLAIN_MASK, PLAIN_MASK, SECOND_MASK]
    return packed([FIRST, SECOND, PLAIN, PLAIN, SECOND], masks, [3, 2], **data)


def without_bridge(numbers):
    """Of numbers of actions, those within rows."""
    bridge = len(FIRST) - 1
    return torch.cat([numbers[:bridge], numbers[bridge + 1 :]])


@pytest.fixture(scope="module")
def module():
    return tiny_model(seed=1)


def inferred(interface, module, batch, spec=None, **how):
    output = call_interface(
        interface, "inference", role(module, "inference"), batch, spec or MicroBatchSpec()
    )
    ((_, values),) = output.data.items()
    return values


def test_the_log_probs_of_a_row_are_those_of_a_sequence_of_its_own(module):
    of_responses = inferred(ReferenceInterface(), module, forked())
    assert len(of_responses) == len(forked().data["packed_logprobs"])
    of_rows = inferred(ReferenceInterface(), module, as_rows())
    assert without_bridge(of_responses).equal(of_rows)
    assert of_responses[len(FIRST) - 1] == 0, "nothing comes before the first token of a row"


def test_rows_do_not_depend_on_micro_batches(module):
    cut = inferred(ReferenceInterface(), module, forked(), MicroBatchSpec(n_mbs=3))
    torch.testing.assert_close(cut, inferred(ReferenceInterface(), module, forked()))


def test_the_values_of_a_row_are_those_of_a_sequence_of_its_own():
    critic = tiny_model(head="value", seed=2)
    interface = PPOCriticInterface()
    assert inferred(interface, critic, forked()).equal(inferred(interface, critic, as_rows()))


def test_a_reward_model_reads_the_last_row():
    judge = tiny_model(head="value", seed=2)
    rewards = inferred(RewardModelInterface(), judge, forked())
    of_rows = inferred(RewardModelInterface(), judge, as_rows())
    assert rewards.tolist() == of_rows[1:].tolist()


def test_texts_are_those_of_the_last_row_and_of_all_turns():
    batch, tokenizer = forked(), DigitTokenizer()
    first = [read(tokenizer, batch)[0] for read in (prompt_texts, response_texts, full_texts)]
    prompt, turn = (tokenizer.decode(ids) for ids in (SECOND[: -len(TURN)], TURN))
    assert first == [prompt, f"{turn}\n{turn}", prompt + turn]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("loss", ["ppo", "cispo", "dppo_tv"])
def test_training_on_rows_is_training_on_sequences_of_their_own(module, loss, micro_batches):
    """Wherever a loss is a sum over tokens."""
    policy = PPOActorInterface(minibatches=1, policy_loss=loss, early_stop_imp_ratio=None)
    pair = []
    for batch in (forked(), as_rows()):
        actions = ~without_first(batch, batch.data["prompt_mask"])
        old = without_first(batch, -batch.data["packed_input_ids"] / 4.0)
        advantages = without_first(batch, batch.data["packed_input_ids"] / 10.0 - 1)
        batch.update_(
            SequenceSample.from_default(
                ids=batch.ids,
                seqlens=batch.seqlens["packed_input_ids"],
                data={"loss_mask": actions, "old_logprobs": old, "advantages": advantages},
            )
        )
        pair.append(ours(policy, module, batch, micro_batches))
    (stats, gradients), (expected_stats, expected) = pair
    assert stats["loss"] == pytest.approx(expected_stats["loss"], rel=1e-6)
    assert stats["loss_weight"] == expected_stats["loss_weight"]
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def without_first(batch, values):
    """[T - N] from [T]."""
    pieces = values.split(batch.flat_seqlens("packed_input_ids"))
    return torch.cat([piece[1:] for piece in pieces])


def rated(interface, batch, module):
    output, _ = rate(interface, role(module, "inference"), batch)
    return output


def test_a_group_counts_a_response_of_several_rows_once(module):
    """Its baseline is the mean of two rewards, and both rows have the same advantage."""
    batch = forked(rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]))
    advantages = rated(GroupRelativeInterface(kl_ctl=0.0, scale="none"), batch, module)
    first = advantages.data["advantages"][: len(FIRST + SECOND) - 1]
    trained = advantages.data["loss_mask"][: len(FIRST + SECOND) - 1]
    assert trained.sum() == 2 * len(TURN), "each sampled token is trained on once"
    assert first[trained].unique().tolist() == [0.5]
    assert not trained[len(FIRST) - 1]


@pytest.mark.parametrize("loss", ["gspo", "sequence"])
def test_a_ratio_of_a_response_is_that_of_all_its_rows(module, loss):
    settings = {
        "minibatches": 1,
        "policy_loss": loss,
        "early_stop_imp_ratio": None,
        "kl_ctl": 0.0,
        "loss_aggregation": "sequence",
    }
    advantages, policy = with_settings(settings, GroupRelativeInterface, PPOActorInterface)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    batch = forked(rewards=rewards)
    stats, _ = ours(policy, module, rated(advantages, batch, module), 1)
    assert stats["loss_weight"] == 4, "responses, not rows"


def advantages_after(context, module):
    """Those of the turns of an episode in which `context` is read after a fork."""
    tokens, masks = FIRST + context + TURN, FIRST_MASK + mask(context, TURN)
    forks, values = torch.zeros(len(tokens), dtype=torch.bool), torch.zeros(len(tokens))
    forks[len(FIRST)] = True
    values[: len(FIRST)] = 0.3
    values[-len(TURN) - 1 :] = torch.tensor([0.1, 0.2, 0.5, 0.4, 0.0])
    rewards = torch.tensor([1.0])
    batch = packed([tokens], [masks], [1], forks=forks, values=values, rewards=rewards)
    interface = GAEInterface(kl_ctl=0.0, adv_norm=False, gae_lambda=0.5, discount=0.9)
    output = rated(interface, batch, module)
    return output.data["advantages"][output.data["loss_mask"]]


def test_what_is_read_again_is_no_step_of_an_episode(module):
    """However much it is: credit does not fade over it."""
    advantages = advantages_after([5], module)
    assert advantages.equal(advantages_after(PROMPT * 9, module))
    assert advantages.abs().min() > 0


def test_a_batch_without_forks_is_computed_as_it_is():
    batch = forked()
    batch.data["forks"] = torch.zeros_like(batch.data["forks"])
    assert in_rows(batch) is batch
    plain = as_rows()
    assert in_rows(plain) is plain


def test_forks_go_along_with_the_tokens():
    assert forked().select(["packed_input_ids"]).keys == {"packed_input_ids", "forks"}
    assert forked().select(["prompt_mask"]).keys == {"prompt_mask"}


def test_a_rows_lengths_follow_from_its_forks():
    batch = forked()
    rows = in_rows(batch)
    assert rows.seqlens["packed_input_ids"] == as_rows().seqlens["packed_input_ids"]
    assert rows.seqlens["forks"] == batch.seqlens["forks"]
    assert copy.deepcopy(batch.seqlens) == forked().seqlens, "the batch is as it was"
