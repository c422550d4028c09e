"""A taskset of verifiers for tests: sums, and a desk with a calculator."""

from __future__ import annotations

import os

import verifiers.v1 as vf


class Desk(vf.Toolset[vf.ToolsetConfig]):
    """Tools of an episode."""

    TOOL_PREFIX = None

    @vf.tool
    def calculate(self, first: int, second: int) -> str:
        """Add two numbers."""
        if first < 0:
            raise ValueError("no negative numbers")
        return str(first + second)

    @vf.tool
    def leave(self) -> str:
        """End the server."""
        os._exit(3)


class SumData(vf.TaskData):
    """A sum and its result."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Scores 1 for the result, and 0.25 for each turn with a call before it."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Desk(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("the reward failed")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def called(self, trace: vf.Trace) -> float:
        return sum(bool(message.tool_calls) for message in trace.assistant_messages)


class SumsConfig(vf.TasksetConfig):
    """Settings of the taskset."""

    largest: int = 3


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Sums of a number and 7."""

    def load(self):
        for number in range(self.config.largest):
            system, question = "Work out sums.", f"{number}+7?"
            data = SumData(prompt=question, system_prompt=system, answer=str(number + 7))
            yield SumTask(data, self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Desk.run()
