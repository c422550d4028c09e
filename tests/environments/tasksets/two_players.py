"""An environment of verifiers for tests, in which the policy is two players."""

from __future__ import annotations

import verifiers.v1 as vf
from number_games import NumberGames


class TwoPlayersConfig(vf.EnvConfig):
    """The players."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class TwoPlayers(vf.Env[TwoPlayersConfig]):
    """One plays after the other."""

    async def run(self, task, agents):
        await agents.first.run(task)
        await agents.second.run(task)


class Tasks(NumberGames):
    """The same tasks."""


__all__ = ["Tasks", "TwoPlayers"]
