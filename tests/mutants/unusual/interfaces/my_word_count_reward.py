"""Rule-based reward: is the response about as long as wanted, in words? Rows need no answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.limits import Limits
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface

from .rewards._scores import one_each
from .rewards._text import response_texts


@dataclass(kw_only=True)
class MyWordCountReward(ModelInterface):
    """1 for responses of `target` words, `tolerance` more or fewer; then less in proportion, down
    to 0 where they are `slack` words further off. Words are what blanks and breaks separate."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    LIMITS: ClassVar[Limits] = {
        "target": {"ge": 1},
        "tolerance": {"ge": 0},
        "slack": {"ge": 1},
    }

    target: int = 12
    """The number of words that earns the most."""

    tolerance: int = 2
    """By how many words a response may miss it at no cost."""

    slack: int = 10
    """Over how many further words the reward falls to 0."""

    def score(self, response: str) -> float:
        """The reward of a response, 0 to 1."""
        words = len(response.split())
        miss = max(0, abs(words - self.target) - self.tolerance)
        return max(0.0, 1 - miss / self.slack)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N] float32."""
        rewards = [self.score(text) for text in response_texts(model.data_tokenizer, data)]
        return one_each(data, {"rewards": torch.tensor(rewards, dtype=torch.float32)}, {})


register_interface("my_word_count_reward", MyWordCountReward)
