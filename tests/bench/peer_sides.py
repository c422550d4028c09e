"""One side of a row of `next_to_peers.py`, in a process of its own: each line `step` on its
standard input starts a step, whose figures it prints as a line of JSON.

    python tests/bench/peer_sides.py JOB ours|theirs --model FOLDER [--dtype float32|bfloat16]
                                     [--device cpu|cuda] [--times N]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch
from chat_sums import Row, role
from peer_jobs import (
    BETA,
    CHECKED_TOKENS,
    FIRST_TURN,
    GROUP,
    KL_CTL,
    LONG,
    NEW_TOKENS,
    STEPS,
    Pace,
    Setting,
    answered,
    branches,
    decoded_prompts,
    pairs,
    prompts_of,
    questions,
    recorded_responses,
    recorded_rollout,
    reward_of,
    sample_of,
    steps,
)
from peer_ppo import our_ppo, their_ppo
from trl_grpo import callback, trainer_of_trl, trl_arguments

from rlcli.api.config import GenerationHyperparameters
from rlcli.api.model import call_interface
from rlcli.garbage import keep_freed_memory
from rlcli.interfaces.advantages.group_relative import GroupRelativeInterface
from rlcli.interfaces.dpo import DPOInterface
from rlcli.interfaces.ppo_actor import PPOActorInterface
from rlcli.interfaces.reference import ReferenceInterface
from rlcli.interfaces.sft import SFTInterface

VLLM = str(Path(__file__).with_name("vllm_decoding.py"))

# -- ours ------------------------------------------------------------------------------------------


def our_sft(setting: Setting) -> None:
    task, interface = setting.task, SFTInterface()
    actor = role(task, task.weights, **setting.of_role)

    def step_of(number: int) -> Callable[[], float]:
        batch = sample_of([[row] for row in answered(task, number, 16 * setting.times)])
        return lambda: call_interface(interface, "train_step", actor, batch)["loss"]

    steps(setting, step_of)


def our_dpo(setting: Setting) -> None:
    task, interface, reference = setting.task, DPOInterface(beta=BETA), ReferenceInterface()
    actor = role(task, task.weights, **setting.of_role)
    frozen = role(task, task.weights, backend="inference", **setting.of_role)

    def step_of(number: int) -> Callable[[], float]:
        batch = sample_of(
            [
                [(row["prompt_ids"], row["chosen_ids"]), (row["prompt_ids"], row["rejected_ids"])]
                for row in pairs(task, number, 4 * setting.times)
            ]
        )

        def step() -> float:
            batch.update_(call_interface(reference, "inference", frozen, batch))
            return call_interface(interface, "train_step", actor, batch)["loss"]

        return step

    steps(setting, step_of)


def our_grpo(setting: Setting, shots: int) -> None:
    task = setting.task
    actor = role(task, task.weights, **setting.of_role)
    frozen = role(task, task.weights, backend="inference", **setting.of_role)
    policy = PPOActorInterface(
        generation=GenerationHyperparameters(responses_per_prompt=GROUP, max_new_tokens=NEW_TOKENS),
        minibatches=1,
        early_stop_imp_ratio=None,
    )
    advantages, reference = GroupRelativeInterface(kl_ctl=KL_CTL), ReferenceInterface()

    def step_of(number: int) -> Callable[[], float]:
        prompts = [task.tokens(row) for row in questions(task, number, shots, setting.prompts)]
        asked = prompts_of(prompts)
        batch = recorded_rollout(prompts, recorded_responses(task, number, setting.prompts))
        # of the sampler, which reports them without a pass of its own
        batch.update_(call_interface(policy, "inference", actor, batch))

        def step() -> float:
            call_interface(policy, "generate", actor, asked)
            batch.update_(call_interface(reference, "inference", frozen, batch))
            batch.update_(call_interface(advantages, "inference", actor, batch))
            return call_interface(policy, "train_step", actor, batch)["loss"]

        return step

    steps(setting, step_of)


def our_branches(setting: Setting, shares: bool) -> None:
    task, interface = setting.task, SFTInterface()
    actor = role(task, task.weights, share_prefixes=shares, **setting.of_role)
    batch = sample_of([[(path[:FIRST_TURN], path[FIRST_TURN:])] for path in branches(task)])

    def step_of(number: int) -> Callable[[], float]:
        return lambda: call_interface(interface, "train_step", actor, batch)["loss"]

    steps(setting, step_of)


def our_decoding(setting: Setting, prompts: int, group: int, new_tokens: int) -> None:
    task = setting.task
    sampler = role(task, task.weights, backend="inference", **setting.of_role)
    asked = prompts_of(decoded_prompts(task, prompts))
    greedy = GenerationHyperparameters(max_new_tokens=CHECKED_TOKENS, greedy=True)
    sampled = GenerationHyperparameters(responses_per_prompt=group, max_new_tokens=new_tokens)

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
        for prompt, answer in answered(task, number, 16 * setting.times)
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
    rows = [row for number in range(STEPS) for row in pairs(task, number, 4 * setting.times)]
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
    return trl_arguments(folder) | sizes | setting.of_trainer


def their_grpo(setting: Setting, folder: str, shots: int) -> None:
    task = setting.task
    rows = [
        row for number in range(STEPS) for row in questions(task, number, shots, setting.prompts)
    ]
    trainer = trainer_of_trl(
        task,
        rows,
        STEPS,
        folder,
        score=lambda completion_ids, **_: [reward_of(ids) for ids in completion_ids],
        **setting.of_trainer,
        per_device_train_batch_size=setting.prompts * GROUP,
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
        return recorded_responses(task, next(numbers), setting.prompts), None

    trainer._generate_single_turn = generated
    train_at_a_pace(trainer, setting.pace)


def their_decoding(
    setting: Setting, folder: str, prompts: int, group: int, new_tokens: int
) -> None:
    task, lm = setting.task, _language_model(setting)
    asked, end = decoded_prompts(task, prompts), task.tokenizer.eos_token_id

    def generate(copies: int, **options: Any) -> list[list[int]]:
        rows = [row for row in asked for _ in range(copies)]
        ids, mask = (tensor.to(setting.device) for tensor in _padded_on_the_left(rows, end))
        with torch.no_grad():
            out = lm.generate(input_ids=ids, attention_mask=mask, pad_token_id=end, **options)
        return [_until(row, end) for row in out[:, ids.shape[1] :].tolist()]

    def sampled(number: int) -> list[list[int]]:
        torch.manual_seed(number)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return generate(group, max_new_tokens=new_tokens, **how)

    _decode(setting, generate(1, do_sample=False, max_new_tokens=CHECKED_TOKENS), sampled)


def decoding_of_vllm(
    setting: Setting, folder: str, prompts: int, group: int, new_tokens: int
) -> None:
    """In the Python that RLCLI_VLLM_PYTHON names, since vLLM needs other versions of libraries."""
    file = Path(folder, "prompts.json")
    file.write_text(json.dumps(decoded_prompts(setting.task, prompts)))
    sizes = map(str, (group, new_tokens, CHECKED_TOKENS))
    command = [os.environ["RLCLI_VLLM_PYTHON"], VLLM, setting.folder, setting.dtype, file, *sizes]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while setting.pace.wait():
            print("step", file=process.stdin, flush=True)
            figures = process.stdout.readline()
            if not figures:
                raise SystemExit("vLLM has failed")
            setting.pace.report(json.loads(figures))
        process.stdin.close()


def _language_model(setting: Setting) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, setting.dtype)
    return AutoModelForCausalLM.from_pretrained(setting.folder, dtype=dtype).to(setting.device)


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

DECODING = {1: (1, 1, 128), 32: (4, 8, NEW_TOKENS), 128: (16, 8, NEW_TOKENS)}
"""Responses → prompts, responses to each, and tokens of the longest."""
BOTH: dict[str, tuple[Side, Side]] = {
    "grpo_long": (
        lambda setting, folder: our_grpo(setting, shots=LONG),
        lambda setting, folder: their_grpo(setting, folder, shots=LONG),
    ),
    "grpo": (
        lambda setting, folder: our_grpo(setting, shots=1),
        lambda setting, folder: their_grpo(setting, folder, shots=1),
    ),
    "ppo": (lambda setting, folder: our_ppo(setting), their_ppo),
    "branching": (
        lambda setting, folder: our_branches(setting, shares=True),
        lambda setting, folder: our_branches(setting, shares=False),
    ),
    "sft": (lambda setting, folder: our_sft(setting), their_sft),
    "dpo": (lambda setting, folder: our_dpo(setting), their_dpo),
    **{
        f"decode_{responses}{peer}": (
            lambda setting, folder, sizes=sizes: our_decoding(setting, *sizes),
            lambda setting, folder, sizes=sizes, side=side: side(setting, folder, *sizes),
        )
        for peer, side in (("", their_decoding), ("_vllm", decoding_of_vllm))
        for responses, sizes in DECODING.items()
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
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    side = BOTH[options.job][options.side == "theirs"]
    if options.side == "ours":
        keep_freed_memory(of_activations=options.device == "cpu")  # as every rank does
    with tempfile.TemporaryDirectory() as folder:
        pace = Pace(options.device)
        side(Setting(options.model, options.dtype, options.device, options.times, pace), folder)


if __name__ == "__main__":
    main()
