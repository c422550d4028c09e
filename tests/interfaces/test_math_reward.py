"""The rule-based reward, and the processes behind it, which must die when told to."""

import os
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.errors import DataError, ModelError, UsageError, WorkerError
from rlcli.interfaces._math_pool import MathPool
from rlcli.interfaces.math_reward import MathRewardInterface
from rlcli.testing.interface import InterfaceContract

SPEC = MicroBatchSpec()


class TestContract(InterfaceContract):
    name = "math_reward"
    args = {"workers": 1, "timeout_s": 60.0}


class TestContractOfTheLastNumber(InterfaceContract):
    name = "math_reward"
    args = {"last_number": True, "symbolic": False, "correct_reward": 5.0, "wrong_reward": -5.0}


class Characters:
    """One token per character; 0 is special."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i or not skip_special_tokens)


def role(tokenizer=None):
    return Model("reward", None, tokenizer or Characters(), torch.device("cpu"))


def batch(groups, answers, prompt="#### 1 is no answer: "):
    """`groups`: for each sample the texts of its responses, each closed by the special token 0."""
    tokens = [[ord(c) for c in prompt + text] + [0] for group in groups for text in group]
    lengths = [[len(prompt) + len(text) + 1 for text in group] for group in groups]
    masks = [torch.arange(len(sequence)) < len(prompt) for sequence in tokens]
    return SequenceSample.from_default(
        ids=[f"q{i}" for i in range(len(groups))],
        seqlens={"packed_input_ids": lengths, "prompt_mask": lengths},
        data={
            "packed_input_ids": torch.tensor([t for s in tokens for t in s]),
            "prompt_mask": torch.cat(masks),
        },
        metadata={"answer": answers},
    )


def fake_pool(tmp_path, body, n_workers=2, limit_s=1.0):
    """A pool whose processes run `body` for each task `t`, and print what it leaves in `r`."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, time\nprint(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin:\n    t = json.loads(line)\n"
        + textwrap.indent(textwrap.dedent(body).strip(), "    ")
        + "\n    print(json.dumps(r), flush=True)\n"
    )
    return MathPool(n_workers, limit_s, [sys.executable, str(script)])


def test_rewards_by_sample_and_response():
    data = batch([["2+2=4 #### 4", "#### 5"], ["no idea", "the answer is 1/2."]], ["so\n#### 4", "0.5"])
    interface = MathRewardInterface(correct_reward=2.0, wrong_reward=-1.0)
    out = interface.inference(role(), data, SPEC)
    assert out.data["rewards"].tolist() == [2.0, -1.0, -1.0, 2.0]
    assert out.data["rewards"].dtype == torch.float32
    assert out.data["solved"].tolist() == [True, False, False, True]
    assert out.seqlens["rewards"] == [[1, 1], [1, 1]]
    assert out.ids == data.ids
    assert out.metadata == {"reward_errors": [0, 0], "reward_timeouts": [0, 0]}
    assert not interface.pool._workers, "numbers need no processes"


def test_symbolic_comparison_in_real_processes():
    data = batch(
        [
            ["#### x + 1", "\\boxed{1+x}", "#### x - 1"],
            ["\\boxed{\\frac{\\sqrt{4}}{4}}", "#### 2^{-1}", "#### ((("],
        ],
        ["1 + x", "\\frac{1}{2}"],
    )
    interface = MathRewardInterface(workers=1, timeout_s=60)
    assert interface.inference(role(), data, SPEC).data["solved"].tolist() == [
        True,
        True,
        False,
        True,
        True,
        False,
    ]
    pids = [worker.process.pid for worker in interface.pool._workers]
    interface.inference(role(), batch([["#### y"]], ["2y"]), SPEC)
    assert [worker.process.pid for worker in interface.pool._workers] == pids, "processes are kept"
    interface.pool.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_verdicts_come_back_in_order_whoever_is_quicker(tmp_path):
    pool = fake_pool(tmp_path, "time.sleep(float(t['answer']))\nr = {'equal': t['expected'] == 'yes'}\n", n_workers=3)
    pairs = [("0.2", "yes"), ("0", "no"), ("0.1", "yes"), ("0", "yes"), ("0", "no")]
    assert pool.compare(pairs) == [True, False, True, True, False]
    pool.close()


def test_a_hanging_comparison_is_killed_in_time_and_the_others_go_on(tmp_path):
    pool = fake_pool(tmp_path, "while t['answer'] == 'hang': pass\nr = {'equal': True}\n", n_workers=1, limit_s=0.3)
    begun = time.monotonic()
    assert pool.compare([("a", ""), ("hang", ""), ("b", "")]) == [True, "timeout", True]
    assert time.monotonic() - begun < 5
    pool.close()


def test_a_dying_worker_is_an_error_and_is_replaced(tmp_path):
    pool = fake_pool(tmp_path, "os._exit(3) if t['answer'] == 'die' else None\nr = {'equal': True}\n", n_workers=1)
    first, second = pool.compare([("die", ""), ("a", "")])
    assert first == "error: the worker died (exit code 3)"
    assert second is True
    pool._workers[0].process.kill()
    pool._workers[0].process.wait()
    assert pool.compare([("a", "")]) == [True], "one that died while idle is replaced in silence"
    pool.close()


def test_failures_are_counted_and_stop_the_run_above_the_limit(tmp_path, caplog):
    body = """\
        time.sleep(9 if t['answer'] == 'slow' else 0)
        r = {'error': 'boom'} if t['answer'] == 'bad' else {'equal': True}
    """
    data = batch([["#### ok", "#### bad"], ["#### slow", "#### bad"]], ["x", "y"])

    def interface(**settings):
        made = MathRewardInterface(timeout_s=0.3, **settings)
        made.pool = fake_pool(tmp_path, body, limit_s=0.3)
        return made

    with pytest.raises(WorkerError, match=r"3 of 4 rewards.*sample q0: error: boom") as caught:
        interface().inference(role(), data, SPEC)
    assert caught.value.code == "F51"
    tolerant = interface(on_error="wrong")
    out = tolerant.inference(role(), data, SPEC)
    assert out.data["rewards"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert out.metadata == {"reward_errors": [1, 1], "reward_timeouts": [0, 1]}
    assert "sample q1: timeout" in caplog.text
    assert interface(max_error_fraction=0.75).inference(role(), data, SPEC).data["solved"].sum() == 1


def test_a_missing_library_is_said_and_not_scored(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text('print(\'{"broken": "ImportError: no math_verify"}\')')
    with pytest.raises(ModelError, match="no math_verify"):
        MathPool(1, 1.0, [sys.executable, str(script)]).compare([("a", "b")])
    script.write_text("raise SystemExit(5)")
    with pytest.raises(WorkerError, match=r"did not start.*exit code 5"):
        MathPool(1, 1.0, [sys.executable, str(script)]).compare([("a", "b")])


def test_a_row_without_an_answer():
    with pytest.raises(DataError, match="sample q1 has no answer"):
        MathRewardInterface().inference(role(), batch([["#### 1"], ["#### 1"]], ["1", None]), SPEC)


def test_a_role_without_a_tokenizer():
    with pytest.raises(UsageError, match="needs a tokenizer"):
        MathRewardInterface().inference(Model("r", None, None, torch.device("cpu")), batch([["1"]], ["1"]), SPEC)


def test_processes_end_with_their_parent(tmp_path):
    """A parent killed in the middle of an endless comparison leaves nothing behind."""
    import subprocess

    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\nfrom rlcli.interfaces._math_pool import MathPool\n"
        "pool = MathPool(1, 60.0)\npool.compare([('x+1', '1+x')])\n"
        "print(pool._workers[0].process.pid, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    pid = int(parent.stdout.readline())
    assert os.path.exists(f"/proc/{pid}")
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    "settings", [{"on_error": "zero"}, {"max_error_fraction": 2.0}, {"workers": 0}, {"timeout_s": 0.0}]
)
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        MathRewardInterface(**settings)
