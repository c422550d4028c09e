"""GRPO next to TRL's, on a real chat model: are the updates the same, and is as much learned. Needs `trl`.

    python tests/bench/beside_trl.py --model FOLDER [--only updates|learning] [--seeds 3] [--steps 20] [--json]

The task is a sum of two numbers up to 12, asked in the model's chat format; the reward is 1 if the last number of the
response is the sum, and a quarter if it ends with another number. Of the 144 questions 64 are held out. Everything is
in float32, with the same AdamW, clip and temperature, without a KL penalty, and one update per batch.

`updates`: five batches of recorded responses to both, whose log-probs of the old policy are those before the first
update, so the ratios of later ones differ from 1. The losses and the gradients of each must agree to 1e-4: losses
absolutely, gradients by the norm of the difference, relative to that of the gradient. Both divide by a group's standard
deviation plus the constant that TRL adds (1e-4; ours is smaller).

`learning`: each side samples its own responses to the same prompts in the same order. All models are examined by our
engine, greedily, on the held-out questions. The mean area under our curves, over the seeds, must be at least that of
TRL's less the standard error of TRL's mean. Exit code 1 if one of the two does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from rlcli.api.config import FinetuneSpec, GenerationHyperparameters, ModelBackendAbstraction
from rlcli.api.data import SequenceSample
from rlcli.api.model import Model, call_interface
from rlcli.interfaces.generation import GenerationInterface
from rlcli.interfaces.grpo import GRPOInterface
from rlcli.ops import advantages
from rlcli.registry import make_backend
from rlcli.testing.held_source import HeldSource

WITHIN = 1e-4
UPDATES = 5
PROMPTS, GROUP, LIMIT = 4, 4, 12
"""Prompts of a step, responses to each, and tokens of the longest."""
HELD_OUT, LARGEST = 64, 12
LR, TEMPERATURE, CLIP, BETAS, EPS, MAX_NORM = 1e-5, 0.6, 0.2, (0.9, 0.999), 1e-8, 1.0
SCALE_EPS_OF_TRL = 1e-4
SAMPLING = GenerationHyperparameters(responses_per_prompt=GROUP, max_new_tokens=LIMIT, temperature=TEMPERATURE)
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
            {"prompt": [system, {"role": "user", "content": f"{a} plus {b}?"}], "answer": str(a + b)} for a, b in sums
        ]
        weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(weights, AutoTokenizer.from_pretrained(folder), rows[HELD_OUT:], rows[:HELD_OUT])

    def batch(self, rows: Sequence[Row], name: str) -> SequenceSample:
        """`packed_prompts`."""
        prompts = [self.tokens(row) for row in rows]
        return SequenceSample.from_default(
            ids=[f"{name}:{number}" for number in range(len(rows))], seqlens=[len(prompt) for prompt in prompts],
            data={"packed_prompts": torch.tensor([token for prompt in prompts for token in prompt])},
        )  # fmt: skip

    def tokens(self, row: Row) -> list[int]:
        text = self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def responses(self, batch: SequenceSample) -> list[list[int]]:
        tokens, is_prompt = (
            batch.data[key].split(batch.flat_seqlens(key)) for key in ("packed_input_ids", "prompt_mask")
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


def curve_area(curve: dict[int, float]) -> float:
    """Mean height, by trapezoids."""
    points = sorted(curve.items())
    pieces = [(b - a) * (low + high) / 2 for (a, low), (b, high) in pairwise(points)]
    return sum(pieces) / (points[-1][0] - points[0][0])


# -- ours ------------------------------------------------------------------------------------------------------


def role(task: Task, weights: nn.Module, seed: int = 0, backend: str = "fsdp", max_norm: float = MAX_NORM) -> Model:
    """One rank of a real backend over a copy of the weights."""
    model = Model("actor", None, task.tokenizer, torch.device("cpu"), seed=seed, source=HeldSource(weights))
    of_training = {"lr": LR, "weight_decay": 0.0, "beta1": BETAS[0], "beta2": BETAS[1], "eps": EPS,
                   "max_grad_norm": max_norm}  # fmt: skip
    args = {"dtype": "float32", **(of_training if backend == "fsdp" else {})}
    spec = FinetuneSpec(total_train_steps=1000, dataset_size=len(task.train), train_batch_size=PROMPTS)
    return make_backend(ModelBackendAbstraction(backend, args)).initialize(model, spec)


def interface() -> GRPOInterface:
    return GRPOInterface(generation=SAMPLING, kl_ctl=0.0, eps_clip=CLIP, minibatches=1, early_stop_imp_ratio=None)


def rollout(task: Task, model: Model, rows: Sequence[Row], name: str) -> SequenceSample:
    """Responses of the policy with their rewards."""
    batch = call_interface(interface(), "generate", model, task.batch(rows, name))
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
        call_interface(interface(), "train_step", model, batch)
        if step % every == 0:
            curve[step] = examine(task, model)
    return curve


Update = tuple[float, dict[str, torch.Tensor]]
"""A loss, and gradients by name."""


def our_updates(task: Task, batches: Sequence[SequenceSample]) -> list[Update]:
    model, found, gradients = role(task, task.weights, max_norm=1e9), [], {}
    optimizer_step = model.module.optimizer_step

    def watched() -> Any:
        gradients.update({name: p.grad.clone() for name, p in model.module.lm.named_parameters()})
        return optimizer_step()

    model.module.optimizer_step = watched
    for batch in batches:  # by the weights that sampled, and in the forward pass of training, as TRL does it
        batch.update_(call_interface(interface(), "inference", model, batch))
    for batch in batches:
        stats = call_interface(interface(), "train_step", model, batch)
        found.append((stats["loss"], dict(gradients)))
    return found


# -- TRL's -----------------------------------------------------------------------------------------------------


def trainer_of_trl(
    task: Task, rows: list[Row], steps: int, folder: str, callbacks: Sequence[Any] = (), **settings: Any
) -> Any:
    import copy

    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    def score(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [reward(one[0]["content"], wanted) for one, wanted in zip(completions, answer, strict=True)]

    arguments = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "shuffle_dataset": False,
        "learning_rate": LR, "lr_scheduler_type": "constant", "weight_decay": 0.0, "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1], "adam_epsilon": EPS, "max_grad_norm": MAX_NORM, "max_steps": steps,
        "per_device_train_batch_size": PROMPTS * GROUP, "num_generations": GROUP, "max_completion_length": LIMIT,
        "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0, "beta": 0.0, "epsilon": CLIP, "loss_type": "grpo",
        "scale_rewards": "group",
    }  # fmt: skip
    trainer = trl.GRPOTrainer(
        copy.deepcopy(task.weights), reward_funcs=score, args=trl.GRPOConfig(**{**arguments, **settings}),
        train_dataset=Dataset.from_list(rows), processing_class=task.tokenizer, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def callback(event: str, do: Callable[[int, nn.Module], None]) -> Any:
    """`do` is given the number of finished steps and the model."""
    from transformers import TrainerCallback

    def method(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        do(state.global_step, more["model"])

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


def their_updates(task: Task, rows: list[Row], recorded: list[list[int]], expected: Sequence[Update]) -> list[Row]:
    """How far each is from ours."""
    from trl.trainer import grpo_trainer

    table: list[Row] = []
    losses: list[float] = []

    def compare(step: int, module: nn.Module) -> None:
        loss, gradients = expected[step]
        theirs = {name: p.grad for name, p in module.named_parameters()}
        norm = sum(float(g.double().square().sum()) for g in theirs.values()) ** 0.5
        apart = sum(float((g - gradients[name]).double().square().sum()) for name, g in theirs.items()) ** 0.5
        differences = {"losses apart": abs(loss - losses[step]), "gradients apart": apart / norm if norm else apart}
        table.append({"update": step + 1, "loss": loss, "TRL's": losses[step], "gradient": norm, **differences})

    grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # whose responses are in which batch is recorded too
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of_trl(
            task, rows, len(expected), folder, [callback("on_pre_optimizer_step", compare)],
            steps_per_generation=len(expected), max_grad_norm=0.0,
        )  # fmt: skip
        compute_loss = trainer._compute_loss

        def watched(*given: Any) -> torch.Tensor:
            loss = compute_loss(*given)
            losses.append(float(loss.detach()))
            return loss

        def generated(prompts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            assert prompts == [task.tokens(row) for row in rows for _ in range(GROUP)], "the prompts differ"
            return recorded, None

        trainer._compute_loss, trainer._generate_single_turn = watched, generated
        trainer.train()
    return table


# -- both ------------------------------------------------------------------------------------------------------


def updates(task: Task) -> Iterator[tuple[Row, bool]]:
    """Rows of a table, and whether each is as it should be."""
    rows, sampler = task.order(0, UPDATES), role(task, task.weights, backend="inference")
    parts = [rows[start : start + PROMPTS] for start in range(0, len(rows), PROMPTS)]
    batches = [rollout(task, sampler, part, f"part{number}") for number, part in enumerate(parts)]
    recorded = [response for batch in batches for response in task.responses(batch)]
    ordinary, advantages.SCALE_EPS = advantages.SCALE_EPS, SCALE_EPS_OF_TRL
    expected = our_updates(task, batches)
    advantages.SCALE_EPS = ordinary
    for row in their_updates(task, rows, recorded, expected):
        yield row, row["gradient"] > 0 and max(row["losses apart"], row["gradients apart"]) <= WITHIN


def learning(task: Task, seeds: int, steps: int) -> Iterator[tuple[Row, bool]]:
    every, areas = max(1, steps // 4), {"ours": [], "TRL": []}
    first = examine(task, role(task, task.weights, backend="inference"))
    for seed in range(1, seeds + 1):
        for side, curve_of in (("ours", our_curve), ("TRL", their_curve)):
            curve = {0: first, **curve_of(task, seed, steps, every)}
            areas[side].append(curve_area(curve))
            heights = {f"step {step}": height for step, height in curve.items()}
            yield {"side": side, "seed": seed, **heights, "area": areas[side][-1]}, True
    ours, theirs = (statistics.mean(areas[side]) for side in ("ours", "TRL"))
    error = statistics.stdev(areas["TRL"]) / seeds**0.5 if seeds > 1 else 0.0
    yield {"ours": ours, "TRL's": theirs, "standard error": error}, ours >= theirs - error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--only", choices=["updates", "learning"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    task, good, rows = Task.of(given.model), True, []
    tables = {"updates": lambda: updates(task), "learning": lambda: learning(task, given.seeds, given.steps)}
    for name in [given.only] if given.only else tables:
        names: list[str] = []
        for row, is_good in tables[name]():
            rows.append(row)
            good = good and is_good
            if not given.json and list(row) != names:
                names = list(row)
                print("".join(f"{one:>16}" for one in names))
            if not given.json:
                print("".join(f"{one:16.5g}" if isinstance(one, float) else f"{one:>16}" for one in row.values()),
                      flush=True)  # fmt: skip
    if given.json:
        print(json.dumps(rows, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
