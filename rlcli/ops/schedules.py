"""Learning-rate schedules as pure functions of the training step."""

from __future__ import annotations

import math
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    schedule: ScheduleName = "constant",
    floor: float = 0.0,
) -> float:
    """The learning rate of training step `step` (from 0); above 0 at every step if `peak` is.

    It rises linearly over `warmup_steps`, reaching `peak` at step `warmup_steps`, then follows
    `schedule` (constant, linear or cosine) down towards `floor · peak`. Both ends are one step
    outside the run: the rate would be 0 one step before the first, and `floor · peak` at step
    `total_steps`, one after the last. So no step is wasted at a rate of 0,
    and a run of n steps learns n times.

    The decay is that of torch's LinearLR and CosineAnnealingLR over `total_steps`, and of
    transformers' linear and cosine schedules. The warm-up differs from transformers and Megatron,
    whose first step has rate 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    left = max(0, total_steps - step) / max(1, total_steps - warmup_steps)
    if schedule == "constant":
        return peak
    if schedule == "linear":
        shape = left
    elif schedule == "cosine":
        # (1 + cos(π · (1 - left))) / 2, without cancellation near the end
        shape = math.sin(math.pi / 2 * left) ** 2
    else:
        raise ValueError(f"schedule is {schedule!r}; it must be constant, linear or cosine")
    return peak * (floor + (1 - floor) * shape)
