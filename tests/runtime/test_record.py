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


def test_steps_with_nothing_to_train_on_are_reported_the_first_and_every_tenth_in_a_row():
    warnings = []
    display = SimpleNamespace(step=lambda record: None, warning=warnings.append)
    directory = SimpleNamespace(write_status=lambda *status: None)
    calls, ranks = SimpleNamespace(buffer=Buffer()), SimpleNamespace(listen=lambda name, take: None)
    recipe = load_recipe("ppo_math").recipe
    recorder = Recorder(recipe, directory, display, calls, ranks, BEGINNING)
    recorder.outputs = SimpleNamespace(
        metrics=SimpleNamespace(write=lambda step, numbers: None),
        account=lambda step, ledger: None,
    )
    samples = SimpleNamespace(all_ids=["e0r0"])
    for number in range(14):
        step = SimpleNamespace(number=number, samples=samples, ledger=lambda state: [])
        tokens = 5.0 if number in (0, 12) else 0.0
        recorder.write(step, {"actor/loss_weight": tokens, "critic/loss_weight": 7.0}, 14)
    assert [text.partition(":")[0] for text in warnings] == ["step 2", "step 12", "step 14"]
    assert "nothing to train on for actor, whose" in warnings[0]
    assert "(11 in a row)" in warnings[1]
