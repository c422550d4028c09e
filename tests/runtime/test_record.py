"""The record of finished steps."""

import asyncio
from types import SimpleNamespace

from rlcli.checkpoint.run_state import BEGINNING
from rlcli.recipe.resolve import load_recipe
from rlcli.runtime.buffer import Buffer
from rlcli.runtime.record import Recorder


def test_steps_whose_responses_are_written_are_not_kept():
    async def described(lines):
        return lines

    calls = SimpleNamespace(buffer=Buffer(), describe=described)
    ranks = SimpleNamespace(listen=lambda name, take: None)
    recorder = Recorder(load_recipe("grpo_math").recipe, None, None, calls, ranks, BEGINNING)
    shown = []
    recorder.outputs = SimpleNamespace(show=lambda step, phase, lines: shown.append(step))

    async def run():
        async with asyncio.TaskGroup() as tasks:
            for number in range(100):
                samples = SimpleNamespace(all_ids=["e0r0"])
                recorder.write_samples(SimpleNamespace(number=number, samples=samples), tasks)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert len(recorder._writing) < 3
            await recorder.wait()

    asyncio.run(run())
    assert shown == [*range(1, 101)]
