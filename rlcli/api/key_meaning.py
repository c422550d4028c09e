"""What well-known keys hold: which kind of numbers, and how many rows for each sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlcli.api.lengths import KNOWN_RULES, full, minus_one, one

if TYPE_CHECKING:
    import torch

_TOKENS = ("input_ids", "packed_input_ids", "packed_prompts", "packed_seq", "seq")
_MASKS = ("greedy_seq_no_eos_mask", "ppo_loss_mask", "prompt_mask", "seq_no_eos_mask")
_LOGPROBS = (
    "logprobs",
    "old_logp",
    "packed_logprobs",
    "packed_ref_logprobs",
    "prox_logp",
    "proximal_logprobs",
    "ref_logp",
)
_NUMBERS = ("advantages", "dense_rewards", "kl_rewards", "returns", "values")
_SCORES = ("base_scores", "greedy_base_scores", "greedy_rewards", "rewards", "solved")

_ROWS = {**KNOWN_RULES, "dense_rewards": full, "proximal_logprobs": minus_one}
_OTHER_SEQUENCES = ("input_ids", "packed_prompts", "packed_seq", "seq")
"""Sequences that need not be those of `packed_input_ids`."""
_PER = {one: "one per sequence", full: "one per token", minus_one: "one per token but the first"}


@dataclass(frozen=True)
class Meaning:
    """Of one key."""

    wanted: str
    """The dtypes that it may have, in words."""
    fits: Callable[[torch.dtype], bool]
    rows: Callable[[int], int] | None
    """Number of tokens of a sequence → its rows; None if that is not known."""
    is_token: bool = False
    is_logprob: bool = False

    @property
    def per(self) -> str:
        return _PER[self.rows] if self.rows is not None else ""


def meaning_of(key: str) -> Meaning | None:
    """None for a key that only its own components know."""
    rows = None if key in _OTHER_SEQUENCES else _ROWS.get(key)
    if key in _TOKENS:
        return Meaning("whole numbers (int64)", _is_whole, rows, is_token=True)
    if key in _MASKS:
        return Meaning("bool", lambda dtype: str(dtype) == "torch.bool", rows)
    if key in _LOGPROBS or key in _NUMBERS:
        return Meaning("floating-point (float32)", lambda d: d.is_floating_point, rows, is_logprob=key in _LOGPROBS)
    if key in _SCORES:
        return Meaning("numbers (float32)", lambda dtype: not dtype.is_complex, rows)
    return None


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or str(dtype) == "torch.bool")
