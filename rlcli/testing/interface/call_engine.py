"""Engines of calls other than training: they notice the mode and the heads of their model, or are a
judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rlcli.api.config import GenerationHyperparameters, stable_seed
from rlcli.api.data import SequenceSample
from rlcli.api.generation import FinishedResponse
from rlcli.testing.batches import DIGITS
from rlcli.testing.interface.recording_engine import HEADS, WatchedOutput
from rlcli.testing.tiny_engine import TinyEngine

T = TypeVar("T")


class ModalEngine(TinyEngine):
    """A `TinyEngine` that is in training mode until switched, counts the passes made in it, and
    remembers which heads were used."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.is_training = True
        self.passes_in_training_mode = 0
        self.heads: set[str] = set()

    def train(self, mode: bool = True) -> None:
        self.is_training = mode

    def forward_micro_batch(self, micro_batch: SequenceSample, then: Callable[[Any], T]) -> T:
        self.passes_in_training_mode += self.is_training
        asked: dict[str, list[torch.Tensor]] = {}
        result = super().forward_micro_batch(
            micro_batch, lambda output: then(WatchedOutput(output, asked))
        )
        self.heads |= {HEADS[name] for name in asked}
        return result

    def respond(self, *args: Any, **settings: Any) -> FinishedResponse:
        self._note_response()
        return super().respond(*args, **settings)

    def _note_response(self) -> None:
        self.passes_in_training_mode += self.is_training
        self.heads.add("lm")


class JudgeEngine(ModalEngine):
    """It writes what judges are asked for: a number of one digit, and then the end. The number
    depends on the prompt and, unless that is greedy, on the seed."""

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.is_mute = False
        """Whether it writes the end alone."""
        self.prompts: list[list[int]] = []
        self.replies: list[list[int]] = []
        """With their end, in the order of `prompts`."""

    def respond(
        self,
        number: int,
        prompt: torch.Tensor,
        seed: int,
        tokenizer: Any,
        gconfig: GenerationHyperparameters,
    ) -> FinishedResponse:
        self._note_response()
        self.prompts.append(prompt.tolist())
        drawn = stable_seed(str(self.prompts[-1]), 0 if gconfig.greedy else seed)
        digit = "" if self.is_mute else DIGITS[drawn % len(DIGITS)]
        reply = [*tokenizer(digit, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        self.replies.append(reply)
        most = gconfig.max_new_tokens
        tokens = torch.tensor(reply[:most])
        return FinishedResponse(number, tokens, torch.zeros(len(tokens)), len(reply) <= most, ())
