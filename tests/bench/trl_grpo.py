"""TRL's GRPO on the task of `chat_sums`, with the same settings."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from chat_sums import (
    BETAS,
    CLIP,
    EPS,
    GROUP,
    LIMIT,
    LR,
    MAX_NORM,
    PROMPTS,
    TEMPERATURE,
    Row,
    Task,
    Update,
    examine,
    reward,
    role,
)
from torch import nn


def trl_arguments(folder: str) -> Row:
    """Of any trainer of TRL: the optimizer of `chat_sums`, and nothing that is written."""
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "max_grad_norm": MAX_NORM,
    }


def _answer_rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [
        reward(one[0]["content"], wanted) for one, wanted in zip(completions, answer, strict=True)
    ]


def trainer_of_trl(
    task: Task,
    rows: list[Row],
    steps: int,
    folder: str,
    callbacks: Sequence[Any] = (),
    score: Callable[..., list[float]] = _answer_rewards,
    **settings: Any,
) -> Any:
    import copy

    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    arguments = trl_arguments(folder) | {
        "shuffle_dataset": False,
        "max_steps": steps,
        "per_device_train_batch_size": PROMPTS * GROUP,
        "num_generations": GROUP,
        "max_completion_length": LIMIT,
        "temperature": TEMPERATURE,
        "top_k": 0,
        "top_p": 1.0,
        "beta": 0.0,
        "epsilon": CLIP,
        "loss_type": "grpo",
        "scale_rewards": "group",
    }
    trainer = trl.GRPOTrainer(
        copy.deepcopy(task.weights),
        reward_funcs=score,
        args=trl.GRPOConfig(**{**arguments, **settings}),
        train_dataset=Dataset.from_list(rows),
        processing_class=task.tokenizer,
        callbacks=list(callbacks),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def callback(event: str, do: Callable[[int, nn.Module], None]) -> Any:
    """A callback that calls `do` with the number of finished steps and the model."""
    from transformers import TrainerCallback

    def method(self: Any, args: Any, state: Any, control: Any, **inputs: Any) -> None:
        do(state.global_step, inputs["model"])

    return type("Watcher", (TrainerCallback,), {event: method})()


def their_curve(task: Task, seed: int, steps: int, every: int) -> dict[int, float]:
    curve: dict[int, float] = {}

    def exam(step: int, module: nn.Module) -> None:
        if step % every == 0:
            curve[step] = examine(task, role(task, module, backend="inference"))
            module.train()

    with tempfile.TemporaryDirectory() as folder:
        watchers = [callback("on_step_end", exam)]
        trainer_of_trl(task, task.order(seed, steps), steps, folder, watchers, seed=seed).train()
    return curve


def their_updates(
    task: Task, rows: list[Row], recorded: list[list[int]], expected: Sequence[Update]
) -> list[Row]:
    """The deviation of each update from ours."""
    from trl.trainer import grpo_trainer

    table: list[Row] = []
    losses: list[float] = []

    def compare(step: int, module: nn.Module) -> None:
        loss, gradients = expected[step]
        theirs = {name: p.grad for name, p in module.named_parameters()}
        norm = sum(float(g.double().square().sum()) for g in theirs.values()) ** 0.5
        apart = (
            sum(float((g - gradients[name]).double().square().sum()) for name, g in theirs.items())
            ** 0.5
        )
        differences = {
            "losses apart": abs(loss - losses[step]),
            "gradients apart": apart / norm if norm else apart,
        }
        table.append(
            {
                "update": step + 1,
                "loss": loss,
                "TRL's": losses[step],
                "gradient": norm,
                **differences,
            }
        )

    # whose responses are in which batch is recorded too
    grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of_trl(
            task,
            rows,
            len(expected),
            folder,
            [callback("on_pre_optimizer_step", compare)],
            steps_per_generation=len(expected),
            max_grad_norm=0.0,
        )
        compute_loss = trainer._compute_loss

        def watched(*arguments: Any) -> torch.Tensor:
            loss = compute_loss(*arguments)
            losses.append(float(loss.detach()))
            return loss

        def generated(prompts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            assert prompts == [task.tokens(row) for row in rows for _ in range(GROUP)], (
                "the prompts differ"
            )
            return recorded, None

        trainer._compute_loss, trainer._generate_single_turn = watched, generated
        trainer.train()
    return table
