"""Programs against tests: which pass, and attacks of hostile programs that fail."""

import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from itertools import chain
from pathlib import Path

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.api.special_tokens import tokens_of
from rlcli.errors import DataError, ResourceError, WorkerError
from rlcli.interfaces.rewards import _confinement, _sandbox
from rlcli.interfaces.rewards._code_tasks import program_of, tasks_of
from rlcli.interfaces.rewards._text import response_texts
from rlcli.interfaces.rewards.code_reward import CodeRewardInterface
from rlcli.testing.batches import PAIRS
from rlcli.testing.interface import InterfaceContract
from rlcli.testing.interface.texts import text_batch
from rlcli.testing.tokenizer import byte_tokenizer

from .code_programs import (
    BROKEN,
    BUILTIN_TESTS,
    CLAIMED,
    CLAIMS,
    GREEDY,
    HOSTILE,
    PLAIN_USER,
    TESTS,
    UNKNOWING,
    USES,
)

SPEC = MicroBatchSpec()
ADD = "def add(a, b):\n    return a + b\n"
ADDS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
SUM = "print(sum(map(int, input().split())))\n"
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5 6\n", "output": "15"}]


@pytest.mark.long
class TestContract(InterfaceContract):
    name = "code_reward"
    args = {"workers": 1, "score": "share", "wrong_reward": -1.0}

    @pytest.fixture
    def tokenizer(self):
        return byte_tokenizer()

    @pytest.fixture
    def inference_batches(self, tokenizer):
        def make(lengths=PAIRS, seed=0):
            programs = [ADD, "def add(a, b): return 3"]
            texts = [*map(fenced, programs), *["None."] * 6]  # to run a program takes long
            rows = [
                ("Add!", [texts[(seed + sample + number) % 8] for number in range(len(group))])
                for sample, group in enumerate(lengths)
            ]
            batch = text_batch(tokenizer, rows, ["?"] * len(rows))
            batch.metadata["tests"] = [
                ADDS if number % 2 else ADDS[:1] for number in range(len(rows))
            ]
            return batch

        return make


def fenced(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


def test_a_program_may_begin_a_turn_of_an_episode():
    """What was observed before it is not part of the response."""
    tokenizer = byte_tokenizer()
    pieces = [(True, "Add!"), (False, "call"), (True, "seen"), (False, f"```\n{ADD}```")]
    tokens = tokens_of(tokenizer, [text for _, text in pieces])
    flags = [flag for (flag, _), ids in zip(pieces, tokens, strict=True) for _ in ids]
    batch = SequenceSample.from_default(
        ids=["q"],
        seqlens=[len(flags)],
        data={
            "packed_input_ids": torch.tensor([*chain.from_iterable(tokens)]),
            "prompt_mask": torch.tensor(flags),
        },
        metadata={},
    )
    (response,) = response_texts(tokenizer, batch)
    assert program_of(response, "last_block") == ADD


@pytest.mark.parametrize(
    ("blocks", "last", "first"),
    [
        ([("python", "1"), ("python", "2")], "2", "1"),
        ([("", "1"), ("", "2")], "2", "1"),
        ([("bash", "ls"), ("Python 3", "1"), ("", "prints 1"), ("text", "1")], "1", "1"),
        ([("json", "{}"), ("", "1"), ("output", "2")], "1", "1"),
        ([("code", "1"), ("code", "2")], "2", "1"),
    ],
)
def test_blocks_of_other_languages_are_not_the_program(blocks, last, first):
    """What a program prints, or the command that runs it, often follows it."""
    response = "\n".join(f"So:\n```{language}\n{text}\n```" for language, text in blocks)
    assert program_of(response, "last_block") == f"{last}\n"
    assert program_of(response, "first_block") == f"{first}\n"


def batch(groups, tests, **metadata):
    tokenizer = byte_tokenizer()
    data = text_batch(
        tokenizer, [("Write a program.", group) for group in groups], ["?"] * len(groups)
    )
    data.metadata |= {"tests": tests, **metadata}
    return Model("reward", None, tokenizer, torch.device("cpu")), data


@pytest.fixture(scope="module")
def judge():
    """One interface for all tests, as its processes stay."""
    interfaces = {}

    def score(programs, tests, responses=None, entry_point=None, metadata=False, **args):
        """The rewards of programs that are all for one row."""
        key = str(args)
        if key not in interfaces:
            interfaces[key] = CodeRewardInterface(**{"cpu_s": 1, "wall_s": 10.0, **args})
        texts = (
            responses
            if responses is not None
            else [fenced(textwrap.dedent(program)) for program in programs]
        )
        model, data = batch([texts], [tests], entry_point=[entry_point])
        out = interfaces[key].inference(model, data, SPEC)
        rewards = out.data["rewards"].tolist()
        assert out.data["solved"].tolist() == [
            reward == interfaces[key].correct_reward for reward in rewards
        ]
        return (rewards, out.metadata) if metadata else rewards

    yield score
    for interface in interfaces.values():
        interface.pool.close()


def test_programs_are_tested_by_input_and_output(judge):
    programs = [
        SUM,
        "print(3)",
        "print(sum(map(int, input().split())), end='  \\n\\n')",
        "print(1 +",
        "1 / 0",
        SUM + "1/0",
    ]
    assert judge(programs, SUMS) == [1, 0, 1, 0, 0, 0]
    assert judge(programs, SUMS, score="share", wrong_reward=-1.0, correct_reward=3.0) == [
        3,
        1,
        3,
        -1,
        -1,
        -1,
    ]


def test_output_must_match_completely(judge):
    tests = [{"input": "", "output": "1\n2\n"}]
    programs = [
        "print(1); print(2)",
        "print(1, 2)",
        "print(1); print(2); print(3)",
        "print(1)",
        "print(' 1'); print(2)",
    ]
    assert judge(programs, tests) == [1, 0, 0, 0, 0]


def test_functions_are_tested_by_assertions(judge):
    wrong = "def add(a, b):\n    return 3"
    assert judge([ADD, wrong, "x = 1", "def add(a, b): raise ValueError"], ADDS) == [1, 0, 0, 0]
    assert judge([ADD, wrong], ADDS, score="share") == [1.0, 0.5]
    assert judge([ADD], "assert add(2, 3) == 5\nassert add(1, 1) == 2") == [1], (
        "one text is one test"
    )


@pytest.mark.parametrize(("program", "test"), USES)
def test_tests_can_use_a_program_in_many_ways(judge, program, test):
    assert judge([program], [test]) == [1]


def test_only_the_entry_point_comes_from_the_program(judge):
    check = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert add(1, 1) == 2"
    assert judge(
        [ADD, ADD.replace("+", "-"), "def sub(a, b): return a + b"], check, entry_point="add"
    ) == [1, 0, 0]
    method = "class Solution:\n    def add(self, a, b): return a + b"
    assert judge(
        [method],
        "def check(candidate):\n    assert candidate(2, 3) == 5",
        entry_point="Solution().add",
    ) == [1]
    helper = ADD.replace("+", "-") + "def close(a, b): return True"
    assert judge([helper], "assert close(add(1, 2), 3)", entry_point="add") == [0], (
        "only the entry point is the program's"
    )


def test_the_program_is_extracted_from_a_response(judge):
    two = f"```python\nprint(1)\n```\nBetter:\n```py\n{SUM}```\n"
    assert judge(
        None, SUMS, [two, two + "```py\nprint(2", SUM, "", "``` ```", "```python\n```"]
    ) == [1, 1, 0, 0, 0, 0]
    assert judge(None, SUMS, [two], program="first_block") == [0]
    assert judge(None, SUMS, [two, SUM], program="whole") == [0, 1]


def test_hostile_programs_never_score(judge):
    """Not in a single test, however it compares; and the run continues."""
    with_limit = ["answers without end"]
    rewards, metadata = judge(list(HOSTILE.values()), TESTS, score="share", metadata=True)
    assert dict(zip(HOSTILE, rewards, strict=True)) == dict.fromkeys(HOSTILE, 0.0)
    assert metadata["reward_errors"] == [0.0]
    assert metadata["reward_limits"][0] <= len(with_limit) / len(HOSTILE)
    assert judge([ADD], ADDS, score="share") == [1.0]


def test_builtin_names_never_come_from_the_program(judge):
    for names in [CLAIMED, *([name] for name in CLAIMED)]:
        assert judge([CLAIMS.format(names=names)], BUILTIN_TESTS, score="share") == [0], names


def test_tests_whose_process_fails_are_not_counted_as_passed(judge):
    test = "import atexit, os\natexit.register(os._exit, 3)\nassert add(1, 2) == 3"
    assert judge([ADD], [test]) == [0]


@pytest.mark.parametrize(("program", "test"), UNKNOWING)
def test_a_program_without_the_answer_does_not_pass(judge, program, test):
    assert judge([program], [test], wall_s=3.0) == [0]


def test_greedy_programs_are_ended_with_their_child_processes(judge):
    before, began = processes(), time.monotonic()
    rewards, metadata = judge(
        list(GREEDY.values()), [{"input": "", "output": "3"}], wall_s=1.0, workers=4, metadata=True
    )
    assert dict(zip(GREEDY, rewards, strict=True)) == dict.fromkeys(GREEDY, 0.0)
    assert metadata["reward_errors"] == [0.0]
    assert metadata["reward_limits"][0] >= 4 / len(GREEDY)
    assert time.monotonic() - began < 60
    deadline = time.monotonic() + 10
    while (left := processes() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def processes():
    """The processes that are running a program."""
    processes = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                processes |= {pid} if b"program.py" in file.read() else set()
        except OSError:
            continue
    return processes


def test_programs_that_hit_a_limit_are_counted_and_reported(judge, caplog):
    with caplog.at_level(logging.WARNING):
        rewards, metadata = judge(["while True: pass", SUM], SUMS[:1], metadata=True)
    reason = "a program used up 1 s of processor time"
    assert rewards == [0, 1]
    assert metadata == {
        "reward_limits": [0.5],
        "reward_errors": [0.0],
        "reward_reasons": [[reason, None]],
    }
    assert "sample s0, response 1 of 2: a program used up 1 s of processor time" in caplog.text


def test_programs_reach_no_network_no_files_and_no_processes(judge, tmp_path):
    secret = tmp_path / "tests.jsonl"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        came = []
        threading.Thread(target=lambda: came.append(server.accept()), daemon=True).start()
        program = f"""
            import os, socket, sys
            found = []
            home = os.path.expanduser("~/x")
            for file in ({str(secret)!r}, {__file__!r}, "/etc/passwd", "/proc/self/status", home):
                if os.path.exists(file): found.append(file)
            try:
                socket.create_connection(("127.0.0.1", {port}), 1)
                found.append("network")
            except OSError: pass
            for folder in ("/usr", sys.prefix, "/", "/dev", "/etc"):
                try:
                    open(folder + "/written", "w")
                    if folder != "/": found.append("wrote to " + folder)
                except OSError: pass
            for pid in (os.getppid(), {os.getpid()}, 1, -1):
                try: pid and os.kill(pid, 0 if pid == -1 else 9)
                except OSError: pass
            if {os.getpid()} != os.getpid():
                try:
                    os.kill({os.getpid()}, 0)
                    found.append("process")
                except OSError: pass
            os.symlink({str(secret)!r}, "link")
            try: found.append(open("link").read())
            except OSError: pass
            print(sorted(os.listdir(".")), found, len(os.environ) < 9, os.getuid() != 0)
        """
        expected = "['link', 'program.py'] [] True True"
        assert judge([program], [{"input": "", "output": expected}]) == [1]
    assert not came
    assert not (tmp_path / "written").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="all other tests are run by a plain user")
def test_the_sandbox_takes_no_privileges(tmp_path_factory):
    """Of a plain user, by the system's Python, which that user can read."""
    python, folder = "/usr/bin/python3", Path(_sandbox.__file__).parent
    tried = subprocess.run(
        [python, "-c", f"open({str(folder / '_sandbox.py')!r})"],
        user=65534,
        capture_output=True,
        cwd="/",
    )
    if tried.returncode:
        pytest.skip("nobody cannot read it")
    done = subprocess.run(
        [python, "-B", "-c", PLAIN_USER.format(folder=str(folder.parent))],
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
    )
    assert done.stdout.strip() == "65534 ['program.py'] False", done.stderr


def test_programs_do_not_see_files_of_each_other(judge):
    program = (
        "import os\nprint(sorted(os.listdir('.')), os.listdir('/work'), sep='')\n"
        "open('mark', 'w').write('x')"
    )
    tests = [{"input": str(n), "output": "['program.py']['program.py']"} for n in range(3)]
    assert judge([program], tests) == [1]


def test_equal_programs_run_once(judge, monkeypatch):
    seen = []
    interface = CodeRewardInterface(workers=1)
    monkeypatch.setattr(
        interface.pool, "run", lambda tasks, **_: seen.extend(tasks) or [None] * len(tasks)
    )
    model, data = batch([[fenced(SUM)] * 3 + [fenced(ADD)]], [SUMS])
    with pytest.raises((RuntimeError, IndexError, StopIteration)):
        interface.inference(model, data, SPEC)
    assert len(seen) == 4
    assert not any("expected" in task or "output" in task for task in seen), (
        "what is expected stays here"
    )


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "sample s0 has no tests"),
        ([], "sample s0 has no tests"),
        ([{"input": "1"}], r"entry 1 of the tests of sample s0 is {'input': '1'}"),
        (["assert True", 3], "entry 2 of the tests of sample s0 is 3"),
        (["  "], "entry 1 of the tests"),
    ],
)
def test_rows_without_tests_are_refused(tests, message):
    model, data = batch([["x"]], [tests])
    with pytest.raises(DataError, match=message) as caught:
        CodeRewardInterface().inference(model, data, SPEC)
    assert caught.value.code == "F31"


UNITTEST = """\
import unittest
class Tests(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
if __name__ == "__main__":
    unittest.main()
"""
CHECK = "def check(candidate):\n    assert candidate(2, 3) == 5"


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        (["def test_add():\n    assert add(2, 3) == 5"], None),
        (["async def test_add():\n    assert add(2, 3) == 5"], "add"),
        ([UNITTEST], None),
        (["import pytest\n@pytest.mark.fast\ndef test_add():\n    assert add(2, 3) == 5"], None),
        ([CHECK], None),
        (["CASES = [(2, -3)] * 2", "# assert add(2, 3) == 5", '"""add"""', "x: int"], None),
        (["try:\n    import numpy\nexcept ImportError:\n    numpy = None"], "add"),
        (["def test_add():\n    assert add(2, 3) == 5", SUMS[0]], None),
    ],
)
def test_rows_whose_code_executes_nothing_are_refused(tests, entry_point):
    """Every program would pass."""
    model, data = batch([["x"]], [tests], entry_point=[entry_point])
    with pytest.raises(DataError, match="the tests of sample s0 executes nothing") as caught:
        CodeRewardInterface().inference(model, data, SPEC)
    assert caught.value.code == "F31"
    assert "call the functions" in caught.value.hint


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        ([CHECK], "add"),
        (["METADATA = {}\n" + CHECK], "add"),
        (["check = lambda candidate: candidate(2, 3)"], "add"),
        (["def test_add():\n    assert add(2, 3) == 5\ntest_add()"], None),
        ([UNITTEST + "else:\n    unittest.main()"], None),
        (["def close(a, b): return abs(a - b) < 1", "assert close(add(2, 3), 5)"], None),
        (["class Tests:\n    assert add(2, 3) == 5"], None),
        (["def now(f): f()\n@now\ndef test_add():\n    assert add(2, 3) == 5"], None),
        (["try:\n    assert add(2, 3) == 5\nfinally:\n    pass"], None),
        (["if add(2, 3) != 5: raise ValueError"], None),
        (["total = add(2, 3)"], None),
        (["for n in (1, 2):\n    assert add(n, n) == 2 * n"], None),
        (["assert add(2, 3) ="], None),
    ],
)
def test_rows_whose_code_executes_something_are_accepted(tests, entry_point):
    tasks = tasks_of({"tests": tests, "entry_point": entry_point}, "tests", "sample s0")
    assert tasks == [{"tests": tests, "entry_point": entry_point}]


def test_tests_can_come_from_another_field_of_the_row():
    model, data = batch([[fenced(ADD)]], [None], my_tests=[ADDS])
    interface = CodeRewardInterface(tests_key="my_tests", workers=1)
    assert interface.inference(model, data, SPEC).data["rewards"].tolist() == [1.0]
    interface.pool.close()


@pytest.mark.parametrize("name", ["unshare", "mount", "pivot_root"])
def test_without_isolation_the_run_is_refused(tmp_path, name):
    """Unless the user asks for limits alone."""
    model, data = batch([[fenced(SUM)]], [SUMS])
    interface = CodeRewardInterface(workers=1)
    interface.pool._command = [sys.executable, "-P", "-c", BROKEN.format(name=name)]
    with pytest.raises(
        ResourceError, match=f"programs cannot be isolated here: .*{name}: Operation not permitted"
    ) as caught:
        interface.inference(model, data, SPEC)
    assert "isolation to limits" in caught.value.hint
    if name == "unshare":
        weaker = CodeRewardInterface(workers=1, isolation="limits")
        weaker.pool._command = interface.pool._command
        assert weaker.inference(model, data, SPEC).data["rewards"].tolist() == [1.0]
        weaker.pool.close()


def test_isolation_by_limits_still_enforces_limits(judge, tmp_path):
    programs = [
        SUM,
        "while True: pass",
        "x = bytearray(4 << 30)\nprint(3)",
        "import os\nprint(3)\nos.fork() or os.wait()",
    ]
    assert judge(programs, SUMS[:1], isolation="limits")[:3] == [1, 0, 0]
    assert judge([ADD, ADD.replace("+", "-")], ADDS, isolation="limits") == [1, 0]


def test_a_program_that_could_not_be_run_is_reported_as_an_error(judge):
    interface = CodeRewardInterface(workers=1)
    tried = []

    def refused(tasks, **_):
        from rlcli.interfaces.rewards._worker_pool import End, TaskOutcome

        tried.append(len(tasks))
        return [TaskOutcome(end=End.DIED) for _ in tasks]

    interface.pool.run = refused
    model, data = batch([[fenced(SUM)]], [SUMS])
    with pytest.raises(
        WorkerError, match="1 of 1 scores could not be computed; first, sample s0: a program"
    ):
        interface.inference(model, data, SPEC)
    assert tried == [2]


@pytest.mark.parametrize("args", [{"correct_reward": 0.0}, {"cpu_s": 0}, {"processes": 0}])
def test_invalid_arguments_are_refused(args):
    with pytest.raises(ValueError, match="must be"):
        CodeRewardInterface(**args)


def test_the_sandbox_does_not_show_home_or_temporary_folders():
    assert _confinement.PYTHON.startswith("/")
    assert not any(
        path.startswith(("/home", "/tmp", "/root/.ssh")) for path in _confinement.VISIBLE[:-1]
    )


@pytest.mark.long
def test_programs_that_sleep_do_not_exceed_the_deadline_of_a_call(caplog):
    """They get their share of the time; a right one after them is still run,
    and none is an error."""
    interface = CodeRewardInterface(workers=2)
    sleepers = [fenced(f"import time\ntime.sleep(99)  # {number}") for number in range(12)]
    model, data = batch([[*sleepers, fenced(SUM)]], [SUMS[:1]])
    model.call_deadline = 10.0
    began = time.monotonic()
    out = interface.inference(model, data, SPEC)
    assert time.monotonic() - began < model.call_deadline
    assert out.data["rewards"].tolist() == [0.0] * 12 + [1.0]
    assert out.metadata["reward_limits"] == [pytest.approx(12 / 13)]
    assert out.metadata["reward_errors"] == [0.0]
    interface.pool.close()


def test_programs_without_time_left_in_a_call_are_counted(caplog):
    interface = CodeRewardInterface(workers=1)
    model, data = batch([[fenced(f"print({number})") for number in range(40)]], [SUMS[:1]])
    model.call_deadline = 0.0
    out = interface.inference(model, data, SPEC)
    assert out.data["rewards"].tolist() == [0.0] * 40
    assert (out.metadata["reward_limits"], out.metadata["reward_errors"]) == ([1.0], [0.0])
    assert "was not run: the other programs of its call used up the time" in caplog.text
    interface.pool.close()


def test_the_deadline_of_a_call_comes_from_the_recipe():
    from rlcli.recipe.resolve import load_recipe
    from rlcli.runtime.roles import describe_role

    recipe = load_recipe("sft_math", ["launch.step_deadline=77"]).recipe
    assert describe_role(recipe, "actor", torch.device("cpu"))[0].call_deadline == 77
