"""What episodes are played by, where they begin, and what they ask for on their way."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlcli.api.environment import Environment
from rlcli.api.generation import Spans
from rlcli.api.model import FinishedResponse
from rlcli.api.tool_formats import ToolFormat
from rlcli.api.turns import OnRewrite


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the episodes of a call share."""

    name: str
    """The environment's."""
    environment: type[Environment]
    tokenizer: Any
    tool_format: ToolFormat
    """How the policy writes tool calls, with the schemas of the tools."""
    on_rewrite: OnRewrite
    max_turns: int
    max_tokens: int
    """Tokens after the prompt."""
    turn_tokens: int
    """Tokens of a turn."""
    max_seconds: float | None
    is_scored: bool
    """Whether the environment's reward at the end counts."""
    limit_reward: float
    """The reward at the end, where the environment cannot say it after a limit."""
    is_shared: bool
    """Whether other ranks play the same episodes, so that nothing may depend on the clock."""
    prompts: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    """Beginnings of episodes; the same one is the same object."""

    @property
    def in_step(self) -> bool:
        """Whether turns are requested in an order that does not depend on the clock: log-probs are
        rounded as the responses that are sampled together demand."""
        return self.is_shared or self.environment.REPRODUCIBLE


@dataclass(frozen=True)
class Beginning:
    """Where an episode begins."""

    label: str
    """Names it in messages."""
    row: Mapping[str, Any]
    prompt: Sequence[int]
    """Tokens of the row's prompt."""
    seed: int
    """The environment's."""


@dataclass(frozen=True)
class PolicyTurn:
    """What an episode asks of the policy: to continue a text."""

    text: torch.Tensor
    """[n] int64."""
    seed: int


@dataclass(frozen=True)
class EnvironmentCall:
    """What an episode asks of its environment."""

    request: Mapping[str, Any]


@dataclass(frozen=True)
class SampledTurn:
    """What the policy sampled in one turn."""

    response: FinishedResponse
    spans: Spans | None
    """The versions of the weights that sampled it, where they change meanwhile."""


Move = PolicyTurn | EnvironmentCall
Moves = Generator[Move, Any, None]
