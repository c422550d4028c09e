"""What a call of a batch waits for on its way, by the master's clock."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

INPUTS = "its inputs"
WEIGHTS = "new weights"
TENSORS = "tensors from other ranks"
CHUNK = "the chunk before"
TURN = "its turn"
"""What a call waits for."""
WORK = ""
"""It waits for nothing: its ranks work on it."""


@dataclass
class CallStage:
    """A part of the way."""

    reason: str
    began: float
    ended: float | None = None
    cause: str = ""
    """The call that it waits for."""

    @property
    def name(self) -> str:
        by_cause = {INPUTS: self.cause, WEIGHTS: f"the weights of {self.cause}"}
        return by_cause[self.reason] if self.cause else self.reason


@dataclass(eq=False)
class CallTimes:
    """The way of a call."""

    call: str
    kind: str
    """`generate`, `inference`, …"""
    of: str
    """What it works on: `step 3`."""
    ranks: tuple[int, ...]
    clock: Callable[[], float] = time.monotonic
    stages: list[CallStage] = field(default_factory=list)

    @property
    def waits(self) -> list[CallStage]:
        return [stage for stage in self.stages if stage.reason != WORK]

    @property
    def is_sent(self) -> bool:
        return len(self.waits) < len(self.stages)

    @contextmanager
    def stage(self, reason: str) -> Iterator[CallStage]:
        """Be in a stage; whoever is in it may name its cause at the end."""
        stage = CallStage(reason, self.clock())
        self.stages.append(stage)
        try:
            yield stage
        finally:
            stage.ended = self.clock()

    @asynccontextmanager
    async def entering(
        self, reason: str, context: AbstractAsyncContextManager[None]
    ) -> AsyncIterator[None]:
        """Wait until a context can be entered, and be in it."""
        stage = CallStage(reason, self.clock())
        self.stages.append(stage)
        async with context:
            stage.ended = self.clock()
            yield
