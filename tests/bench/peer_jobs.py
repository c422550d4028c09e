"""What both sides of a row of `next_to_peers.py` share: the pace, the model and the data."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from chat_sums import Row, Task

from rlcli.api.data import SequenceSample

GROUP, NEW_TOKENS, PROMPTS = 8, 32, 4
"""Responses to a prompt, tokens of the longest, and prompts of a small GRPO step."""
KL_CTL, BETA = 0.04, 0.1
LONG = 12
"""Solved sums before a question whose prompt is several times as long as its response."""
STEPS = 64
"""More than are taken."""
CHECKED_TOKENS = 12
"""Tokens of greedy responses that both sides must agree on."""


class Clock:
    """Seconds and memory of this process: of its processor time if it has a single thread."""

    def __init__(self) -> None:
        self._now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self._began = 0.0

    def start(self) -> None:
        self._began = self._now()

    def seconds(self) -> float:
        return self._now() - self._began

    def peak_mib(self) -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class GPUClock(Clock):
    """Seconds until the GPU has computed everything, and its memory that tensors take."""

    def start(self) -> None:
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def seconds(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter() - self._began

    def peak_mib(self) -> float:
        return torch.cuda.max_memory_allocated() / 2**20


class Pace:
    """Steps are started by a line on standard input, and end with a line on standard output."""

    def __init__(self, device: str) -> None:
        self._clock = Clock() if device == "cpu" else GPUClock()
        self._reports = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print too

    def wait(self) -> bool:
        """Whether there is another step to take."""
        if sys.stdin.readline() != "step\n":
            return False
        self.begin()
        return True

    def begin(self) -> None:
        self._clock.start()

    def end(self, computed: Any, units: float = 1.0) -> None:
        """`computed` is what both sides must agree on in the first step; times are per unit."""
        figures = {
            "computed": computed,
            "seconds": self._clock.seconds() / units,
            "mib": self._clock.peak_mib(),
        }
        self.report(figures)

    def report(self, figures: dict[str, Any]) -> None:
        """The figures of a step, which may be those of another process."""
        print(json.dumps(figures), file=self._reports, flush=True)


@dataclass(frozen=True)
class Setting:
    """What both sides of a job start from."""

    folder: str
    dtype: str
    device: str
    times: int
    """How many times as many rows a step has as a small one."""
    pace: Pace

    @property
    def task(self) -> Task:
        return Task.of(self.folder)

    @property
    def prompts(self) -> int:
        """Prompts of a step of GRPO or PPO."""
        return PROMPTS * self.times

    @property
    def of_role(self) -> dict[str, str]:
        """Settings of each of our roles."""
        return {"dtype": self.dtype, "device": self.device}

    @property
    def of_trainer(self) -> dict[str, bool]:
        """The same, as arguments of TRL."""
        return {"use_cpu": self.device == "cpu", "bf16": self.dtype == "bfloat16"}


# -- data, the same on both sides ------------------------------------------------------------------


def random_tokens(rng: random.Random, task: Task, least: int, most: int) -> list[int]:
    """Ordinary tokens of the vocabulary."""
    top = len(task.tokenizer) * 3 // 4
    return [rng.randrange(top // 4, top) for _ in range(rng.randint(least, most))]


def answered(task: Task, step: int, rows: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and answers of a step of SFT, which differ in length as those of GSM8K do: about 64
    and 134 tokens, and few of them two or three times as long."""
    rng = random.Random(step)
    lengths = [
        (rng.lognormvariate(4.04, 0.35), rng.lognormvariate(4.73, 0.42)) for _ in range(rows)
    ]
    return [
        (
            random_tokens(rng, task, round(prompt), round(prompt)),
            random_tokens(rng, task, round(answer), round(answer)),
        )
        for prompt, answer in lengths
    ]


def pairs(task: Task, step: int, rows: int) -> list[dict[str, list[int]]]:
    """Pairs with prompts that are about as long as their answers."""
    rng = random.Random(step)
    sizes = {"prompt_ids": (60, 90), "chosen_ids": (30, 80), "rejected_ids": (30, 80)}
    return [
        {name: random_tokens(rng, task, *size) for name, size in sizes.items()} for _ in range(rows)
    ]


def questions(task: Task, step: int, shots: int, prompts: int) -> list[Row]:
    """Prompts of a step of GRPO, with as many solved sums before the question."""
    solved = " ".join(f"{row['prompt'][1]['content']} {row['answer']}." for row in task.held_out)
    system = {"role": "system", "content": solved[: shots * 16]}
    rows = task.train[step * prompts % (len(task.train) - prompts) :][:prompts]
    return [row | {"prompt": [system, row["prompt"][1]]} for row in rows]


def recorded_responses(task: Task, step: int, prompts: int, shortest: int = 18) -> list[list[int]]:
    rng = random.Random(step)
    return [random_tokens(rng, task, shortest, NEW_TOKENS) for _ in range(prompts * GROUP)]


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


FIRST_TURN, NEXT_TURN = 78, 26
"""Tokens of the first turn of a trajectory, and of each later one."""


def branches(task: Task, leaves: int = 16, turns: int = 6) -> list[list[int]]:
    """Trajectories of six turns that part at the fifth and at the last one: four fifths of all
    their tokens are copies."""
    rng = random.Random(0)
    paths = [random_tokens(rng, task, FIRST_TURN, FIRST_TURN)]
    for turn in range(1, turns):
        width = 4 if turn in (4, 5) else 1
        paths = [
            path + random_tokens(rng, task, NEXT_TURN, NEXT_TURN)
            for path in paths
            for _ in range(width)
        ]
    assert len(paths) == leaves
    return paths


# -- batches of ours -----------------------------------------------------------------------------


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


def recorded_rollout(prompts: Sequence[list[int]], recorded: Sequence[list[int]]) -> SequenceSample:
    responses = iter(recorded)
    groups = [[(prompt, next(responses)) for _ in range(GROUP)] for prompt in prompts]
    batch = sample_of(groups)
    ones = [[1] * GROUP for _ in prompts]
    rewards = torch.tensor([reward_of(response) for group in groups for _, response in group])
    batch.update_(
        SequenceSample.from_default(
            ids=batch.ids,
            seqlens={"rewards": ones, "seq_no_eos_mask": ones},
            data={
                "rewards": rewards,
                "seq_no_eos_mask": torch.zeros(len(rewards), dtype=torch.bool),
            },
        )
    )
    return batch


def steps(setting: Setting, step_of: Callable[[int], Callable[[], float]]) -> None:
    """`step_of(number)` prepares a step; what it returns takes the step, and returns its loss."""
    number = 0
    while setting.pace.wait():
        step = step_of(number)
        setting.pace.begin()
        setting.pace.end(step())
        number += 1
