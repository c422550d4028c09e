"""What PPO reports does not depend on micro-batches, over a real engine in float32, where sums round."""

import pytest
import torch

from rlcli.api.config import FinetuneSpec, ModelBackendAbstraction
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.registry import make_backend
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import tiny_model

KEYS = ("packed_input_ids", "prompt_mask", "rewards", "seq_no_eos_mask", "solved")
SHARES = ("value_clip_fraction", "clip_fraction", "dual_clip_fraction")
"""Each is a number of tokens over `loss_weight`."""
ONE_MICRO_BATCH = MicroBatchSpec()
CUTS = [
    *(MicroBatchSpec(n_mbs=n) for n in (2, 3, 5, 8, 16)),
    *(MicroBatchSpec(max_tokens_per_mb=cap) for cap in (20, 30, 45)),
]


def model(head, seed=0):
    backend = make_backend(ModelBackendAbstraction("fsdp", {"dtype": "float32", "lr": 1e-3}))
    lm = Model("role", None, DigitTokenizer(), torch.device("cpu"), source=HeldSource(tiny_model(head=head, seed=seed)))
    return backend.initialize(lm, FinetuneSpec(total_train_steps=10, dataset_size=10, train_batch_size=10))


def rollout(spec, critic=None):
    """Scored by the model that is then trained, and valued by another, in these micro-batches."""
    batch = make_batch(KEYS)
    actor, critic = PPOActorInterface(), critic or PPOCriticInterface()
    scores = actor.inference(model("lm"), batch, spec)
    batch.update_(scores)
    for name in ("proximal_logprobs", "packed_ref_logprobs"):
        copied = scores.select(["packed_logprobs"])
        copied.remap_keys_({"packed_logprobs": name})
        batch.update_(copied)
    batch.update_(critic.inference(model("value", seed=1), batch, spec))
    return batch


def stats(interface, head, before, during):
    """Of two training steps; the batch was made in the micro-batches of `before`."""
    if isinstance(interface, PPOCriticInterface):
        interface.normalizer.update(torch.tensor([1.0, 3.3]))  # so that values are rounded on their way there and back
    trained, batch = model(head), rollout(before, interface if head == "value" else None)
    return [interface.train_step(trained, batch, during) for _ in range(2)]


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (lambda: PPOActorInterface(minibatches=2, c_clip=3.0, entropy_coef=0.01), "lm"),
        (lambda: PPOActorInterface(minibatches=2, use_decoupled_loss=True, behav_imp_weight_cap=5.0), "lm"),
        (lambda: PPOCriticInterface(minibatches=2), "value"),
        (lambda: PPOCriticInterface(minibatches=2, value_norm=False, value_loss="huber"), "value"),
    ],
    ids=["actor", "actor-decoupled", "critic", "critic-huber"],
)
def test_metrics_do_not_depend_on_micro_batches(make, head):
    """Counts of tokens are exact; the rest is equal up to the rounding of float32 sums."""
    expected = stats(make(), head, ONE_MICRO_BATCH, ONE_MICRO_BATCH)
    for cut in CUTS:
        for before, during in ((ONE_MICRO_BATCH, cut), (cut, ONE_MICRO_BATCH)):
            for metrics, expected_metrics in zip(stats(make(), head, before, during), expected, strict=True):
                assert metrics.keys() == expected_metrics.keys()
                assert metrics == pytest.approx(expected_metrics, rel=2e-4, abs=2e-6)
                for name in metrics.keys() & set(SHARES):
                    assert metrics[name] == expected_metrics[name]
