"""What PPO reports does not depend on micro-batches, over a real engine in float32,
where sums round."""

from functools import cache

import pytest
import torch

from rlcli.api.config import FinetuneSpec, ModelBackendAbstraction
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.registry import make_backend
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import tiny_model

from .training import learn, with_settings

KEYS = ("packed_input_ids", "prompt_mask", "rewards", "seq_no_eos_mask", "solved")
SHARES = ("value_clip_fraction", "clip_fraction", "dual_clip_fraction")
"""Each is a number of tokens over `loss_weight`."""
WHOLE = MicroBatchSpec()
CUTS = [
    *(MicroBatchSpec(n_mbs=n) for n in (2, 5, 16)),
    *(MicroBatchSpec(max_tokens_per_mb=cap) for cap in (20, 45)),
]


def model(head, seed=0):
    backend = make_backend(ModelBackendAbstraction("fsdp", {"dtype": "float32", "lr": 1e-3}))
    lm = Model(
        "role",
        None,
        DigitTokenizer(),
        torch.device("cpu"),
        source=HeldSource(tiny_model(head=head, seed=seed)),
    )
    return backend.initialize(
        lm, FinetuneSpec(total_train_steps=10, dataset_size=10, train_batch_size=10)
    )


@cache
def scored(spec):
    """A batch, scored in these micro-batches by the model that is then trained."""
    batch = make_batch(KEYS)
    scores = PPOActorInterface().inference(model("lm"), batch, spec)
    batch.update_(scores)
    for name in ("proximal_logprobs", "packed_ref_logprobs"):
        copied = scores.select(["packed_logprobs"])
        copied.remap_keys_({"packed_logprobs": name})
        batch.update_(copied)
    return batch


@cache
def valued(spec, value_norm):
    """The same batch, valued by another model."""
    batch = scored(spec).select(scored(spec).keys)
    critic = with_rounding(PPOCriticInterface(value_norm=value_norm))
    batch.update_(critic.inference(model("value", seed=1), batch, spec))
    return batch


def with_rounding(critic):
    """The critic with statistics by which values are rounded on their way there and back."""
    critic.normalizer.update(torch.tensor([1.0, 3.3]))
    return critic


def stats(settings, head, before, during):
    """Of two training steps; the batch was made in the micro-batches of `before`."""
    advantages, policy, critic = with_settings(
        {"minibatches": 2, **settings}, GAEInterface, PPOActorInterface, PPOCriticInterface
    )
    with_rounding(critic)
    trained, batch = model(head), valued(before, critic.value_norm)
    learner = policy if head == "lm" else critic
    return [learn(learner, advantages, trained, batch, during) for _ in range(2)]


@pytest.mark.parametrize(
    ("settings", "head"),
    [
        ({"c_clip": 3.0, "entropy_coef": 0.01}, "lm"),
        ({"use_decoupled_loss": True, "behav_imp_weight_cap": 5.0, "kl_in": "loss"}, "lm"),
        ({}, "value"),
        ({"value_norm": False, "value_loss": "huber"}, "value"),
    ],
    ids=["actor", "actor-decoupled", "critic", "critic-huber"],
)
def test_metrics_do_not_depend_on_the_micro_batches(settings, head):
    """Counts of tokens to the last one; the others as far as float32 sums round."""
    expected = stats(settings, head, WHOLE, WHOLE)
    for cut in CUTS:
        for before, during in ((WHOLE, cut), (cut, WHOLE)):
            for step, expected_step in zip(
                stats(settings, head, before, during), expected, strict=True
            ):
                assert step.keys() == expected_step.keys()
                assert step == pytest.approx(expected_step, rel=2e-4, abs=2e-6)
                for name in step.keys() & set(SHARES):
                    assert step[name] == expected_step[name]
