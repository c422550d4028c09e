"""How many bytes a weight copy with `transfer: delta` sends, compared with all weights,
and how long its parts take.

    python tests/bench/weight_bytes.py MODEL [--rates 1e-6 1e-5] [--steps 3]

Trains the model in MODEL, a folder, on random tokens with AdamW: weights in float32, as a trained
role holds them, and a follower in bfloat16. After each step the deltas of all its parameters are
encoded and applied. `blocks changed` is the share of the blocks of 4 KiB of a bfloat16 file that
differ from the step before: what a disk would write if the file were changed in place. The exit
code is 1 if the last step sends more than its limit, or if the follower does not have the weights
of the trained model, rounded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from rlcli.ops.weight_delta import apply_delta, encode_delta

LIMITS = {1e-6: 0.03, 1e-5: 0.10}
"""Learning rate → largest share of the bytes of all weights."""
ROWS, TOKENS = 4, 64
BLOCK = 2048
"""Numbers of 16 bits in 4 KiB."""


@dataclass(frozen=True)
class Copy:
    """One copy of the weights."""

    share: float
    """Of the bytes of all weights."""
    blocks: float
    """Share of the blocks of a file that changed."""
    encoding: float
    applying: float
    """Seconds."""
    is_exact: bool

    def __str__(self) -> str:
        seconds = f"{self.encoding:.2f} | {self.applying:.2f}"
        shares = f"{self.share:.2%} | {self.blocks:.1%}"
        return f"{shares} | {seconds} | {'yes' if self.is_exact else 'no'}"


def rounded(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name → the parameter, flat and rounded to bfloat16, in float32."""
    return {
        name: parameter.detach().bfloat16().float().reshape(-1)
        for name, parameter in model.named_parameters()
    }


def changed_blocks(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> float:
    """Share of the blocks of a file with all parameters, one after another, that differ."""
    has_changed = torch.cat([old[name] != new[name] for name in new])
    blocks = has_changed[: len(has_changed) // BLOCK * BLOCK].view(-1, BLOCK).any(1)
    return float(blocks.float().mean())


def copy(sent: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> Copy:
    """From what was sent last to the weights of now."""
    began = time.perf_counter()
    deltas = {name: encode_delta(sent[name], new[name]) for name in new}
    encoded = time.perf_counter()
    received = {name: apply_delta(sent[name], delta) for name, delta in deltas.items()}
    applied = time.perf_counter()
    all_bytes = sum(2 * len(tensor) for tensor in new.values())
    return Copy(
        share=sum(map(len, deltas.values())) / all_bytes,
        blocks=changed_blocks(sent, new),
        encoding=encoded - began,
        applying=applied - encoded,
        is_exact=all(torch.equal(received[name], new[name]) for name in new),
    )


def copies(folder: str, rate: float, steps: int) -> list[Copy]:
    """The copies after each of some training steps."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    draws = torch.Generator().manual_seed(1)
    sent, result = rounded(model), []
    for _ in range(steps):
        ids = torch.randint(model.config.vocab_size, (ROWS, TOKENS), generator=draws)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        new = rounded(model)
        result.append(copy(sent, new))
        sent = new
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rates", type=float, nargs="+", default=list(LIMITS))
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args(arguments)
    has_failed = False
    columns = ("learning rate", "step", "share of all bytes", "blocks changed", "encode, s")
    print(f"| {' | '.join(columns)} | apply, s | exact |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rate in options.rates:
        results = copies(options.model, rate, options.steps)
        for step, result in enumerate(results, 1):
            print(f"| {rate:g} | {step} | {result} |")
        has_failed |= results[-1].share > LIMITS.get(rate, 1.0)
        has_failed |= not all(result.is_exact for result in results)
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())
