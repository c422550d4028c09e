"""Plain settings shared by recipes and components. No torch here:
the command line reads this file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlcli.api.elsewhere import attributes_of


@dataclass(frozen=True)
class ModelInterfaceAbstraction:
    """Which interface, with which arguments: `interface: {type: ppo_actor, args: {...}}`."""

    type_: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelBackendAbstraction:
    """Which backend, with which arguments: `backend: {type: fsdp, args: {...}}`."""

    type_: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetAbstraction:
    """Which dataset, with which arguments: `datasets.train: {type: math_prompts, args: {...}}`."""

    type_: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class EnvironmentAbstraction:
    """Which environment, with which arguments: `environment: guess, environment_args: {...}`."""

    type_: str
    args: dict[str, Any] = field(default_factory=dict)


MAX_RESPONSES = 10**5
"""Responses to one prompt."""


@dataclass(frozen=True, kw_only=True)
class GenerationHyperparameters:
    """How responses are sampled."""

    responses_per_prompt: int = 1
    """Responses sampled for each prompt (the group of group-relative algorithms)."""

    max_new_tokens: int = 256
    """Longest response, in tokens, including the end-of-sequence token."""

    min_new_tokens: int = 0
    """The end-of-sequence token is not sampled before this many tokens."""

    greedy: bool = False
    """Take the most likely token each time instead of sampling."""

    temperature: float = 1.0
    """Logits are divided by this before sampling; log-probs are those of the divided logits."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens that holds this much probability."""

    top_k: int = 0
    """Sample from the k most likely tokens; 0 means all of them."""

    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens in addition to the tokenizer's EOS token."""

    max_concurrent_responses: int = 256
    """Maximum number of responses decoded at once; others wait.
    The backend's `kv_cache_tokens` may allow fewer."""

    routing_replay: bool = False
    """Record the experts that each token is routed to while responses are sampled, and route it to
    the same ones when its log-probs are recomputed and trained on (R3): sampling and training then
    agree where a router is near a tie. For a mixture of experts."""

    def __post_init__(self) -> None:
        if not 1 <= self.responses_per_prompt <= MAX_RESPONSES:
            allowed = f"it must be between 1 and {MAX_RESPONSES}"
            raise ValueError(f"responses_per_prompt is {self.responses_per_prompt}; {allowed}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens}; it must be between 0 and max_new_tokens"
            )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}; it must be above 0 (use "
                "greedy: true for argmax)"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or a number of tokens")
        if any(id_ < 0 for id_ in self.stop_token_ids):
            raise ValueError(
                f"stop_token_ids is {list(self.stop_token_ids)}; ids of tokens are at least 0"
            )
        if self.max_concurrent_responses < 1:
            raise ValueError("max_concurrent_responses must be at least 1")


@dataclass(frozen=True, kw_only=True)
class MicroBatchSpec:
    """How a batch is cut into forward-backward passes that share one optimizer step."""

    n_mbs: int = 1
    """At least this many micro-batches."""

    max_tokens_per_mb: int | None = None
    """Maximum number of tokens in a micro-batch. A sample that is longer by itself is an error."""

    def __post_init__(self) -> None:
        if self.n_mbs < 1:
            raise ValueError(f"n_mbs is {self.n_mbs}; it must be at least 1")
        if self.max_tokens_per_mb is not None and self.max_tokens_per_mb < 1:
            raise ValueError(
                f"max_tokens_per_mb is {self.max_tokens_per_mb}; it must be at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec:
    """The length of a run; schedules are functions of it."""

    total_train_steps: int
    dataset_size: int
    """Rows of the training dataset."""
    train_batch_size: int
    """Rows taken per step."""
    updates_per_step: int = 1
    """Calls that train the role in a step."""

    @property
    def steps_per_epoch(self) -> int:
        return max(1, -(-self.dataset_size // self.train_batch_size))

    @property
    def total_train_epochs(self) -> int:
        return -(-self.total_train_steps // self.steps_per_epoch)


@dataclass
class ModelVersion:
    """How many times a model has been trained: `global_step` counts `train_step` calls."""

    epoch: int = 0
    epoch_step: int = 0
    global_step: int = 0


if not TYPE_CHECKING:  # a type checker is to report every name that is not here
    __getattr__ = attributes_of(__name__)


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed from named parts: the same in every process, on every machine,
    under every hash seed."""
    text = "\x1f".join(f"{type(value).__name__}:{value}" for value in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
