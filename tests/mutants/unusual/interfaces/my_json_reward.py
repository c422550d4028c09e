"""Rule-based reward: is the response a JSON object with the keys that its row asks for?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rlcli.api.data import SequenceSample
from rlcli.api.declared_keys import Declaration
from rlcli.api.interface import Example
from rlcli.api.limits import Limits
from rlcli.api.model import MicroBatchSpec, Model, ModelInterface, register_interface
from rlcli.errors import DataError

from .rewards._scores import one_each
from .rewards._text import response_texts


@dataclass(kw_only=True)
class MyJSONReward(ModelInterface):
    """The share of the row's `keys` that the object has, less a penalty for each other key; 0 for
    what is not a JSON object. Nothing but blanks may surround it."""

    READS: ClassVar[Declaration] = {"inference": ("packed_input_ids", "prompt_mask")}
    WRITES: ClassVar[Declaration] = {"inference": ("rewards",)}
    LIMITS: ClassVar[Limits] = {"extra_penalty": {"ge": 0}}
    EXAMPLES: ClassVar[tuple[Example, ...]] = (
        {
            "row": {"keys": ["name", "age"]},
            "right": '{"name": "Ann", "age": 7}',
            "wrong": '{"name": "Ann", "years": 7}',
        },
        {"row": {"keys": ["city"]}, "right": '{"city": "Rome"}', "wrong": "The city is Rome."},
    )

    extra_penalty: float = 0.25
    """Taken off for each key that the row does not ask for; a reward is never below 0."""

    def score(self, response: str, keys: Sequence[str]) -> float:
        """The reward of a response to a row that asks for these keys, 0 to 1."""
        try:
            value = json.loads(response)
        except (ValueError, RecursionError):
            return 0.0
        if not isinstance(value, dict):
            return 0.0
        wanted = set(keys)
        found = sum(key in value for key in wanted)
        extra = len(value) - found
        return max(0.0, found / len(wanted) - self.extra_penalty * extra)

    def inference(
        self, model: Model, data: SequenceSample, mb_spec: MicroBatchSpec
    ) -> SequenceSample:
        """`packed_input_ids`, `prompt_mask` → `rewards` [N] float32. Raises DataError for rows
        without `keys`."""
        wanted = data.metadata.get("keys", [None] * data.bs)
        for id_, keys in zip(data.ids, wanted, strict=True):
            if not keys:
                raise DataError(f"sample {id_} has no keys", hint="use a dataset with `keys`")
        groups = zip(wanted, data.seqlens["packed_input_ids"], strict=True)
        keys_of_each = [keys for keys, lengths in groups for _ in lengths]
        texts = response_texts(model.data_tokenizer, data)
        pairs = zip(texts, keys_of_each, strict=True)
        rewards = [self.score(text, keys) for text, keys in pairs]
        return one_each(data, {"rewards": torch.tensor(rewards, dtype=torch.float32)}, {})


register_interface("my_json_reward", MyJSONReward)
