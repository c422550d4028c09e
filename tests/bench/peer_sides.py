"""One side of a row of `next_to_peers.py`, in a process of its own: each line `step` on its
standard input starts a step, whose figures it prints as a line of JSON.

    python tests/bench/peer_sides.py JOB ours|theirs --model FOLDER --dtype float32|bfloat16
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from chat_sums import Row, Task, role
from trl_grpo import callback, trainer_of_trl, trl_arguments

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.data import SequenceSample
from rlcli.api.model import call_interface
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.dpo import DPOInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.reference import ReferenceInterface
from rlcli.interfaces.sft import SFTInterface

GROUP, NEW_TOKENS, PROMPTS = 8, 32, 4
"""Responses to a prompt, tokens of the longest, and prompts of a GRPO step."""
KL_CTL, BETA = 0.04, 0.1
LONG = 12
"""Solved sums before a question whose prompt is several times as long as its response."""
STEPS = 64
"""More than are taken."""
CHECKED_TOKENS = 12
"""Tokens of greedy responses that both sides must agree on."""


class Pace:
    """Steps are started by a line on standard input, and end with a line on standard output."""

    def __init__(self) -> None:
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print too
        self._began = (0.0, 0.0)

    def wait(self) -> bool:
        """Whether there is another step to take."""
        if sys.stdin.readline() != "step\n":
            return False
        self.begin()
        return True

    def begin(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def end(self, computed: Any, units: float = 1.0) -> None:
        """`computed` is what both sides must agree on in the first step; times are per unit."""
        wall, processor = self._began
        figures = {
            "computed": computed,
            "seconds": (time.process_time() - processor) / units,
            "wall": (time.perf_counter() - wall) / units,
            "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(json.dumps(figures), file=self._reports, flush=True)


@dataclass(frozen=True)
class Setting:
    """What both sides of a job start from."""

    folder: str
    dtype: str
    pace: Pace

    @property
    def task(self) -> Task:
        return Task.of(self.folder)


# -- data, the same on both sides ------------------------------------------------------------------


def random_tokens(rng: random.Random, task: Task, least: int, most: int) -> list[int]:
    """Ordinary tokens of the vocabulary."""
    top = len(task.tokenizer) * 3 // 4
    return [rng.randrange(top // 4, top) for _ in range(rng.randint(least, most))]


def answered(task: Task, step: int, rows: int = 8) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers of a step of SFT: about 150 tokens each."""
    rng = random.Random(step)
    return [
        (random_tokens(rng, task, 30, 60), random_tokens(rng, task, 60, 140)) for _ in range(rows)
    ]


def pairs(task: Task, step: int, rows: int = 4) -> list[dict[str, list[int]]]:
    """Pairs with prompts that are about as long as their answers."""
    rng = random.Random(step)
    sizes = {"prompt_ids": (60, 90), "chosen_ids": (30, 80), "rejected_ids": (30, 80)}
    return [
        {name: random_tokens(rng, task, *size) for name, size in sizes.items()} for _ in range(rows)
    ]


def questions(task: Task, step: int, shots: int) -> list[Row]:
    """Prompts of a step of GRPO, with as many solved sums before the question."""
    solved = " ".join(f"{row['prompt'][1]['content']} {row['answer']}." for row in task.held_out)
    system = {"role": "system", "content": solved[: shots * 16]}
    rows = task.train[step * PROMPTS % (len(task.train) - PROMPTS) :][:PROMPTS]
    return [row | {"prompt": [system, row["prompt"][1]]} for row in rows]


def recorded_responses(task: Task, step: int) -> list[list[int]]:
    rng = random.Random(step)
    return [random_tokens(rng, task, 18, NEW_TOKENS) for _ in range(PROMPTS * GROUP)]


def reward_of(response: Sequence[int]) -> float:
    """Differs within a group, and is the same on both sides whatever the model is."""
    return len(response) % 4 / 3


def decoded_prompts(task: Task, count: int) -> list[list[int]]:
    """Of 20 to 80 tokens."""
    rng = random.Random(count)
    words = ["tree", "house", "river", "stone", "blue", "green", "quick", "think", "seven"]
    return [
        task.tokens(
            {
                "prompt": [
                    {
                        "role": "user",
                        "content": " ".join(rng.choices(words, k=rng.randint(4, 48))),
                    }
                ]
            }
        )
        for _ in range(count)
    ]


def branches(task: Task, leaves: int = 16, turns: int = 6) -> list[list[int]]:
    """Trajectories of six turns, of which each pair of neighbours parts at a later one: four fifths
    of their tokens are in another, too."""
    rng, length = random.Random(0), 26
    paths: list[list[int]] = [[]]
    for turn in range(turns):
        width = 2 if turn in (1, 3, 4, 5) else 1
        paths = [
            path + random_tokens(rng, task, length, length) for path in paths for _ in range(width)
        ]
    assert len(paths) == leaves
    return paths


# -- ours ------------------------------------------------------------------------------------------


def sample_of(groups: Sequence[Sequence[tuple[list[int], list[int]]]]) -> SequenceSample:
    """Sequences by group, each a prompt and what follows it."""
    sequences = [sequence for group in groups for sequence in group]
    lengths = [[len(prompt) + len(answer) for prompt, answer in group] for group in groups]
    tokens = [token for prompt, answer in sequences for token in prompt + answer]
    masks: list[bool] = []
    for prompt, answer in sequences:
        masks += [True] * len(prompt) + [False] * len(answer)
    return SequenceSample.from_default(
        ids=[str(number) for number in range(len(groups))],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={"packed_input_ids": torch.tensor(tokens), "prompt_mask": torch.tensor(masks)},
    )


def prompts_of(prompts: Sequence[Sequence[int]]) -> SequenceSample:
    tokens = [token for prompt in prompts for token in prompt]
    return SequenceSample.from_default(
        ids=list(map(str, range(len(prompts)))),
        seqlens=list(map(len, prompts)),
        data={"packed_prompts": torch.tensor(tokens)},
    )


def steps(setting: Setting, step_of: Callable[[int], Callable[[], float]]) -> None:
    """`step_of(number)` prepares a step; what it returns takes the step, and returns its loss."""
    number = 0
    while setting.pace.wait():
        step = step_of(number)
        setting.pace.begin()
        setting.pace.end(step())
        number += 1


def our_sft(setting: Setting) -> None:
    task, interface = setting.task, SFTInterface()
    actor = role(task, task.weights, dtype=setting.dtype)

    def step_of(number: int) -> Callable[[], float]:
        batch = sample_of([[row] for row in answered(task, number)])
        return lambda: call_interface(interface, "train_step", actor, batch)["loss"]

    steps(setting, step_of)


def our_dpo(setting: Setting) -> None:
    task, interface, reference = setting.task, DPOInterface(beta=BETA), ReferenceInterface()
    actor = role(task, task.weights, dtype=setting.dtype)
    frozen = role(task, task.weights, backend="inference", dtype=setting.dtype)

    def step_of(number: int) -> Callable[[], float]:
        batch = sample_of(
            [
                [(row["prompt_ids"], row["chosen_ids"]), (row["prompt_ids"], row["rejected_ids"])]
                for row in pairs(task, number)
            ]
        )

        def step() -> float:
            batch.update_(call_interface(reference, "inference", frozen, batch))
            return call_interface(interface, "train_step", actor, batch)["loss"]

        return step

    steps(setting, step_of)


def our_grpo(setting: Setting, shots: int) -> None:
    task = setting.task
    actor = role(task, task.weights, dtype=setting.dtype)
    frozen = role(task, task.weights, backend="inference", dtype=setting.dtype)
    policy = PPOActorInterface(
        generation=GenerationHyperparameters(responses_per_prompt=GROUP, max_new_tokens=NEW_TOKENS),
        minibatches=1,
        early_stop_imp_ratio=None,
    )
    advantages, reference = GroupRelativeInterface(kl_ctl=KL_CTL), ReferenceInterface()

    def step_of(number: int) -> Callable[[], float]:
        prompts = [task.tokens(row) for row in questions(task, number, shots)]
        asked = prompts_of(prompts)
        batch = _recorded_rollout(task, number, prompts)
        # of the sampler, which reports them without a pass of its own
        batch.update_(call_interface(policy, "inference", actor, batch))

        def step() -> float:
            call_interface(policy, "generate", actor, asked)
            batch.update_(call_interface(reference, "inference", frozen, batch))
            batch.update_(call_interface(advantages, "inference", actor, batch))
            return call_interface(policy, "train_step", actor, batch)["loss"]

        return step

    steps(setting, step_of)


def _recorded_rollout(task: Task, number: int, prompts: Sequence[list[int]]) -> SequenceSample:
    responses = iter(recorded_responses(task, number))
    groups = [[(prompt, next(responses)) for _ in range(GROUP)] for prompt in prompts]
    batch = sample_of(groups)
    ones = [[1] * GROUP for _ in prompts]
    rewards = torch.tensor([reward_of(response) for group in groups for _, response in group])
    batch.update_(
        SequenceSample.from_default(
            ids=batch.ids,
            seqlens={"rewards": ones, "seq_no_eos_mask": ones},
            data={"rewards": rewards, "seq_no_eos_mask": torch.zeros(len(rewards))},
        )
    )
    return batch


def our_branches(setting: Setting, shares: bool) -> None:
    task, interface = setting.task, SFTInterface()
    actor = role(task, task.weights, dtype=setting.dtype, share_prefixes=shares)
    batch = sample_of([[(path[:26], path[26:])] for path in branches(task)])

    def step_of(number: int) -> Callable[[], float]:
        return lambda: call_interface(interface, "train_step", actor, batch)["loss"]

    steps(setting, step_of)


def our_decoding(setting: Setting, prompts: int, group: int) -> None:
    task = setting.task
    sampler = role(task, task.weights, backend="inference", dtype=setting.dtype)
    asked = prompts_of(decoded_prompts(task, prompts))
    greedy = GenerationHyperparameters(max_new_tokens=CHECKED_TOKENS, greedy=True)
    sampled = GenerationHyperparameters(responses_per_prompt=group, max_new_tokens=NEW_TOKENS)

    def generate(gconfig: GenerationHyperparameters, first_seed: int) -> list[list[int]]:
        seeds = range(first_seed, first_seed + prompts * gconfig.responses_per_prompt)
        tokens = sampler.module.generate(asked, task.tokenizer, gconfig, list(seeds)).tokens
        return [row.tolist() for row in tokens]

    _decode(setting, generate(greedy, 0), lambda number: generate(sampled, 1000 * number))


def _decode(
    setting: Setting, checked: list[list[int]], generate: Callable[[int], list[list[int]]]
) -> None:
    """Times are those of one token of a response; the first step says what was decoded greedily."""
    number = 0
    while setting.pace.wait():
        responses = generate(number)
        setting.pace.end(checked, sum(map(len, responses)))
        number += 1


# -- theirs ----------------------------------------------------------------------------------------


def train_at_a_pace(trainer: Any, pace: Pace) -> None:
    losses: list[float] = []
    compute_loss = trainer.compute_loss

    def watched(*arguments: Any, **options: Any) -> Any:
        loss = compute_loss(*arguments, **options)
        losses.append(float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        return loss

    def begin(step: int, module: Any) -> None:
        if not pace.wait():
            os._exit(0)  # the trainer would take the step that it has begun

    trainer.compute_loss = watched
    trainer.add_callback(callback("on_step_begin", begin))
    trainer.add_callback(callback("on_step_end", lambda step, module: pace.end(losses[-1])))
    trainer.train()


def their_sft(setting: Setting, folder: str) -> None:
    import trl
    from datasets import Dataset

    task = setting.task
    rows = [
        {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}
        for number in range(STEPS)
        for prompt, answer in answered(task, number)
    ]
    trainer = trl.SFTTrainer(
        task.weights,
        args=trl.SFTConfig(completion_only_loss=True, **_arguments(setting, folder, rows)),
        train_dataset=Dataset.from_list(rows),
        processing_class=task.tokenizer,
    )
    train_at_a_pace(trainer, setting.pace)


def their_dpo(setting: Setting, folder: str) -> None:
    import trl
    from datasets import Dataset

    task = setting.task
    rows = [row for number in range(STEPS) for row in pairs(task, number)]
    texts = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * len(rows)
    trainer = trl.DPOTrainer(
        task.weights,
        ref_model=copy.deepcopy(task.weights),
        args=trl.DPOConfig(beta=BETA, **_arguments(setting, folder, rows)),
        train_dataset=Dataset.from_list(texts),
        processing_class=task.tokenizer,
    )
    trainer.train_dataset = Dataset.from_list(rows)  # the same tokens as on our side
    train_at_a_pace(trainer, setting.pace)


def _arguments(setting: Setting, folder: str, rows: Sequence[Row]) -> Row:
    sizes = {"max_steps": STEPS, "per_device_train_batch_size": len(rows) // STEPS}
    sizes["train_sampling_strategy"] = "sequential"
    return trl_arguments(folder) | sizes | {"bf16": setting.dtype == "bfloat16"}


def their_grpo(setting: Setting, folder: str, shots: int) -> None:
    task = setting.task
    rows = [row for number in range(STEPS) for row in questions(task, number, shots)]
    trainer = trainer_of_trl(
        task,
        rows,
        STEPS,
        folder,
        score=lambda completion_ids, **_: [reward_of(ids) for ids in completion_ids],
        bf16=setting.dtype == "bfloat16",
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=KL_CTL,
        loss_type="bnpo",
    )
    trainer.ref_model.load_state_dict(task.weights.state_dict())
    trainer.ref_model.float()
    generate, numbers = trainer._generate_single_turn, iter(range(STEPS))

    def generated(prompts: list[list[int]], *others: Any) -> tuple[list[list[int]], None]:
        generate(prompts, *others)
        return recorded_responses(task, next(numbers)), None

    trainer._generate_single_turn = generated
    train_at_a_pace(trainer, setting.pace)


def their_decoding(setting: Setting, folder: str, prompts: int, group: int) -> None:
    from transformers import AutoModelForCausalLM

    task = setting.task
    lm = AutoModelForCausalLM.from_pretrained(
        setting.folder, dtype=getattr(torch, setting.dtype)
    ).eval()
    asked, end = decoded_prompts(task, prompts), task.tokenizer.eos_token_id

    def generate(copies: int, **options: Any) -> list[list[int]]:
        ids, mask = _padded_on_the_left([row for row in asked for _ in range(copies)], end)
        with torch.no_grad():
            out = lm.generate(input_ids=ids, attention_mask=mask, pad_token_id=end, **options)
        return [_until(row, end) for row in out[:, ids.shape[1] :].tolist()]

    def sampled(number: int) -> list[list[int]]:
        torch.manual_seed(number)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return generate(group, max_new_tokens=NEW_TOKENS, **how)

    _decode(setting, generate(1, do_sample=False, max_new_tokens=CHECKED_TOKENS), sampled)


def _padded_on_the_left(rows: list[list[int]], end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and 1 for those that are not padding."""
    longest = max(map(len, rows))
    ids = torch.tensor([[end] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


Side = Callable[[Setting, str], None]
"""Takes steps at a pace; the folder is empty."""

BOTH: dict[str, tuple[Side, Side]] = {
    "grpo_long": (
        lambda setting, folder: our_grpo(setting, shots=LONG),
        lambda setting, folder: their_grpo(setting, folder, shots=LONG),
    ),
    "grpo": (
        lambda setting, folder: our_grpo(setting, shots=1),
        lambda setting, folder: their_grpo(setting, folder, shots=1),
    ),
    "branching": (
        lambda setting, folder: our_branches(setting, shares=True),
        lambda setting, folder: our_branches(setting, shares=False),
    ),
    "sft": (lambda setting, folder: our_sft(setting), their_sft),
    "dpo": (lambda setting, folder: our_dpo(setting), their_dpo),
    **{
        f"decode_{prompts * group}": (
            lambda setting, folder, sizes=(prompts, group): our_decoding(setting, *sizes),
            lambda setting, folder, sizes=(prompts, group): their_decoding(setting, folder, *sizes),
        )
        for prompts, group in ((1, 1), (4, 8), (16, 8))
    },
}
"""Job → our side, and that which it is compared with."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", choices=BOTH)
    parser.add_argument("side", choices=["ours", "theirs"])
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    side = BOTH[options.job][options.side == "theirs"]
    with tempfile.TemporaryDirectory() as folder:
        side(Setting(options.model, options.dtype, Pace()), folder)


if __name__ == "__main__":
    main()
