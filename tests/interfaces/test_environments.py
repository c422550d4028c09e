"""The built-in environments."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

from rlcli.api.config import EnvironmentAbstraction
from rlcli.api.environment import ToolMistake, call_tool
from rlcli.errors import ResourceError
from rlcli.interfaces._environment_calls import AnsweringEnvironment
from rlcli.interfaces.rewards._sandbox import NoSandbox, memory_file, pipe
from rlcli.registry import make_environment

ROOT = Path(__file__).parents[2]


def make(name, **args):
    return make_environment(EnvironmentAbstraction(name, args))


@pytest.mark.parametrize(
    ("expression", "total"),
    [("12+7", "19"), ("-3+10-2", "5"), ("007", "7"), ("+" + "1+" * 9 + "1", "10")],
)
def test_the_calculator_works_out_sums(expression, total):
    assert call_tool(make("calculator"), "calculate", {"expression": expression}) == total


@pytest.mark.parametrize(
    "expression",
    ["", "1+", "2**9", "__import__('os')", "1 + 1", "1+1\n", "٣+١", "9" * 10, "1+" * 200 + "1"],
)
def test_the_calculator_refuses_everything_else(expression):
    with pytest.raises(ToolMistake, match="only sums of whole numbers"):
        call_tool(make("calculator"), "calculate", {"expression": expression})


def test_the_documented_calculator_is_the_one_that_is_built_in():
    source = (ROOT / "interfaces" / "environments" / "calculator.py").read_text()
    assert source in (ROOT / "docs" / "environments.md").read_text()
    assert len(source.splitlines()) <= 35


LIMITED = {"cpu_s": 1, "wall_s": 20.0, "memory_mib": 64, "processes": 4}


def answer_of(program, **args):
    """What a policy reads that has run this program."""
    return call_tool(make("python", **LIMITED | args), "run", {"program": program})


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("print(6 * 7)", "42"),
        ("print('a\\nb')", "a\nb"),
        ("import sys; print('x', file=sys.stderr)", "x"),
        ("", "(it printed nothing, and ended with status 0)"),
        ("raise SystemExit(3)", "(it printed nothing, and ended with status 3)"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "\ufffd"),
        ("print(input())", "EOFError: EOF when reading a line"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("if", "SyntaxError: invalid syntax"),
        ("\ud800", "SyntaxError"),
    ],
)
def test_a_policy_reads_what_its_program_prints(program, answer):
    assert answer in answer_of(program).splitlines()[-1] or answer == answer_of(program)


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("while True: pass", "error: the program used up 1 s of processor time"),
        ("print('x' * (2 << 20))", "error: the program wrote more than 1048576 bytes"),
        ("b'x' * (1 << 30)", "MemoryError"),
        ("import os\nwhile True: os.fork()", "BlockingIOError"),
        ("open('/etc/passwd')", "No such file or directory: '/etc/passwd'"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "OSError"),
        ("import os; os.kill(1, 9)", "Operation not permitted"),
        ("import os; print(os.listdir('/proc'))", "No such file or directory: '/proc'"),
    ],
)
def test_a_hostile_program_harms_nobody(program, answer):
    assert answer in answer_of(program)


def test_the_limit_of_a_program_comes_before_all_that_it_printed():
    """An episode reads the beginning alone."""
    answer = answer_of("while True: print('x' * 4096)")
    assert answer.startswith("error: the program ")
    assert answer.splitlines()[1] == "x" * 4096


def test_programs_leave_nothing_to_each_other():
    python = make("python", **LIMITED)
    call_tool(python, "run", {"program": "open('left', 'w').write('x')"})
    listing = call_tool(python, "run", {"program": "import os; print(os.listdir())"})
    assert listing == "['program.py']"


class Interrupted(Exception):
    """Raised by an alarm."""


def is_interrupted_at(instruction, call):
    """Call a function, with an alarm before one of the instructions executed; whether there are so
    many."""
    executed = 0

    def trace(frame, event, _):
        nonlocal executed
        frame.f_trace_opcodes = True
        executed += event == "opcode"
        if executed == instruction:
            sys.settrace(None)
            signal.raise_signal(signal.SIGALRM)
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupted:
        pass
    finally:
        sys.settrace(None)
    return executed >= instruction


@pytest.mark.parametrize(
    "opened", [pipe, lambda: memory_file(b"content")], ids=["pipe", "memory file"]
)
def test_an_alarm_at_any_moment_leaves_no_file_open(opened):
    def open_and_close():
        with opened():
            pass

    def interrupt(*_):
        raise Interrupted

    open_files, handler = psutil.Process().num_fds(), signal.signal(signal.SIGALRM, interrupt)
    try:
        instruction = 1
        while is_interrupted_at(instruction, open_and_close):
            assert psutil.Process().num_fds() == open_files
            instruction += 1
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert instruction > 100


@pytest.mark.parametrize("seconds", [0.5, *(n / 1000 for n in range(1, 13))])
def test_a_program_ends_when_interrupted_while_it_runs_or_before(seconds):
    environment = make("python", **LIMITED)
    python = AnsweringEnvironment(lambda: environment, longest=99, call_seconds=seconds)
    process = psutil.Process()
    before = process.children(recursive=True), process.num_fds()
    program = {"program": "import time; time.sleep(3600)"}
    reply = python.answer({"call": "tools", "calls": [("run", program)]})
    assert reply == {"value": [(f"error: run took longer than {seconds} s", True, True)]}
    assert (process.children(recursive=True), process.num_fds()) == before


def test_a_machine_without_isolation_is_not_the_fault_of_the_policy(monkeypatch):
    def refused(*_, **__):
        raise NoSandbox("unshare: Operation not permitted")

    monkeypatch.setattr("rlcli.interfaces.environments.python.run_program", refused)
    with pytest.raises(ResourceError, match="programs cannot be isolated here: unshare"):
        answer_of("print(1)")


def test_halving_the_range_finds_every_number():
    hidden = set()
    for seed in range(40):
        game = make("guess")
        game.reset({}, seed)
        low, high, rewards = 1, 7, []
        for _ in range(3):
            guess = (low + high) // 2
            observation = game.step(f" {guess} ")
            rewards.append(observation.reward)
            if observation.done:
                break
            low, high = (guess + 1, high) if "higher" in observation.text else (low, guess - 1)
        assert (observation.done, rewards[-1]) == (True, 1.0)
        hidden.add(guess)
    assert hidden == set(range(1, 8))


@pytest.mark.parametrize("action", ["", "four", "4.0", "-4", "٤", "4 4", "9" * 10**6])
def test_what_is_not_a_number_costs_a_little(action):
    game = make("guess")
    game.reset({}, 0)
    observation = game.step(action)
    assert (observation.text, observation.reward, observation.done) == (
        "not a number\n",
        -0.1,
        False,
    )


def test_the_hidden_number_depends_on_the_seed_alone():
    def hidden(seed):
        game = make("guess", highest=1000)
        game.reset({"answer": "3"}, seed)
        return next(n for n in range(1, 1001) if game.step(str(n)).done)

    assert hidden(3) == hidden(3)
    assert len({hidden(seed) for seed in range(8)}) > 4
