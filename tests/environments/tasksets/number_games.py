"""An environment of verifiers for tests: it hides a number, and answers every guess."""

from __future__ import annotations

import itertools

import verifiers.v1 as vf


class NumberData(vf.TaskData):
    """The number."""

    hidden: int


class NumberTask(vf.Task[NumberData]):
    """Is scored by its environment; to leave is an error."""

    @vf.reward(weight=0)
    async def stayed(self, trace: vf.Trace) -> float:
        if trace.last_reply == "leave":
            raise ValueError("nobody may leave")
        return 0.0


class NumberGames(vf.Taskset[NumberTask, vf.TasksetConfig]):
    """A game for each number from 1."""

    INFINITE = True

    def load(self):
        for number in itertools.count(1):
            yield NumberTask(NumberData(prompt="Guess my number.", hidden=number))


class NumberGameConfig(vf.EnvConfig):
    """The player, who is the policy."""

    player: vf.AgentConfig = vf.AgentConfig()


class NumberGame(vf.Env[NumberGameConfig]):
    """Says "higher" or "lower" to a guess; the reward is 1 if the last one is right."""

    async def run(self, task, agents):
        hits = 0.0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guess, hidden = segment.last_reply, str(task.data.hidden)
                if guess == hidden:
                    hits = 1.0
                    break
                segment = await interaction.turn("higher" if hidden > guess else "lower")
        interaction.trace.record_reward("hit", hits)


__all__ = ["NumberGame", "NumberGames"]
