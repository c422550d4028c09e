"""All of PPO's interfaces in a loop over the real engine:
a random transformer learns what is rewarded."""

import torch

from rlcli.api.config import (
    FinetuneSpec,
    GenerationHyperparameters,
    MicroBatchSpec,
    ModelBackendAbstraction,
)
from rlcli.api.data import SequenceSample
from rlcli.api.model import Model, call_interface
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.interfaces.reference import ReferenceInterface
from rlcli.registry import make_backend
from rlcli.testing.held_source import HeldSource
from rlcli.testing.tiny_models import TinyTokenizer, tiny_model

from .training import rate, read_by

SPEC = MicroBatchSpec(n_mbs=2, max_tokens_per_mb=200)


def role(name, head="lm", **args):
    model = Model(
        name, None, TinyTokenizer(), torch.device("cpu"), source=HeldSource(tiny_model(head=head))
    )
    backend = make_backend(
        ModelBackendAbstraction("fsdp", {"dtype": "float32", "lr": 2e-2, **args})
    )
    return backend.initialize(
        model, FinetuneSpec(total_train_steps=20, dataset_size=32, train_batch_size=32)
    )


def rewarded(batch):
    """Share of even tokens in each response."""
    lengths = batch.flat_seqlens("packed_input_ids")
    tokens, masks = (
        batch.data["packed_input_ids"].split(lengths),
        batch.data["prompt_mask"].split(lengths),
    )
    scores = [(ids[~mask] % 2 == 0).float().mean() for ids, mask in zip(tokens, masks, strict=True)]
    ones = {"rewards": [[1] * len(group) for group in batch.seqlens["packed_input_ids"]]}
    return SequenceSample.from_default(
        ids=batch.ids, seqlens=ones, data={"rewards": torch.stack(scores)}
    )


def test_the_reward_rises_in_a_ppo_loop():
    actor, reference, critic = role("actor"), role("ref"), role("critic", head="value")
    policy = PPOActorInterface(
        generation=GenerationHyperparameters(
            responses_per_prompt=2, max_new_tokens=6, temperature=0.9
        ),
        minibatches=2,
    )
    advantages = GAEInterface(kl_ctl=0.001, adaptive_kl_ctl=True, bootstrap_no_eos=False)
    values, refer = PPOCriticInterface(minibatches=2), ReferenceInterface(temperature=0.9)
    prompts = SequenceSample.from_default(
        ids=[f"p{i}" for i in range(32)],
        seqlens={"packed_prompts": [[1 + i % 3] for i in range(32)]},
        data={"packed_prompts": 3 + torch.arange(sum(1 + i % 3 for i in range(32))) % 90},
        metadata={"batch_index": list(range(32))},
    )
    history = []
    for step in range(12):
        batch = prompts.select(["packed_prompts"])
        batch.update_(call_interface(policy, "generate", actor, prompts, SPEC))
        for output in (
            rewarded(batch),
            call_interface(refer, "inference", reference, batch, SPEC),
            call_interface(values, "inference", critic, batch, SPEC),
        ):
            batch.update_(output)
        again = call_interface(policy, "inference", actor, batch, SPEC).data["packed_logprobs"]
        torch.testing.assert_close(again, batch.data["packed_logprobs"], atol=1e-4, rtol=1e-4)
        batch, numbers = rate(advantages, actor, batch)
        stats = call_interface(
            policy, "train_step", actor, read_by(policy, "train_step", batch), SPEC
        )
        critic_stats = call_interface(
            values, "train_step", critic, read_by(values, "train_step", batch), SPEC
        )
        assert stats["update_skipped"] == critic_stats["update_skipped"] == 0
        if step == 0:
            assert abs(stats["kl"]) < 1e-4, "the actor starts as its reference"
        history.append(numbers["shaped_reward"])
    assert history[-1] > history[0] + 0.2, history
    assert stats["kl"] > 0.01
    assert critic_stats["return"] <= 1, "the score of a response is all that there is to come"
