"""A task for small chat models, sums of two numbers, and GRPO of ours on it."""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlcli.api.config import FinetuneSpec, GenerationHyperparameters, ModelBackendAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.model import Model, call_interface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.generation import GenerationInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.registry import make_backend
from rlcli.testing.held_source import HeldSource

PROMPTS, GROUP, LIMIT = 4, 4, 12
"""Prompts of a step, responses to each, and tokens of the longest."""
HELD_OUT, LARGEST = 64, 12
LR, TEMPERATURE, CLIP, BETAS, EPS, MAX_NORM = 1e-5, 0.6, 0.2, (0.9, 0.999), 1e-8, 1.0
SAMPLING = GenerationHyperparameters(
    responses_per_prompt=GROUP, max_new_tokens=LIMIT, temperature=TEMPERATURE
)
EXAM = GenerationHyperparameters(max_new_tokens=LIMIT, greedy=True)

Row = dict[str, Any]
"""`prompt`, as messages, and `answer`."""


@dataclass(frozen=True)
class Task:
    """A model's weights at the start, its tokenizer, and questions for it."""

    weights: nn.Module
    tokenizer: Any
    train: list[Row]
    held_out: list[Row]

    @classmethod
    def of(cls, folder: str) -> Task:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        sums = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
        random.Random(0).shuffle(sums)
        system = {"role": "system", "content": ""}
        rows = [
            {
                "prompt": [system, {"role": "user", "content": f"{a} plus {b}?"}],
                "answer": str(a + b),
            }
            for a, b in sums
        ]
        weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(weights, AutoTokenizer.from_pretrained(folder), rows[HELD_OUT:], rows[:HELD_OUT])

    def batch(self, rows: Sequence[Row], name: str) -> SequenceSample:
        """`packed_prompts`."""
        prompts = [self.tokens(row) for row in rows]
        return SequenceSample.from_default(
            ids=[f"{name}:{number}" for number in range(len(rows))],
            seqlens=[len(prompt) for prompt in prompts],
            data={
                "packed_prompts": torch.tensor([token for prompt in prompts for token in prompt])
            },
        )

    def tokens(self, row: Row) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def responses(self, batch: SequenceSample) -> list[list[int]]:
        tokens, is_prompt = (
            batch.data[key].split(batch.flat_seqlens(key))
            for key in ("packed_input_ids", "prompt_mask")
        )
        return [row[~mask].tolist() for row, mask in zip(tokens, is_prompt, strict=True)]

    def rewards(self, batch: SequenceSample, rows: Sequence[Row]) -> list[float]:
        responses = self.responses(batch)
        group = len(responses) // len(rows)
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [reward(text, rows[number // group]["answer"]) for number, text in enumerate(texts)]

    def order(self, seed: int, steps: int) -> list[Row]:
        """Rows of all steps: the training rows in an order of the seed, again and again."""
        rng, rows = random.Random(seed), []
        while len(rows) < steps * PROMPTS:
            rows += rng.sample(self.train, len(self.train))
        return rows[: steps * PROMPTS]


def reward(text: str, answer: str) -> float:
    """1 if the last number is the answer; a quarter if the response at least ends with a number."""
    if re.findall(r"\d+", text)[-1:] == [answer]:
        return 1.0
    return 0.25 if re.search(r"\d\.?\s*$", text) else 0.0


# -- ours ------------------------------------------------------------------------------------------


def role(
    task: Task,
    weights: nn.Module,
    seed: int = 0,
    backend: str = "fsdp",
    max_norm: float = MAX_NORM,
    device: str = "cpu",
    **settings: Any,
) -> Model:
    """One rank of a real backend over a copy of the weights."""
    model = Model(
        "actor", None, task.tokenizer, torch.device(device), seed=seed, source=HeldSource(weights)
    )
    of_training = {
        "lr": LR,
        "weight_decay": 0.0,
        "beta1": BETAS[0],
        "beta2": BETAS[1],
        "eps": EPS,
        "max_grad_norm": max_norm,
    }
    args = {"dtype": "float32", **(of_training if backend == "fsdp" else {}), **settings}
    spec = FinetuneSpec(
        total_train_steps=1000, dataset_size=len(task.train), train_batch_size=PROMPTS
    )
    return make_backend(ModelBackendAbstraction(backend, args)).initialize(model, spec)


ADVANTAGES = GroupRelativeInterface(kl_ctl=0.0)


def policy() -> PPOActorInterface:
    """GRPO's policy, with the settings that both sides have."""
    return PPOActorInterface(
        generation=SAMPLING,
        loss_aggregation="sequence",
        eps_clip=CLIP,
        minibatches=1,
        early_stop_imp_ratio=None,
    )


def learn(model: Model, batch: SequenceSample) -> dict[str, float]:
    """Stats of a training step."""
    batch.update_(call_interface(ADVANTAGES, "inference", model, batch))
    stats: dict[str, float] = call_interface(policy(), "train_step", model, batch)
    return stats


def rollout(task: Task, model: Model, rows: Sequence[Row], name: str) -> SequenceSample:
    """Responses of the policy with their rewards."""
    batch = call_interface(policy(), "generate", model, task.batch(rows, name))
    batch.update_(
        SequenceSample.from_default(
            ids=batch.ids,
            seqlens={"rewards": [[1] * GROUP] * len(rows)},
            data={"rewards": torch.tensor(task.rewards(batch, rows))},
        )
    )
    return batch


def examine(task: Task, model: Model) -> float:
    """Accuracy on the held-out questions."""
    asked = task.batch(task.held_out, "held-out")
    answered = call_interface(GenerationInterface(generation=EXAM), "generate", model, asked)
    return statistics.mean(one == 1.0 for one in task.rewards(answered, task.held_out))


def our_curve(task: Task, seed: int, steps: int, every: int) -> dict[int, float]:
    model, rows, curve = role(task, task.weights, seed), task.order(seed, steps), {}
    for step in range(1, steps + 1):
        batch = rollout(task, model, rows[(step - 1) * PROMPTS : step * PROMPTS], f"step{step}")
        learn(model, batch)
        if step % every == 0:
            curve[step] = examine(task, model)
    return curve


Update = tuple[float, dict[str, torch.Tensor]]
"""A loss, and gradients by name."""


def our_updates(task: Task, batches: Sequence[SequenceSample]) -> list[Update]:
    model, updates, gradients = role(task, task.weights, max_norm=1e9), [], {}
    optimizer_step = model.module.optimizer_step

    def watched() -> Any:
        gradients.update({name: p.grad.clone() for name, p in model.module.lm.named_parameters()})
        return optimizer_step()

    model.module.optimizer_step = watched
    # by the weights that sampled, and in the forward pass of training, as TRL does it
    for batch in batches:
        batch.update_(call_interface(policy(), "inference", model, batch))
    for batch in batches:
        stats = learn(model, batch)
        updates.append((stats["loss"], dict(gradients)))
    return updates
