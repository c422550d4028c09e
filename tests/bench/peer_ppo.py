"""A PPO step with a critic, of ours and of TRL. Both generate, but learn from recorded responses of
equal lengths, whose values and rewards TRL then places where ours are."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from chat_sums import Task, role
from peer_jobs import (
    GROUP,
    KL_CTL,
    NEW_TOKENS,
    STEPS,
    Setting,
    prompts_of,
    questions,
    recorded_responses,
    recorded_rollout,
    reward_of,
    steps,
)
from torch import nn
from trl_grpo import callback, trl_arguments

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import ModelInterface, call_interface
from rlcli.interfaces.advantages.gae import GAEInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.ppo_critic import PPOCriticInterface
from rlcli.interfaces.reference import ReferenceInterface

LAMBDA, VALUE_CLIP = 0.95, 0.2


def value_model(task: Task) -> nn.Module:
    """The chat model's body with a value head, the same on both sides."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = copy.deepcopy(task.weights.config)
    config.num_labels, config.pad_token_id = 1, task.tokenizer.eos_token_id
    critic = AutoModelForSequenceClassification.from_config(config)
    critic.float().model.load_state_dict(task.weights.model.state_dict())
    return critic


def rollout_of(task: Task, number: int, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of a step, and responses of equal lengths."""
    prompts = [task.tokens(row) for row in questions(task, number, 1, count)]
    return prompts, recorded_responses(task, number, count, shortest=NEW_TOKENS)


def our_interfaces() -> tuple[ModelInterface, ModelInterface, ModelInterface, ModelInterface]:
    """Policy, critic, advantages and reference."""
    policy = PPOActorInterface(
        generation=GenerationHyperparameters(responses_per_prompt=GROUP, max_new_tokens=NEW_TOKENS),
        minibatches=1,
        early_stop_imp_ratio=None,
    )
    values = PPOCriticInterface(minibatches=1, value_norm=False, value_eps_clip=VALUE_CLIP)
    advantages = GAEInterface(
        kl_ctl=KL_CTL, gae_lambda=LAMBDA, bootstrap_no_eos=False, adv_norm=True
    )
    return policy, values, advantages, ReferenceInterface()


def our_ppo(setting: Setting) -> None:
    task = setting.task
    actor = role(task, task.weights, **setting.of_role)
    critic = role(task, value_model(task), **setting.of_role)
    frozen = role(task, task.weights, backend="inference", **setting.of_role)
    policy, values, advantages, reference = our_interfaces()

    def step_of(number: int) -> Callable[[], float]:
        prompts, responses = rollout_of(task, number, setting.prompts)
        batch = recorded_rollout(prompts, responses)
        # of the sampler, which reports them without a pass of its own
        batch.update_(call_interface(policy, "inference", actor, batch))

        def step() -> float:
            call_interface(policy, "generate", actor, prompts_of(prompts))
            batch.update_(call_interface(reference, "inference", frozen, batch))
            batch.update_(call_interface(values, "inference", critic, batch))
            batch.update_(call_interface(advantages, "inference", actor, batch))
            call_interface(policy, "train_step", actor, batch)
            return call_interface(values, "train_step", critic, batch)["loss"]

        return step

    steps(setting, step_of)


def their_ppo(setting: Setting, folder: str) -> None:
    from trl.experimental.ppo import ppo_trainer

    task = setting.task
    trainer = trainer_of_ppo(setting, task, folder)
    rollouts = Rollouts(task, ppo_trainer, trainer)
    logged: dict[str, Any] = {}
    trainer.log = logged.update
    trainer.dataloader = rollouts.queries(setting)
    ppo_trainer.batch_generation = rollouts.generate
    ppo_trainer.get_reward = rollouts.score
    trainer.add_callback(
        callback("on_step_end", lambda step, module: setting.pace.end(logged["loss/value_avg"]))
    )
    trainer.train()


def trainer_of_ppo(setting: Setting, task: Task, folder: str) -> Any:
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    count = setting.prompts * GROUP
    # TRL's PPO ignores every token that is the one for padding, also within prompts
    task.tokenizer.pad_token = task.tokenizer.convert_ids_to_tokens(0)
    rows = Dataset.from_list([{"input_ids": [0]}] * count)
    arguments = trl_arguments(folder) | setting.of_trainer
    return PPOTrainer(
        args=PPOConfig(
            **arguments,
            per_device_train_batch_size=count,
            local_rollout_forward_batch_size=count,
            total_episodes=count * STEPS,
            num_mini_batches=1,
            num_ppo_epochs=1,
            num_sample_generations=0,
            response_length=NEW_TOKENS,
            temperature=1.0,
            kl_coef=KL_CTL,
            lam=LAMBDA,
            cliprange_value=VALUE_CLIP,
        ),
        processing_class=task.tokenizer,
        model=copy.deepcopy(task.weights),
        ref_model=copy.deepcopy(task.weights),
        reward_model=nn.Identity(),
        train_dataset=rows,
        eval_dataset=rows,
        value_model=value_model(task),
    )


class Rollouts:
    """Recorded responses in place of those that TRL's trainer generates."""

    def __init__(self, task: Task, ppo_trainer: Any, trainer: Any):
        self._task, self._trainer = task, trainer
        self._generate, self._score = ppo_trainer.batch_generation, ppo_trainer.get_reward
        self._forward = ppo_trainer.forward
        self._texts = self._logits = torch.empty(0)
        self._rewards: list[float] = []

    def queries(self, setting: Setting) -> Iterator[dict[str, torch.Tensor]]:
        """Prompts of each step, padded on the left. What a sampler reports without a pass of its
        own is computed before the step is timed."""
        for number in range(STEPS):
            prompts, responses = rollout_of(self._task, number, setting.prompts)
            asked = self._padded([prompt for prompt in prompts for _ in range(GROUP)])
            self._rewards = [reward_of(response) for response in responses]
            self._texts = torch.cat([asked, torch.tensor(responses, device=asked.device)], 1)
            policy, padding = self._trainer.model.policy, self._task.tokenizer.pad_token_id
            with torch.no_grad():
                logits = self._forward(policy, self._texts, padding).logits
            self._logits = logits[:, asked.shape[1] - 1 : -1].clone()
            if not setting.pace.wait():
                os._exit(0)  # the trainer would begin again
            yield {"input_ids": asked}

    def _padded(self, prompts: Sequence[list[int]]) -> torch.Tensor:
        width, padding = max(map(len, prompts)), self._task.tokenizer.pad_token_id
        rows = [[padding] * (width - len(row)) + row for row in prompts]
        return torch.tensor(rows, device=self._trainer.accelerator.device)

    def generate(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._generate(*arguments)
        return self._texts, self._logits

    def score(self, model: nn.Module, *inputs: Any) -> tuple[Any, Any, Any]:
        if model is self._trainer.reward_model:
            rewards = torch.tensor(self._rewards, device=self._texts.device)
            return None, rewards, None
        values: tuple[Any, Any, Any] = self._score(model, *inputs)
        return values
