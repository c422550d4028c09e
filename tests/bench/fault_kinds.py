"""The faults that the seeds of `faults.py` select: which fault occurs when,
and how the run may end."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, replace
from enum import Enum

STEPS = 8
"""Of a run."""


@dataclass(frozen=True)
class Ending:
    """How a disturbed run may end, if it does not survive."""

    codes: tuple[int, ...]
    names: str = ""
    """A pattern for its error or warning; `{victim}` is the number of the rank or node."""


LOST_NODE = r"\(node {victim} of the run\): the node is lost, and with it rank {victim}: its agent "
FULL = r"error\[F28\].*(No space left on device|[KM]iB are free)"
KINDS: dict[str, dict[str, Ending]] = {
    "rank": {
        "killed": Ending(
            (7,), r"\[F01\].*rank {victim} pid \d+: rank {victim} was killed by SIGKILL"
        ),
        "frozen": Ending(
            (8,), r"rank {victim} has been silent|no answer within .* on rank {victim}\b"
        ),
    },
    "agent": {
        "killed": Ending((7,), rf"\[F01\].*{LOST_NODE}was killed by SIGKILL"),
        "frozen": Ending((7,), rf"\[F01\].*{LOST_NODE}has not been heard from for \d+ s"),
    },
    "server": {
        "killed": Ending(
            (0,), r"warning: actor_rollout-server{victim} on \S.* was killed by SIGKILL"
        ),
        "its agent killed": Ending(
            (0,), r"warning: actor_rollout-server{victim} on .*ended with the agent"
        ),
    },
    "pool": {
        "killed": Ending(
            (0,), r"warning: reward-pool0 on \S.* was killed by SIGKILL.*; it was started again"
        )
    },
    "supervisor": {
        "killed": Ending((-signal.SIGKILL,)),
        "killed early": Ending((-signal.SIGKILL,)),
        "its master killed": Ending((7,), r"\[F01\].*the run was killed by SIGKILL"),
        "asked to stop": Ending((75,), r"stopp"),
    },
    "disk": {
        "full": Ending((6,), FULL),
        "ENOSPC": Ending((6,), r"error\[F28\].*checkpoint.*No space left on device"),
        "EDQUOT": Ending((6,), r"error\[F76\].*checkpoint.*quota"),
        "EIO": Ending((6,), r"error\[F29\].*checkpoint.*Input/output error"),
    },
    "network": {
        "stalled": Ending((7,), rf"\[F01\].*{LOST_NODE}has not been heard from for \d+ s"),
        "reset": Ending(
            (7,), r"\[F08\] rank 1 pid \d+: the connection between the master and rank 1 was lost"
        ),
    },
}
"""Kind → variant → how such a run ends."""
MODES = ("staleness 0", "staleness 2", "servers")
CELLS = [(kind, mode) for mode in MODES for kind in KINDS if kind != "server" or mode == "servers"]
PLACES = ("checkpoint.begun", "checkpoint.sealed", "checkpoint.synced", "checkpoint.appeared")
"""Where a write of a checkpoint fails."""
SILENT = {("agent", "frozen"), ("network", "stalled")}
"""Faults that are noticed after 15 seconds of silence: they occur early in a slow run, so that it
still runs then."""
STOPPED = ("supervisor", "asked to stop")
"""A run finishes the steps that it has begun, so it must have more of them ahead."""
REPLACED = ("server", "pool")
"""Kinds of processes that are restarted, which is reported a second or two later, so they are
killed early too."""
CAN_RESTART = {("rank", "killed"), ("agent", "killed"), ("supervisor", "its master killed")}
"""Faults after which a run may be configured to restart its workers."""


class Pace(Enum):
    """How long a run takes, so that it still goes on when its fault is noticed."""

    FAST = 0.05, 0.02
    MODERATE = 0.4, 0.02
    """A few seconds."""
    SLOW = 2.5, 0.6
    """Half a minute."""

    @property
    def call_seconds(self) -> float:
        """Of a call of the toy recipe."""
        return self.value[0]

    @property
    def token_seconds(self) -> float:
        """Of a token of a server."""
        return self.value[1]


@dataclass(frozen=True)
class Fault:
    """The fault that a seed selects."""

    seed: int
    kind: str
    variant: str
    mode: str
    victim: int
    """The number of the rank, node or server."""
    step: int
    """The fault occurs after this many finished steps."""
    delay: float
    """Seconds after that."""
    restarts: int
    """launch.max_restarts."""
    checkpoint_step: str
    """Where a write fails, for a disk."""

    @classmethod
    def of(cls, seed: int) -> Fault:
        draws = random.Random(seed)
        kind, mode = CELLS[seed % len(CELLS)]
        variant = draws.choice(sorted(KINDS[kind]))
        victim = draws.randrange(2) if kind in ("rank", "agent", "server") else 1
        is_early = (kind, variant) in {*SILENT, STOPPED}
        last = 1 if is_early else 2 if kind in REPLACED else STEPS - 3
        step, delay = draws.randint(0, last), round(draws.uniform(0, 0.4), 3)
        restarts = draws.randrange(2) if (kind, variant) in CAN_RESTART else 0
        return cls(seed, kind, variant, mode, victim, step, delay, restarts, draws.choice(PLACES))

    @property
    def pace(self) -> Pace:
        """Of its run."""
        if (self.kind, self.variant) in SILENT:
            return Pace.SLOW
        return Pace.MODERATE if self.kind in REPLACED else Pace.FAST

    def __str__(self) -> str:
        victim = f" {self.victim}" if self.kind in ("rank", "agent", "server") else ""
        if self.kind == "disk" and self.variant != "full":
            return (
                f"disk: {self.variant} at {self.checkpoint_step}, from passage {self.step + 1} on"
            )
        when = "in its start" if self.variant == "killed early" else f"after step {self.step}"
        restarts = ", which may restart once" if self.restarts else ""
        return f"{self.kind}{victim} {self.variant} {self.delay:g} s {when}{restarts}"

    @property
    def ending(self) -> Ending:
        expected = KINDS[self.kind][self.variant]
        return replace(expected, names=expected.names.replace("{victim}", str(self.victim)))
