"""Environments in processes: what waits for what, what is played again, and what is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
import torch

from rlcli.api.model import MicroBatchSpec
from rlcli.errors import ProjectError, WorkerError
from rlcli.interfaces.episodes import EpisodesInterface
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.tiny_engine import tiny_model

pytestmark = pytest.mark.timeout(300)

HEAD = """
import os, time
from pathlib import Path
from rlcli.api.environment import *


class Game(Environment):
    row = None

    def reset(self, row, seed):
        self.row = row["answer"]
"""


@pytest.fixture
def game(tmp_path, monkeypatch):
    """The function that makes the interface for a game of this source."""
    monkeypatch.setenv("RLCLI_PROJECT", str(tmp_path))
    (tmp_path / "pyproject.toml").write_text("[tool.rlcli]\n")
    folder = tmp_path / "interfaces" / "environments"
    folder.mkdir(parents=True)
    interfaces = []

    def make(step, *members, **settings):
        name = f"zz_{tmp_path.name}_{len(interfaces)}"
        lines = [*members, f"def step(self, action):\n        {step}"]
        source = HEAD + "".join(f"\n    {line}\n" for line in lines)
        (folder / f"{name}.py").write_text(f"{source}\n\nregister_environment({name!r}, Game)\n")
        usual = {"max_turns": 3, "turn_tokens": 4, "scored": True}
        generation = {"max_new_tokens": 24, "temperature": 0.8} | settings.pop("generation", {})
        interfaces.append(
            EpisodesInterface(environment=name, generation=generation, **usual | settings)
        )
        return interfaces[-1]

    yield make
    for interface in interfaces:
        interface.pool.close()


def played(interface, rows=("a", "b", "c"), mesh=None, opened=None):
    """What an interface gives for rows with these answers."""
    model = tiny_model()
    model.tokenizer = DigitTokenizer()
    model.device_mesh = mesh
    if opened is not None:
        open_stream = model.module.open
        model.module.open = lambda *args: opened(open_stream(*args))
    prompts = make_batch(
        ["packed_prompts"], [[(3, 1)]] * len(rows), metadata={"answer": [*map(str, rows)]}
    )
    return interface.generate(model, prompts, MicroBatchSpec())


def sums(output, name):
    return [total for total, _ in output.metadata[name]]


def same(output, expected):
    return torch.equal(output.data["packed_input_ids"], expected.data["packed_input_ids"])


def test_no_episode_waits_for_a_slow_environment(game, tmp_path):
    go = tmp_path / "go"
    interface = game(
        f"""while self.row == "slow" and not Path({str(go)!r}).exists():
            time.sleep(0.01)
        return Observation("7", reward=1.0)"""
    )
    submitted = []

    def watched(stream):
        submit = stream.submit

        def note(text, seed):
            submitted.append(len(text))
            if len(submitted) == 1 + 3 + 3:  # all turns but those that the slow one delays
                go.touch()
            return submit(text, seed)

        stream.submit = note
        return stream

    output = played(interface, ["slow", "b", "c"], opened=watched)
    assert sums(output, "turns") == [3.0] * 3
    assert len(submitted) == 9


def test_results_do_not_depend_on_which_environment_is_faster(game):
    step = 'time.sleep(0.3 * (self.row == {!r})); return Observation("7", reward=1.0)'
    first, last = (played(game(step.format(slow))) for slow in ("a", "c"))
    assert same(first, last)
    assert torch.equal(first.data["packed_logprobs"], last.data["packed_logprobs"])
    assert torch.equal(first.data["rewards"], last.data["rewards"])


def failing(times):
    """A step that fails so often, counted in the file of its row."""
    return f"""file = Path(self.row)
        if len(file.read_text()) < {times}:
            file.open("a").write("x")
            raise EnvironmentFailure("no server at port 1")
        return Observation("7", reward=1.0)"""


@pytest.fixture
def counters(tmp_path):
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_text("xxxx")
    files[1].write_text("")
    return files


def test_an_episode_whose_environment_fails_is_played_again(game, counters):
    expected = played(game('return Observation("7", reward=1.0)'), counters)
    output = played(game(failing(1)), counters)
    assert sums(output, "replayed") == [0.0, 1.0, 0.0]
    assert same(output, expected)
    assert "dropped" not in output.metadata
    assert output.data["rewards"].tolist() == [3.0] * 3


FAILS_IN_ITS_SECOND_TURN = """self.turns += 1
        file = Path(self.row)
        if self.turns == 2 and not file.read_text():
            file.write_text("x")
            raise EnvironmentFailure("no server")
        return Observation("7", reward=self.turns)"""


@pytest.mark.parametrize(("member", "turns"), [("REPRODUCIBLE = True", 9), ("", 9 + 2)])
def test_turns_are_sampled_again_unless_the_environment_is_reproducible(
    game, counters, member, turns
):
    interface = game(FAILS_IN_ITS_SECOND_TURN, member, "turns = 0")
    output = played(interface, counters)
    undisturbed = played(interface, counters)
    assert same(output, undisturbed)
    assert output.data["rewards"].tolist() == [6.0] * 3
    assert sums(output, "replayed") == [0.0, 1.0, 0.0]
    assert sums(undisturbed, "replayed") == [0.0] * 3
    counters[1].write_text("")
    assert len(requested_turns(interface, rows=counters)) == turns


def test_an_environment_that_answers_otherwise_when_it_is_repeated_is_at_fault(game, counters):
    step = f"""
        if self.row == {str(counters[1])!r} and len(Path(self.row).read_text()) < 2:
            Path(self.row).open("a").write("x")
            if len(Path(self.row).read_text()) == 2:
                raise EnvironmentFailure("no server")
        return Observation(Path(self.row).read_text())"""
    with pytest.raises(ProjectError, match=r"REPRODUCIBLE, but step\(\) returned something else"):
        played(game(step, "REPRODUCIBLE = True"), counters)


def test_a_sample_is_dropped_whose_environment_fails_twice(game, counters, caplog):
    output = played(game(failing(2)), counters)
    assert output.metadata["dropped"] == [None, "environment_failed", None]
    assert sums(output, "discarded") == [0.0, 1.0, 0.0]
    assert "failed in 1 of 3 episodes; first, sample s1: EnvironmentFailure: no s" in caplog.text
    sampled = (~output.data["prompt_mask"]).split(output.flat_seqlens("packed_input_ids"))
    assert [bool(each.any()) for each in sampled] == [True, False, True]


def test_too_many_failures_end_the_run(game, counters):
    for file in counters:
        file.write_text("")
    with pytest.raises(WorkerError, match="failed in 2 of 3 episodes; first, sample s") as caught:
        played(game(failing(9)), counters)
    assert "max_error_fraction" in caught.value.hint


def test_a_process_of_environments_that_ends_is_replaced(game, tmp_path):
    waits = tmp_path / "waits"
    interface = game(
        f"""if self.row == "b" and not Path({str(waits)!r}).exists():
            Path({str(waits)!r}).touch()
            time.sleep(3600)
        return Observation("7", reward=1.0)"""
    )

    def kill_host():
        for _ in range(1000):
            if waits.exists():
                break
            time.sleep(0.01)
        os.kill(interface.pool._hosts[0]._process.pid, signal.SIGKILL)

    with ThreadPoolExecutor(1) as killer:
        killer.submit(kill_host)
        output = played(interface)
    assert same(output, played(game('return Observation("7", reward=1.0)')))
    assert sums(output, "replayed")[1] == 1.0
    assert sums(output, "discarded") == [0.0] * 3


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_process_of_environments_that_ends_as_it_starts_is_started_three_times(
    game, tmp_path, deaths
):
    died = tmp_path / "died"
    died.mkdir()
    interface = game(
        'return Observation("7", reward=1.0)',
        f"""import sys
    if sys.argv[0].endswith("_environment_host.py") and len(os.listdir({str(died)!r})) < {deaths}:
        Path({str(died)!r}, str(os.getpid())).touch()
        os.kill(os.getpid(), 9)""",
    )
    if deaths < 3:
        assert sums(played(interface), "discarded") == [0.0] * 3
    else:
        with pytest.raises(WorkerError, match=r"did not start: .* ended \(-9\)"):
            played(interface)
    assert len(list(died.iterdir())) == deaths


def test_a_stopped_process_of_environments_is_replaced(game, monkeypatch):
    monkeypatch.setattr("rlcli.interfaces._environment_pool.SPARE_S", 0.5)
    interface = game('return Observation("7", reward=1.0)', call_seconds=0.5)
    expected = played(interface)
    os.kill(interface.pool._hosts[0]._process.pid, signal.SIGSTOP)
    output = played(interface)
    assert same(output, expected)
    assert sums(output, "replayed") == [1.0] * 3


def requested_turns(interface, **settings):
    """The texts that the policy is asked to continue, in order."""
    requested = []

    def noted(stream):
        submit = stream.submit

        def note(text, seed):
            requested.append(text.tolist())
            return submit(text, seed)

        stream.submit = note
        return stream

    played(interface, opened=noted, **settings)
    return requested


MESH = SimpleNamespace(mesh_dim_names=("tp",), shape=(2,))


def test_ranks_that_share_a_model_play_in_step(game):
    """Whatever environments take, turns are requested in the same order."""
    orders = []
    for slow in ("a", "c"):
        step = f"time.sleep(0.2 * (self.row == {slow!r})); return Observation('7', reward=1.0)"
        orders.append(requested_turns(game(step, "REPRODUCIBLE = True"), mesh=MESH))
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("step", "words"),
    [("raise EnvironmentFailure('gone')", "gone"), ("time.sleep(3600)", "took longer than 1 s")],
)
def test_what_only_one_of_them_may_see_ends_the_run(game, step, words):
    interface = game(step, "REPRODUCIBLE = True", call_seconds=1.0)
    with pytest.raises(WorkerError, match=f"{words}.*; ranks that share a model must"):
        played(interface, mesh=MESH)


def test_the_reward_after_a_limit_can_be_set(game):
    interface = game(
        "time.sleep(3600 * (self.row == 'b')); return Observation('7', reward=1.0)",
        "def score(self, answer): return 5.0",
        call_seconds=2.0,
        limit_reward=-2.0,
    )
    assert played(interface).data["rewards"].tolist() == [8.0, -2.0, 8.0]


def test_an_environment_has_its_share_of_memory(game):
    step = "bytearray(600 << 20); return Observation('7', done=True)"
    assert sums(played(game(step, memory_gib=0.5), "a"), "limited") == [1.0]
    assert sums(played(game(step, memory_gib=4.0), "a"), "limited") == [0.0]


def test_a_program_may_not_have_more_memory_than_its_environment():
    interface = EpisodesInterface(
        environment="python", environment_args={"memory_mib": 4096}, memory_gib=1.0
    )
    with pytest.raises(ProjectError, match="memory_mib is 4096, but the process has only 1024 MiB"):
        played(interface)
    interface.pool.close()


COUNTED = (
    "def reset(self, row, seed): self._file = Path({0!r}, row['answer']); self._file.touch()",
    "def close(self): self._file.unlink()",
)


def test_there_are_only_so_many_environments_at_once(game, tmp_path):
    alive = tmp_path / "alive"
    alive.mkdir()
    members = [member.format(str(alive)) for member in COUNTED]
    step = f"return Observation('7', reward=len(os.listdir({str(alive)!r})), done=True)"
    unlimited = played(game(step, *members), range(7))
    output = played(game(step, *members, max_environments=3), range(7))
    assert output.data["rewards"].max() == 3.0
    assert unlimited.data["rewards"].max() == 7.0
    assert same(output, unlimited)


def test_calls_share_the_room_for_environments(game):
    pool = game("return Observation()", max_environments=3).pool
    entered, left = threading.Event(), []

    def wait():
        entered.set()
        with pool.room(2) as room:
            left.append(room)

    with ThreadPoolExecutor(1) as thread:
        with pool.room(2) as first, pool.room(9) as second:
            waiting = thread.submit(wait)
            entered.wait()
            assert (first, second, left) == (2, 1, [])
        waiting.result()
    assert left == [2]


def test_environments_see_only_the_variables_that_are_named(game, monkeypatch):
    monkeypatch.setenv("ZZ_SECRET", "1")
    step = "return Observation('7', reward=float('ZZ_SECRET' in os.environ), done=True)"
    assert played(game(step)).data["rewards"].tolist() == [0.0] * 3
    assert played(game(step, variables=["ZZ_SECRET"])).data["rewards"].tolist() == [1.0] * 3


def test_only_reproducible_environments_follow_each_other_in_a_process(game):
    step = "return Observation('', reward=float(os.getpid()), done=True)"
    fresh, used = game(step), game(step, "REPRODUCIBLE = True")
    for interface, expected in ((fresh, 6), (used, 3)):
        rewards = [played(interface).data["rewards"].tolist() for _ in range(2)]
        assert len({pid for pids in rewards for pid in pids}) == expected


def test_environments_are_closed_when_a_call_is_abandoned(game, tmp_path):
    interface = game(
        "return Observation('7')",
        f"def close(self): (Path({str(tmp_path)!r}) / f'closed {{self.row}}').touch()",
    )

    def breaking(stream):
        stream.collect = lambda until: 1 / 0
        return stream

    with pytest.raises(ZeroDivisionError):
        played(interface, opened=breaking)
    assert {file.name for file in tmp_path.glob("closed*")} == {"closed a", "closed b", "closed c"}


def test_an_environment_that_only_its_process_cannot_load_is_named(game, tmp_path):
    interface = game("return Observation()")
    played(interface)
    interface.pool.close()
    (tmp_path / "interfaces" / "environments" / f"{interface.environment}.py").write_text("1 / 0")
    with pytest.raises(ProjectError, match=r"(?s)cannot be imported.*division by zero"):
        played(interface)


ORPHANED = """
import sys, time
from rlcli.interfaces._environment_pool import EnvironmentPool, EnvironmentSettings

pool = EnvironmentPool(
    EnvironmentSettings(
        environment=sys.argv[1], args={}, longest=9, call_seconds=60.0, memory_bytes=1 << 32
    ),
    most=1,
)
with pool.calls() as calls:
    calls.ask("a", {"call": "reset", "row": {"answer": "a"}, "seed": 1})
    calls.take(wait=True)
    calls.ask("a", {"call": "step", "action": ""})
    print(pool.host()._process.pid, flush=True)
    time.sleep(3600)
"""


@pytest.mark.long
def test_nothing_is_left_when_the_rank_is_killed(game):
    interface = game("import subprocess; subprocess.Popen(['sleep', '3600']); time.sleep(3600)")
    rank = subprocess.Popen(
        [sys.executable, "-c", ORPHANED, interface.environment], stdout=subprocess.PIPE
    )
    host = psutil.Process(int(rank.stdout.readline()))
    while len(processes := [host, *host.children(recursive=True)]) < 3:
        time.sleep(0.05)
    rank.kill()
    rank.wait()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_an_environment_sees_a_variable_that_an_argument_names_and_nobody_else(game, monkeypatch):
    monkeypatch.setenv("ZZ_TOKEN", "canary-of-the-game")
    step = "return Observation(f'a {os.environ[self.variable]}: {action}', done=True)"
    interface = game(step, "VARIABLES = ('variable',)", "variable = 'ZZ_TOKEN'")
    with interface.pool.calls() as calls:
        calls.ask("a", {"call": "reset", "row": {"answer": "a"}, "seed": 1})
        calls.take(wait=True)
        calls.ask("a", {"call": "step", "action": "canary-of-the-game"})
        ((_, reply),) = calls.take(wait=True)
    assert reply == {"value": ["a <redacted>: <redacted>", 0.0, True]}


def test_no_failure_contains_a_variable_that_an_argument_names(game, monkeypatch):
    monkeypatch.setenv("ZZ_TOKEN", "canary-of-the-game")
    step = "raise EnvironmentFailure(f'refused {os.environ[self.variable]}')"
    interface = game(step, "VARIABLES = ('variable',)", "variable = 'ZZ_TOKEN'")
    with pytest.raises(WorkerError, match="refused <redacted>"):
        played(interface)


def test_environments_need_no_torch(game):
    step = "import sys; return Observation('', reward=float('torch' in sys.modules), done=True)"
    assert played(game(step)).data["rewards"].tolist() == [0.0] * 3
