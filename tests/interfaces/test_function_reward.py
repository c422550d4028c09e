"""A user's function as the reward: the arguments it receives, and what happens when it fails."""

import contextlib
import itertools
import logging
import os
import socket
import textwrap
import threading
import time

import pytest
import torch

from rlcli.api.model import MicroBatchSpec, Model
from rlcli.errors import DataError, ProjectError, UsageError, WorkerError
from rlcli.interfaces.rewards.function_reward import FunctionRewardInterface
from rlcli.processes import file_write_gap
from rlcli.testing.batches import DigitTokenizer, make_batch
from rlcli.testing.interface import InterfaceContract

SPEC = MicroBatchSpec()
LENGTHS = [[(2, 3), (2, 1)], [(1, 2)], [(3, 4), (3, 0)]]


class TestContract(InterfaceContract):
    name = "function_reward"

    @pytest.fixture
    def args(self, tmp_path):
        (tmp_path / "my_reward.py").write_text(
            "def score(prompt, response, answer):\n"
            "    return len(prompt) + sum(map(int, response)) / 7 + 100 * "
            "(str(answer) in response)\n"
        )
        return {"path": str(tmp_path / "my_reward.py"), "workers": 1}


@pytest.fixture
def reward(tmp_path, monkeypatch):
    """Makes a reward of a function's body; its parameters are `response, **row`."""
    interfaces = []
    # functions run in its folder, where there is one
    monkeypatch.delenv("RLCLI_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)

    def make(body, head="def score(response, **row):", **args):
        (tmp_path / "my_reward.py").write_text(
            f"{head}\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}\n"
        )
        interfaces.append(
            FunctionRewardInterface(path="my_reward.py", **{"workers": 1, "cpu_s": 60.0, **args})
        )
        return interfaces[-1]

    yield make
    for interface in interfaces:
        interface.pool.close()


def batch(**metadata):
    return make_batch(["packed_input_ids", "prompt_mask"], LENGTHS, metadata=metadata)


def run(interface, data=None):
    model = Model("reward", None, DigitTokenizer(), torch.device("cpu"))
    return interface.inference(model, batch() if data is None else data, SPEC)


def counted(output):
    """For each sample the shares of responses that hit a limit, and that could not be scored."""
    assert output.metadata.keys() == {"reward_limits", "reward_errors", "reward_reasons"}
    return output.metadata["reward_limits"], output.metadata["reward_errors"]


def texts(data):
    """(prompt, response) of each sequence, without special tokens, as the tokenizer has them."""
    decode = DigitTokenizer().decode
    pieces = (
        data.data[key].split(data.flat_seqlens("packed_input_ids"))
        for key in ("packed_input_ids", "prompt_mask")
    )
    return [
        (decode(ids[mask], True), decode(ids[~mask], True))
        for ids, mask in zip(*pieces, strict=True)
    ]


def test_the_function_receives_prompt_response_and_row(reward):
    data = batch(task=["add", "add", "multiply"], level=[1, 2, [3, {"a": None}]])
    body = """
        assert sorted(row) == ["answer", "level", "prompt", "task"], sorted(row)
        said = repr((row["prompt"], response, row["task"], row["level"]))
        return sum(ord(c) * (i + 1) for i, c in enumerate(said))
    """
    output = run(reward(body), data)
    rows = [
        ("add", 1),
        ("add", 1),
        ("add", 2),
        ("multiply", [3, {"a": None}]),
        ("multiply", [3, {"a": None}]),
    ]
    texts_seen = [repr((*pair, *row)) for pair, row in zip(texts(data), rows, strict=True)]
    expected = [sum(ord(c) * (i + 1) for i, c in enumerate(one)) for one in texts_seen]
    assert output.data["rewards"].tolist() == expected
    assert output.data["rewards"].dtype == torch.float32
    assert output.seqlens["rewards"] == [[1, 1], [1], [1, 1]]
    assert counted(output) == ([0, 0, 0], [0, 0, 0])


def test_the_function_receives_only_the_parameters_it_names(reward):
    head = "def score(level, response, *, bonus=0.5, nothing=None):"
    output = run(reward("return level + bonus", head), batch(level=[1, 2, 3]))
    assert output.data["rewards"].tolist() == [1.5, 1.5, 2.5, 3.5, 3.5]


def test_a_parameter_that_rows_do_not_have_is_refused(reward):
    with pytest.raises(
        DataError, match=r"score of my_reward.py takes solution, which the rows do not have"
    ) as caught:
        run(reward("return 1", "def score(response, solution):"))
    assert caught.value.hint == "they have answer, prompt, response"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise ValueError('boom ' + response)",
            r"raised ValueError: boom .*\n.*line 2, in score\n.*raise ValueError",
        ),
        ("return 'one'", "raised TypeError: it returned 'one', which is not a number"),
        ("return None", "raised TypeError: it returned None, which is not a number"),
        ("return [1.0]", r"raised TypeError: it returned \[1.0\], which is not a number"),
        (
            "return float('nan')",
            "raised ValueError: it returned nan, which is not a finite float32",
        ),
        ("return 1e39", r"raised ValueError: it returned 1e\+39, which is not a finite float32"),
        ("raise SystemExit(0)", "raised SystemExit: 0"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    ],
)
def test_an_exception_ends_the_run_and_is_reported(reward, tmp_path, body, message):
    with pytest.raises(ProjectError, match=f"(?s)score of my_reward.py {message}") as caught:
        run(reward(body))
    assert caught.value.code == "F51"
    assert caught.value.what.count("it returned") <= 1, "with what it returned twice"
    assert "could not be computed; first, sample s0, response 1 of 2: " in caught.value.what
    assert caught.value.where.startswith(f"{tmp_path}/my_reward.py:2") or "returned" in message


def test_a_response_that_cannot_be_scored_is_said_why(reward):
    body = "return 1 / (not row['bad'])"
    data = batch(bad=[False, True, False])
    output = run(reward(body, max_error_fraction=0.2), data)
    first, (reason,), last = output.metadata["reward_reasons"]
    assert "ZeroDivisionError" in reason
    assert (first, last) == ([None, None], [None, None])


def test_a_small_share_of_exceptions_is_counted_and_reported(reward, caplog):
    data = batch(bad=[False, True, False])
    with caplog.at_level(logging.WARNING):
        output = run(
            reward("return 1 / (not row['bad'])", error_reward=-3.0, max_error_fraction=0.2), data
        )
    assert output.data["rewards"].tolist() == [1.0, 1.0, -3.0, 1.0, 1.0]
    assert counted(output) == ([0, 0, 0], [0, 1, 0])
    assert "1 of 5 scores could not be computed; first, sample s1: " in caplog.text
    assert "ZeroDivisionError: division by zero" in caplog.text
    assert "line 2, in score" in caplog.text
    assert "Their reward is -3." in caplog.text
    for share in (0.0, 0.2):
        interface = reward("return 1 / (not row['bad'])", max_error_fraction=share)
        with pytest.raises(ProjectError, match="ZeroDivisionError"):
            run(interface, batch(bad=[False, share == 0, share > 0]))
    with pytest.raises(ProjectError, match="1 of 1 scores could not be computed"):
        run(reward("return 1 / 0"), make_batch(["packed_input_ids", "prompt_mask"], [[(2, 3)]]))


@pytest.fixture
def witness(tmp_path, monkeypatch):
    """Records what functions report, as they write no files: name → process numbers. It replies
    with how many reports came before."""
    reports = {}
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    server = socket.create_server("witness", family=socket.AF_UNIX)

    def listen():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    name, pid = connection.recv(100).decode().split()
                    connection.send(str(len(reports.setdefault(name, []))).encode())
                    reports[name].append(int(pid))

    threading.Thread(target=listen, daemon=True).start()
    yield reports
    server.shutdown(socket.SHUT_RDWR)
    server.close()


REPORT = """
import os, socket
def report(name, pid=None):
    with socket.socket(socket.AF_UNIX) as witness:
        witness.connect("witness")
        witness.send(f"{name} {pid or os.getpid()}".encode())
        return int(witness.recv(100))

def score(response, **row):
"""


def test_a_failed_call_is_tried_once_more_in_another_process(reward, witness):
    """The second try succeeds; a third one is never made."""
    body = """
        tries = report(row["place"])
        if tries < row["failures"]:
            raise OSError("not yet")
        return tries
    """
    data = batch(place=["a", "b", "c"], failures=[0, 1, 9]).select_indices([1, 2])
    assert run(reward(body, REPORT), data.select_indices([0])).data["rewards"].tolist() == [1.0]
    with pytest.raises(ProjectError, match="not yet"):
        run(reward(body, REPORT), data.select_indices([1]))
    assert len(set(witness["b"])) == 2, "two processes"
    assert len(set(witness["c"])) == 4, (
        "of either of two responses; one error alone would be tolerated"
    )


def test_processor_time_is_a_limit_of_the_response(reward, caplog):
    body = "while row['slow']: pass\nreturn 1"
    with caplog.at_level(logging.WARNING):
        output = run(reward(body, cpu_s=0.3, limit_reward=-1.0), batch(slow=[False, True, False]))
    assert output.data["rewards"].tolist() == [1.0, 1.0, -1.0, 1.0, 1.0]
    assert counted(output) == ([0, 1, 0], [0, 0, 0])
    assert (
        "1 of 5 responses hit a limit; first, sample s1: score of my_reward.py used up 0.3 s of"
        in caplog.text
    )


def test_memory_is_a_limit_of_the_response(reward, caplog):
    with caplog.at_level(logging.WARNING):
        output = run(
            reward("return len(bytearray(row['bytes'])) > 0", memory_gib=0.5),
            batch(bytes=[1, 1 << 30, 1]),
        )
    assert output.data["rewards"].tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]
    assert counted(output) == ([0, 1, 0], [0, 0, 0])
    assert "used up 0.5 GiB of memory" in caplog.text


def test_memory_kept_by_earlier_calls_does_not_count_for_a_response(reward):
    """A function that leaks memory gets fresh processes."""
    head = "kept = []\ndef score(response, **row):"
    output = run(
        reward("kept.append(bytearray(200 << 20))\nreturn 1", head, memory_gib=0.6), batch()
    )
    assert output.data["rewards"].tolist() == [1.0] * 5
    assert output.metadata["reward_limits"] == [0, 0, 0]


def test_a_hang_is_an_error_and_not_a_score(reward):
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"it neither answered nor used processor time in 0.5 s"):
        run(
            reward("import time\ntime.sleep(1000 if row['slow'] else 0)\nreturn 1", hang_s=0.5),
            batch(slow=[False, True, True]),
        )
    assert time.monotonic() - begun < 30


def test_a_slow_function_is_not_treated_as_hanging(reward, monkeypatch):
    """`hang_s` applies to an idle process: a busy machine does not turn a slow function into an
    error."""
    used = itertools.count()
    monkeypatch.setattr(
        "rlcli.interfaces.rewards._worker_pool._cpu_seconds", lambda _: next(used) / 100
    )
    interface = reward("import time\ntime.sleep(1)\nreturn 1", hang_s=0.2)
    assert run(interface, batch().select_indices([1])).data["rewards"].tolist() == [1.0]


def test_a_function_that_ends_its_process_is_an_error(reward):
    with pytest.raises(WorkerError, match="its process ended while the function ran") as caught:
        run(reward("import os\nos._exit(0)"))
    assert caught.value.code == "F52"


@pytest.mark.long
@pytest.mark.parametrize("end", ["while True: pass", "return 1", "os._exit(3)", "time.sleep(60)"])
@pytest.mark.parametrize("session", ["False", "True"])
def test_processes_started_by_a_call_end_with_it(reward, witness, end, session):
    """Whether the call returns, reaches its limit, exits or hangs;
    also a child with its own session."""
    body = f"""
        import subprocess, time
        child = subprocess.Popen(["sleep", "1000"], start_new_session={session})
        report("child", child.pid)
        {end}
    """
    interface = reward(body, REPORT, cpu_s=0.3, hang_s=1.0, max_error_fraction=1.0)
    run(interface, batch().select_indices([1]))
    deadline = time.monotonic() + 10
    while any(map(_runs, witness["child"])) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_runs, witness["child"]))


@pytest.mark.skipif(
    bool(file_write_gap()), reason="this kernel has no Landlock that also refuses to truncate"
)
@pytest.mark.parametrize(
    "attempt",
    [
        "open('kept', 'w')",
        "open('kept', 'r+')",
        "os.truncate('kept', 0)",
        "os.unlink('kept')",
        "os.mkdir('new')",
        "os.rename('kept', 'moved')",
        "os.symlink('kept', 'new')",
        "os.link('kept', 'new')",
        "open('new', 'x')",
        "subprocess.run(['rm', 'kept'], check=True)",
        "os.mkfifo('new')",
        "shutil.copy('kept', 'new')",
    ],
)
def test_the_function_cannot_write_create_or_remove_files(reward, tmp_path, attempt):
    (tmp_path / "kept").write_text("content")
    body = f"""
        import os, shutil, subprocess
        subprocess.run(["true"], stdout=subprocess.DEVNULL, check=True)
        assert open("kept").read() == "content"
        try: {attempt}
        except (OSError, subprocess.CalledProcessError): return 1
    """
    assert run(reward(body)).data["rewards"].tolist() == [1.0] * 5
    assert sorted(os.listdir(tmp_path)) == ["kept", "my_reward.py"]
    assert (tmp_path / "kept").read_text() == "content"


def test_changes_made_by_a_call_do_not_reach_the_next(reward):
    """Every call, in any order, starts from the state after loading."""
    head = "import builtins, os, sys\ncalls = []\ndef score(response, **row):"
    body = """
        calls.append(response)
        os.environ["SEEN"] = os.environ.get("SEEN", "") + "x"
        value = int("3") + len(calls) + len(os.environ["SEEN"]) + sys.getrecursionlimit() / 1e6
        builtins.int = lambda text: 99
        sys.setrecursionlimit(50_000)
        os.chdir("/")
        return value
    """
    assert run(reward(body, head)).data["rewards"].tolist() == [pytest.approx(5.001)] * 5


STRAY = """
import os
for descriptor in range(3, 64):
    try: os.write(descriptor, {noise})
    except OSError: pass
{end}
"""


@pytest.mark.parametrize(
    ("noise", "end"),
    [
        (b"noise", "return 1"),
        (b'{"value": "x"}', "os._exit(0)"),
        (b'{"value": 1e39}', "os._exit(0)"),
        (b'{"error": 3}', "os._exit(0)"),
        (b'{"lacks": 3, "row": []}', "os._exit(0)"),
        (b"[3]", "os._exit(0)"),
        (b"x" * (1 << 21), "return 1"),
    ],
)  # fmt: skip
def test_output_to_a_stray_descriptor_is_an_error_of_the_function(reward, noise, end):
    with pytest.raises(
        WorkerError, match=r"sent something other than its reply|its process ended"
    ) as caught:
        run(reward(STRAY.format(noise=noise, end=end)))
    assert caught.value.code == "F52"


def test_output_to_a_stray_descriptor_during_loading_is_an_error(reward):
    head = STRAY.format(noise=b"noise\n", end="def score():")
    with pytest.raises(
        WorkerError,
        match="did not start, 3 times in a row: it wrote to the descriptor of its replies",
    ):
        run(reward("return 1", head))


def test_slow_functions_do_not_exceed_the_deadline_of_a_call(reward, monkeypatch):
    """With a small share of it, for speed; the programs of `code_reward` take their usual share."""
    monkeypatch.setattr("rlcli.interfaces.rewards._worker_pool.SHARE_OF_DEADLINE", 0.1)
    model = Model("reward", None, DigitTokenizer(), torch.device("cpu"), call_deadline=10.0)
    begun = time.monotonic()
    out = reward("import time\ntime.sleep(100)").inference(model, batch(), SPEC)
    assert time.monotonic() - begun < model.call_deadline
    assert out.metadata["reward_limits"] == [1.0] * 3


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_function_sees_no_secrets_and_its_prints_are_harmless(reward, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    body = """
        import os, sys
        print('{"value": 9}', flush=True)
        os.write(1, b'{"value": 9}')
        assert sys.stdin.read() == ""
        return "HF_TOKEN" in os.environ
    """
    assert run(reward(body)).data["rewards"].tolist() == [0.0] * 5


def test_what_a_call_prints_is_shown_safe_for_a_terminal(reward, capsys):
    body = r"""
        print("scored \x1b[2J", response)
        print("as 1", file=sys.stderr)
        return 1
    """
    head = "import sys\nprint('imported')\ndef score(response, **row):"
    assert run(reward(body, head)).data["rewards"].tolist() == [1.0] * 5
    imported, *lines = capsys.readouterr().err.splitlines()
    assert imported == "imported"
    assert [line.split()[:2] for line in lines] == [["scored", "\\x1b[2J"], ["as", "1"]] * 5


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            "import nonesuch_at_all\ndef score(response):",
            "cannot be loaded: ModuleNotFoundError: No module named",
        ),
        ("def other(response):", "cannot be loaded: AttributeError: .* has no attribute 'score'"),
        ("def score(response:", "cannot be loaded: SyntaxError"),
        ("raise SystemExit(3)\ndef score(response):", "cannot be loaded: SystemExit: 3"),
        ("score = 3\nif score:", "cannot be loaded: TypeError: score is 3, not a function"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_reported(reward, tmp_path, head, message):
    with pytest.raises(ProjectError, match=message) as caught:
        run(reward("pass", head))
    assert caught.value.exit_code == 2
    assert "Error" in caught.value.what or "Exit" in caught.value.what


def test_a_role_without_a_tokenizer_is_refused(reward):
    with pytest.raises(UsageError, match="needs a tokenizer"):
        reward("return 1").inference(Model("r", None, None, torch.device("cpu")), batch(), SPEC)
