"""Environments that hang, die, flood or break what they can reach: none of them stops the run,
harms another episode, or counts as something that the policy did."""

import json
import os

import psutil
import pytest
from reading_tokenizer import ReadingTokenizer

from rlcli.api.model import MicroBatchSpec
from rlcli.errors import ProjectError
from rlcli.interfaces.episodes import EpisodesInterface
from rlcli.interfaces.rewards import _syscall_filter
from rlcli.testing.batches import make_batch
from rlcli.testing.tiny_engine import tiny_model

pytestmark = pytest.mark.timeout(300)

SOURCE = '''
import builtins, ctypes, gc, json, logging, os, random, re, resource, signal, subprocess, sys
import threading, time, warnings
from rlcli.api.environment import *


class Acting(Environment):
    """Executes the code of its row in the call that the row names."""

    def reset(self, row, seed):
        self._call, _, self._code = row["answer"].partition(":")
        return self._act("reset", "go")

    def _act(self, call, usual):
        names = {"result": usual, "self": self}
        if call == self._call:
            exec(self._code, {**globals(), **names}, names)
        return names["result"]

    def score(self, answer):
        return self._act("score", 0.5)

    def close(self):
        self._act("close", None)


class Tools(Acting):
    def act(self, count: int) -> str:
        """Act."""
        return self._act("act", "fine")


class Game(Acting):
    def step(self, action):
        return self._act("step", Observation("fine", reward=0.25))


RANK = PID
register_environment(NAME, CLASS)
'''

FINE = {"turns": 2, "out_of_turns": 1}
CALLED = FINE | {"tool_calls": 2}
MISTAKEN = CALLED | {"tool_mistakes": 2}
SLOW = MISTAKEN | {"tool_timeouts": 2}
LIMITED = {"limited": 1}
DISCARDED = {"discarded": 1, "replayed": 1}

SPIN = {"spins": "while True: pass"}
SEARCH = {"searches without end": "re.match('(a+)+$', 'a' * 60 + 'b')"}
WAIT = {
    "sleeps": "time.sleep(3600)",
    "waits for a signal": "signal.pause()",
    "waits for itself": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "waits for a process": "subprocess.run(['sleep', '3600'])",
}
HANG_FAST = {
    "ignores the alarm": "signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(3600)",
    "blocks all signals": (
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(3600)"
    ),
    "catches everything": "while True:\n try: time.sleep(9)\n except BaseException: pass",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
}
DIE = {
    "leaves a fork and exits": "pid = os.fork(); os._exit(0) if pid else time.sleep(3600)",
    "exits": "os._exit(0)",
    "exits with a code": "os._exit(3)",
    "aborts": "os.abort()",
    "kills itself": "os.kill(os.getpid(), signal.SIGKILL)",
    "reads address 0": "ctypes.string_at(0)",
    "becomes another program": "os.execv('/bin/true', ['true'])",
    "kills its group": "os.killpg(0, signal.SIGKILL)",
    "closes all descriptors": "os.closerange(0, 1 << 12)",
    "breaks the replies": "json.dumps = None",
    "writes to every descriptor": (
        "for number in range(3, 64):\n try: os.write(number, b'nonsense\\n')\n except OSError: pass"
    ),
    "replies with a flood": (
        "for number in range(3, 64):\n"
        " try:\n"
        "  for _ in range(300): os.write(number, b'x' * (1 << 16))\n"
        " except OSError: pass"
    ),
    "says that it failed": "raise EnvironmentFailure('no server')",
}
HARMLESS = {
    "prints": "print('nonsense' * 10000)",
    "writes to stdout": "os.write(1, b'nonsense\\n' * 1000)",
    "writes to stderr": "os.write(2, b'nonsense\\n' * 1000)",
    "has a program print": "subprocess.run(['echo', 'nonsense'])",
    "logs and warns": "logging.error('nonsense'); warnings.warn('nonsense')",
    "reads from stdin": "sys.stdin.read()",
    "changes its folder": "os.chdir('/')",
    "empties its variables": "os.environ.clear()",
    "replaces print": "builtins.print = None",
    "loses stdout": "sys.stdout = None; os.closerange(0, 3)",
    "seeds the global generator": "random.seed(0); gc.disable()",
    "forks": "os.fork()",
    "forks often": "for _ in range(4): os.fork()",
    "leaves a program running": "subprocess.Popen(['sleep', '3600'])",
    "leaves a thread running": (
        "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()"
    ),
    "leaves a daemon": "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(3600))",
    "asks the host to stop": (
        "for number in (1, 2, 15):\n"
        " try: os.kill(os.getppid(), number)\n"
        " except PermissionError: pass"
    ),
    "asks itself to stop": "os.kill(os.getpid(), signal.SIGTERM)",
    "forgets all modules": "sys.modules.clear()",
    "handles every signal": "signal.signal(signal.SIGALRM, lambda *_: 1 / 0)",
}
if _syscall_filter.is_available():
    HARMLESS |= {
        "kills the host": "try: os.kill(os.getppid(), 9)\nexcept PermissionError: pass",
        "stops the rank": "try: os.kill(RANK, signal.SIGSTOP)\nexcept PermissionError: pass",
    }
RAISE = {
    "raises": "raise ValueError('no')",
    "exits Python": "sys.exit(1)",
    "recurses": "again = lambda: again(); globals()['again'] = again; again()",
    "raises what has no text": "raise type('E', (Exception,), {'__str__': lambda e: 1 / 0})",
    "uses all memory": "bytearray(1 << 40)",
    "returns what has no text": "result = type('R', (), {'__str__': lambda r: 1 / 0})()",
    "returns too long a number": "result = 10 ** 10000",
}


def cases(call, codes, expected):
    return {f"{call} {name}": (f"{call}:{code}", expected) for name, code in codes.items()}


TOOLS = (
    cases("act", SPIN | SEARCH | WAIT, SLOW)
    | cases("act", HANG_FAST, LIMITED | {"turns": 1})
    | cases("act", DIE, DISCARDED)
    | cases("act", HARMLESS, CALLED)
    | cases("act", RAISE, MISTAKEN)
)
GAME = (
    cases("reset", {"sleeps": WAIT["sleeps"]}, DISCARDED)
    | cases("reset", HANG_FAST, DISCARDED)
    | cases("reset", DIE, DISCARDED)
    | cases("step", SPIN | WAIT, LIMITED | {"turns": 1})
    | cases("score", {"sleeps": WAIT["sleeps"]}, LIMITED | {"turns": 2})
    | cases("close", WAIT | HANG_FAST | RAISE, FINE)  # the deadline of a call is one for all calls
    | cases("close", {"exits": DIE["exits"]}, FINE)
)


class Speaker(ReadingTokenizer):
    """The tokenizer of a model that always makes the same call, or the same move."""

    says = json.dumps({"name": "act", "arguments": {"count": 1}})

    def encode(self, text, add_special_tokens=False):
        text.encode()  # as every tokenizer does
        return super().encode(text)

    def decode(self, ids, skip_special_tokens=False):
        return self.says


def numbers_of(output, row):
    """The numbers of a row's episode that are not 0."""
    sums = {name: output.metadata[name][row] for name in EpisodesInterface.METRICS}
    return {name: total for name, (total, _) in sums.items() if total}


class Players:
    """Plays environments that do what their rows say, one episode each, in one call."""

    def __init__(self, name, **settings):
        self.model = tiny_model(vocab=97)
        self.model.tokenizer = Speaker()
        usual = {"max_turns": 2, "turn_tokens": 2, "max_observation": 40, "call_seconds": 4.0}
        self.interface = EpisodesInterface(
            environment=name,
            generation={"max_new_tokens": 200, "min_new_tokens": 1},
            **usual | {"max_error_fraction": 1.0, "scored": True} | settings,
        )

    def play(self, rows):
        """For each row the numbers of its episode that are not 0, and the tokens."""
        rows = [*rows]
        prompts = make_batch(["packed_prompts"], [[(2, 1)]] * len(rows))
        prompts.metadata["answer"] = rows
        output = self.interface.generate(self.model, prompts, MicroBatchSpec())
        numbers = [numbers_of(output, row) for row in range(len(rows))]
        tokens = output.data["packed_input_ids"].split(output.flat_seqlens("packed_input_ids"))
        return output, numbers, [each.tolist() for each in tokens]

    @property
    def host(self):
        (host,) = self.interface.pool._hosts
        return psutil.Process(host._process.pid)


@pytest.fixture(scope="module")
def players(tmp_path_factory):
    """The function that makes players of `zz_tools` or `zz_game`."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pyproject.toml").write_text("[tool.rlcli]\n")
    environments = folder / "interfaces" / "environments"
    environments.mkdir(parents=True)
    for name, kind in (("zz_tools", "Tools"), ("zz_game", "Game")):
        source = SOURCE.replace("NAME", repr(name)).replace("CLASS", kind)
        source = source.replace("PID", str(os.getpid()))
        (environments / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLCLI_PROJECT", str(folder))
        all_players = []

        def make(name, **settings):
            all_players.append(Players(name, **settings))
            return all_players[-1]

        yield make
        for each in all_players:
            each.interface.pool.close()


@pytest.fixture(scope="module")
def tools(players):
    return players("zz_tools")


@pytest.fixture(scope="module")
def game(players):
    return players("zz_game")


GOOD = 3


@pytest.fixture(scope="module")
def outcomes(tools, game):
    """Case → its numbers; and the tokens of good episodes that were played alone, and among all
    hostile ones."""
    numbers, alone, among = {}, [], []
    for players, table in ((tools, TOOLS), (game, GAME)):
        alone += players.play([""] * GOOD)[2]
        rows = [code for code, _ in table.values()]
        _, played, tokens = players.play([""] * GOOD + rows)
        among += tokens[:GOOD]
        numbers |= dict(zip(table, played[GOOD:], strict=True))
    return numbers, alone, among


@pytest.mark.long
@pytest.mark.parametrize("case", [*TOOLS, *GAME])
def test_a_hostile_environment_concerns_its_own_episode_only(outcomes, case):
    _, expected = (TOOLS | GAME)[case]
    assert outcomes[0][case] == expected


@pytest.mark.long
def test_episodes_next_to_hostile_ones_are_as_they_are_alone(outcomes):
    _, alone, among = outcomes
    assert among == alone


@pytest.mark.long
def test_nothing_that_an_environment_has_started_is_left(outcomes, tools, game):
    for players in (tools, game):
        assert players.host.children(recursive=True) == []


def test_only_the_end_of_what_environments_print_reaches_the_run(tools, capfd):
    tools.play([f"act:{HARMLESS[name]}" for name in ("prints", "writes to stdout")])
    out, err = capfd.readouterr()
    assert out == ""
    assert {len(line) for line in err.splitlines()} == {2999}


FAULTS = {
    "step returns nothing": ("step:result = None", "step.. returned a NoneType"),
    "step raises": ("step:1 / 0", "step.. raised ZeroDivisionError"),
    "step exits Python": ("step:sys.exit(3)", "step.. raised SystemExit: 3"),
    "step interrupts": ("step:raise KeyboardInterrupt", "step.. raised KeyboardInterrupt"),
    "step rewards with nothing": ("step:result = Observation(reward=None)", "reward None"),
    "step rewards with a text": ("step:result = Observation(reward='1')", "reward '1'"),
    "step rewards without end": ("step:result = Observation(reward=1e999)", "reward inf"),
    "score is not a number": ("score:result = float('nan')", "reward nan"),
    "score is a list": ("score:result = [1.0]", r"reward \[1.0\]"),
    "reset returns a number": ("reset:result = 4", "a int, neither a text nor messages"),
    "reset returns objects": (
        "reset:result = [{'role': 'user', 'content': object()}]", "messages that are not JSON",
    ),
    "reset returns too much": ("reset:result = 'x' * (1 << 25)", "returned more than 16 MiB"),
    "reset raises": ("reset:raise OSError('gone')", "reset.. raised OSError: gone"),
    "reset raises what has no text": (f"reset:{RAISE['raises what has no text']}", "raised E"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_mistake_in_an_environments_code_ends_the_run(game, case):
    row, words = FAULTS[case]
    with pytest.raises(ProjectError, match=words) as caught:
        game.play(["", row])
    assert "the environment zz_game, sample s1: " in caught.value.what
    game.play([""])


SAID = {
    "100 MB": ("'x' * 10**8", "x" * 20 + "…" + "x" * 20),
    "half a character": ("'a\\ud800b'", "a?b"),
    "an emoji of many": ("'👨‍👩‍👧‍👦' * 1000", None),
    "marks upon marks": ("'a' + '\\u0301' * 10**6", None),
    "zeros": ("'\\0' * 9", "\0" * 9),
    "escape sequences": ("'\\x1b[2J'", "\x1b[2J"),
    "reversed writing": ("'\\u202eabc'", "\u202eabc"),
    "bytes": ("b'abc'", "b'abc'"),
    "nothing": ("None", "None"),
    "a line end": ("'{\"number\": 0}\\n'", '{"number": 0}\n'),
}


@pytest.mark.parametrize("case", SAID)
def test_what_a_tool_returns_is_a_bounded_text(tools, case):
    code, text = SAID[case]
    (numbers,), (tokens,) = tools.play([f"act:result = {code}"])[1:]
    assert numbers == CALLED
    if text is not None:
        heard = tools.model.tokenizer.encode(f"{text}\n")
        assert tokens[4:-2] == heard
    assert len(tokens) <= 2 + 2 + 42 + 2
