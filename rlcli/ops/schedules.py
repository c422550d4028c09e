"""Learning-rate schedules as pure functions of the training step."""

from __future__ import annotations

import math


def learning_rate(
    step: int, *, peak: float, total_steps: int, warmup_steps: int = 0, schedule: str = "constant", floor: float = 0.0
) -> float:
    """The rate of training step `step` (from 0).

    It rises linearly over `warmup_steps`, reaching `peak` at step `warmup_steps` (step 0 already learns), then
    follows `schedule` (constant, linear or cosine) down to `floor · peak` at the last of `total_steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    remaining = max(1, total_steps - 1 - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / remaining)
    if schedule == "constant":
        return peak
    if schedule == "linear":
        shape = 1 - progress
    elif schedule == "cosine":
        shape = (1 + math.cos(math.pi * progress)) / 2
    else:
        raise ValueError(f"schedule is {schedule!r}; it must be constant, linear or cosine")
    return peak * (floor + (1 - floor) * shape)
