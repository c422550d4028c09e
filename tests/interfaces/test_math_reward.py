"""The rule-based reward, and the processes behind it, which must end on request."""

import os
import random
import sys
import textwrap
import time
from itertools import product
from pathlib import Path
from unittest.mock import ANY

import psutil
import pytest
import torch
import yaml

from rlcli.api.data import SequenceSample
from rlcli.api.model import MicroBatchSpec, Model
from rlcli.errors import DataError, ModelError, UsageError, WorkerError
from rlcli.interfaces._answers.verdict import Comparison, Verdict
from rlcli.interfaces.rewards._math_pool import MathPool
from rlcli.interfaces.rewards.math_reward import MathRewardInterface
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


def fake_pool(tmp_path, body, workers=2, cpu_s=1.0):
    """A pool whose processes run `body` for each task `t`, and print what it leaves in `r`."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys, time\nsys.stdin.readline()\nprint(json.dumps({'ready': True}), "
        "flush=True)\n"
        "for line in sys.stdin:\n    t = json.loads(line)\n"
        + textwrap.indent(textwrap.dedent(body).strip(), "    ")
        + "\n    print(json.dumps(r), flush=True)\n"
    )
    return MathPool(workers, cpu_s, [sys.executable, str(script)])


def test_rewards_are_ordered_by_sample_and_response():
    data = batch(
        [["2+2=4 #### 4", "#### 5"], ["no idea", "the answer is 1/2."]], ["so\n#### 4", "0.5"]
    )
    interface = MathRewardInterface(correct_reward=2.0, wrong_reward=-1.0)
    out = interface.inference(role(), data, SPEC)
    assert out.data["rewards"].tolist() == [2.0, -1.0, -1.0, 2.0]
    assert out.data["rewards"].dtype == torch.float32
    assert out.data["solved"].tolist() == [True, False, False, True]
    assert out.seqlens["rewards"] == [[1, 1], [1, 1]]
    assert out.ids == data.ids
    assert out.metadata == {
        "reward_unparsed": [0, 0],
        "reward_timeouts": [0, 0],
        "reward_crashes": [0, 0],
        "reward_errors": [0, 0],
        "reward_reasons": [
            [None, "wrong answer: 5; expected: 4"],
            ["no answer found", None],
        ],
    }
    assert not interface.pool._workers, "numbers need no processes"


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (("call add(12, 7)", "19"), 1.0),
        (("call add(12, 7)", "call it", "$19$"), 1.0),
        (("call add(12, 7)", "20"), 0.0),
        (("#### 19.\n", "Done."), 1.0),
        (("19", "Is that so?"), 0.0),
        (("19",), 1.0),
    ],
)
def test_the_last_turn_of_an_episode_may_be_the_answer_alone(turns, reward):
    """As a response without tools may be."""
    pieces = [
        (True, "12+7?"),
        *((flag, text) for text in turns for flag, text in ((False, text), (True, "\nseen: 5\n"))),
    ][:-1]
    text = "".join(piece for _, piece in pieces)
    data = batch([[text]], ["19"], prompt="")
    flags = [flag for flag, piece in pieces for _ in piece]
    data.data["prompt_mask"] = torch.tensor([*flags, False])
    assert MathRewardInterface().inference(role(), data, SPEC).data["rewards"].tolist() == [reward]


RESPONSES = yaml.safe_load(
    (Path(__file__).parent / "math_answers" / "responses.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("gold", RESPONSES["wrong"])
def test_hedging_and_wrong_values_earn_nothing(gold):
    responses = RESPONSES["wrong"][gold]
    scores = MathRewardInterface().score_texts(responses, [gold] * len(responses))
    assert dict(zip(responses, scores, strict=True)) == dict.fromkeys(responses, 0.0)


@pytest.mark.parametrize("gold", RESPONSES["right"])
def test_a_right_value_is_accepted_in_all_forms(gold):
    responses = RESPONSES["right"][gold]
    scores = MathRewardInterface().score_texts(responses, [gold] * len(responses))
    assert dict(zip(responses, scores, strict=True)) == dict.fromkeys(responses, 1.0)


def test_expressions_are_compared_in_separate_processes():
    data = batch(
        [
            ["#### x + 1", "\\boxed{1+x}", "#### x - 1"],
            ["\\boxed{\\frac{\\sqrt{12}}{4}}", "#### \\sqrt{3} \\cdot 2^{-1}", "#### ((("],
        ],
        ["1 + x", "\\frac{\\sqrt{3}}{2}"],
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


def test_an_answer_that_cannot_be_parsed_is_unparsed_and_such_a_gold_is_a_text():
    verdicts = {
        Comparison("x+", "x"): Verdict.UNPARSED,
        Comparison("x", "x+"): Verdict.WRONG,
        Comparison("x +", "x  +"): Verdict.RIGHT,
        Comparison("A", "A. red"): Verdict.WRONG,
        Comparison("x", "x"): Verdict.RIGHT,
        Comparison("2x", "x"): Verdict.WRONG,
    }
    pool = MathPool(1, 60.0)
    assert pool.compare(list(verdicts)) == list(verdicts.values())
    pool.close()


def test_a_gold_that_only_looks_like_an_expression_does_not_end_a_run():
    """Which showed only once a response had to be compared with it."""
    data = batch([["#### A", "#### red", "#### B", "#### x^3"]] * 4, ["A. red", "C. x^3+"] * 2)
    interface = MathRewardInterface(workers=1, timeout_s=60)
    out = interface.inference(role(), data, SPEC)
    assert out.data["solved"].tolist() == [True, True, False, False, *[False] * 4] * 2
    assert out.metadata["reward_errors"] == [0] * 4
    interface.pool.close()


def test_a_gold_expression_is_not_searched_for_in_a_list():
    pool = MathPool(1, 60.0)
    pairs = [
        Comparison(answer, "\\sqrt{5}")
        for answer in ("1, \\sqrt{5}", "\\sqrt{5} ,", "\\sqrt{5} 2", "\\{\\sqrt{5}, 1\\}")
    ]
    assert Verdict.RIGHT not in pool.compare(pairs)
    pool.close()


def test_verdicts_are_in_order_whichever_worker_is_faster(tmp_path):
    body = "time.sleep(float(t['answer']))\nr = {'equal': t['expected'] == 'yes'}\n"
    pool = fake_pool(tmp_path, body, workers=3)
    pairs = [("0.2", "yes"), ("0", "no"), ("0.1", "yes"), ("0", "yes"), ("0", "no")]
    expected = [Verdict.RIGHT, Verdict.WRONG, Verdict.RIGHT, Verdict.RIGHT, Verdict.WRONG]
    assert pool.compare([Comparison(*pair) for pair in pairs]) == expected
    pool.close()


def test_a_comparison_over_the_time_limit_does_not_affect_others(monkeypatch):
    """By the kernel, in a real process: a verdict does not depend on how busy the machine is."""
    monkeypatch.setattr("rlcli.interfaces.rewards._math_pool.WALL_FACTOR", 10_000)
    easy, hard = (
        Comparison("x", "x"),
        Comparison("(x+1)^{20} (x-1)^{20}", "(x^2-1)^{20} + \\sin(x)^2 + \\cos(x)^2"),
    )
    pool = MathPool(1, 60.0)
    assert pool.compare([easy]) == [Verdict.RIGHT]
    pool.cpu_s = 0.01
    assert pool.compare([hard]) == [Verdict.TIMEOUT]
    pool.cpu_s = 60.0
    assert pool.compare([easy]) == [Verdict.RIGHT]
    pool.close()


def test_a_worker_that_waits_for_the_processor_is_given_time(tmp_path):
    pool = fake_pool(tmp_path, "time.sleep(0.5)\nr = {'equal': True}\n", workers=1, cpu_s=0.1)
    assert pool.compare([Comparison("a", "")]) == [Verdict.RIGHT]
    pool.close()


def test_a_stuck_worker_is_killed_and_the_others_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcli.interfaces.rewards._math_pool.WALL_FACTOR", 1)
    pool = fake_pool(
        tmp_path, "while t['answer'] == 'hang': pass\nr = {'equal': True}\n", workers=1, cpu_s=0.3
    )
    pairs = [Comparison(answer, "") for answer in ("a", "hang", "b")]
    assert pool.compare(pairs) == [Verdict.RIGHT, Verdict.TIMEOUT, Verdict.RIGHT]
    pool.close()


def test_a_crashed_worker_gives_a_verdict_and_is_replaced(tmp_path):
    pool = fake_pool(
        tmp_path, "os._exit(3) if t['answer'] == 'die' else None\nr = {'equal': True}\n", workers=1
    )
    assert pool.compare([Comparison("die", ""), Comparison("a", "")]) == [
        Verdict.CRASHED,
        Verdict.RIGHT,
    ]
    assert pool.compare([Comparison("a", "")]) == [Verdict.RIGHT]
    pool.close()


def test_responses_that_crash_or_time_out_are_wrong_and_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("rlcli.interfaces.rewards._math_pool.WALL_FACTOR", 1)
    body = """\
        time.sleep(9 if t['answer'] == 'y' else 0)
        r = {'x+1': {'equal': True}, 'x+2': {'crashed': 'boom'}, 'x+3': {'unparsed': True}}
        r = r[t['answer']]
    """
    data = batch(
        [["#### x+1", "#### x+2"], ["#### y", "#### x+3", "#### \\sum x", "#### x+4"]], ["x", "y+x"]
    )
    interface = MathRewardInterface(timeout_s=0.3)
    interface.pool = fake_pool(tmp_path, body, cpu_s=0.3)
    out = interface.inference(role(), data, SPEC)
    assert out.data["rewards"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert out.metadata == {
        "reward_unparsed": [0.0, 0.5],
        "reward_timeouts": [0.0, 0.25],
        "reward_crashes": [0.5, 0.25],
        "reward_errors": [0.0, 0.0],
        "reward_reasons": ANY,
    }
    unparsed, *others = (reason for of_row in out.metadata["reward_reasons"] for reason in of_row)
    assert unparsed is None
    assert "comparing it ended its process: x+2; expected: x" in others
    assert "comparing it took too long: y; expected: y+x" in others
    assert (
        "1 of 6 responses count as wrong because comparing their answers took too long; first, "
        "sample q1, response 1 of 4: y" in caplog.text
    )
    assert (
        "2 of 6 responses count as wrong because comparing their answers ended its process"
        in caplog.text
    )


def test_unreadable_gold_answers_are_an_error_of_the_data(caplog):
    """An empty answer, one that is too long, one with an invisible character."""
    groups, answers = (
        [["#### 5"], ["#### x^2"], ["#### x"], ["#### x+"]],
        ["", "x^3\u202e", "9" * 600, "x"],
    )
    data = batch(groups, answers)
    with pytest.raises(
        DataError, match=r"answers of 3 of 4 samples cannot be read; first, sample q0: ''"
    ) as caught:
        MathRewardInterface(workers=1, timeout_s=60).inference(role(), data, SPEC)
    assert caught.value.code == "F51"
    assert "on_error: wrong" in caught.value.hint
    for settings in ({"on_error": "wrong"}, {"max_error_fraction": 0.75}):
        out = MathRewardInterface(workers=1, timeout_s=60, **settings).inference(role(), data, SPEC)
        assert not out.data["solved"].any()
        assert out.metadata["reward_errors"] == [1, 1, 1, 0]
        assert out.metadata["reward_unparsed"] == [0, 0, 0, 1]
        assert "dropped" not in out.metadata
    assert "3 of 4 samples cannot be read" in caplog.text
    out = MathRewardInterface(workers=1, timeout_s=60, on_error="drop").inference(
        role(), data, SPEC
    )
    assert out.metadata["dropped"] == ["unreadable_answer"] * 3 + [None]
    assert "these samples are dropped" in caplog.text
    assert MathRewardInterface().score_texts(["#### 5"], [""]) == [None]


HOSTILE = (
    "9^{9^9}",
    "10^{10^{10}}",
    "9^9^9^9",
    "9**9**9",
    "2^{99999999}",
    "1000000!",
    "(10!)!",
    "9" * 5000,
    "\\frac{1}{" * 10_000 + "2" + "}" * 10_000,
    "\\sqrt{" * 100 + "2" + "}" * 100,
    "(" * 200 + "9" + ")" * 200,
    "\\begin{pmatrix}" + "1&" * 100 + "1\\end{pmatrix}",
    "5\x00",
    "\u202e5",
    "1+" * 5000 + "1",
    "x^{x^{x^{x}}}",
    "\\binom{1000000}{500000}",
    "\\int_0^{9^9} x dx",
    "\\sum_{n=1}^{10^9} n",
    "((x+1)^{100})^{100}",
    "1e999999999",
    "e^{e^{e^{e^{9}}}}",
    "*a" * 240,
    "`" * 480,
    "_" * 480,
    "{" * 480,
    "$" * 480,
    "\\text{" * 80,
    "\\boxed{" * 60,
    "1," * 240,
    "1 " * 240,
    "=" * 480,
    "-" * 480 + "5",
    "a-" * 240,
    "a'" * 240,
    "answer" * 70,
    "five hundred " * 38,
    "a" * 10_000_000,
    "a" * 400 + "1 $x$",
    "(" * 15 + "2" + ")" * 15,
    "\\begin{pmatrix}" + "1&" * 30 + "1\\end{pmatrix}",
    "\\exp(\\exp(\\exp(100)))",
    "\\sqrt[3]{7^{2999}+1}",
    "(1+" + "+".join(f"x^{n}" for n in range(2, 9)) + ")^{20}",
    "(\\sqrt{2}+\\sqrt{3}+\\sqrt{5}+\\sqrt{7}+\\sqrt{11}+\\sqrt{13}+\\sqrt{17}+\\sqrt{19})^{20}",
    "\\cup".join(f"(x,{n})" for n in range(10)),
    "\\frac{x^{100}-1}{x^{99}-1}+\\frac{x^{98}-1}{x^{97}-1}",
    "<think>" * 9000,
    "</think>" * 9000,
    "~~" * 9000,
    "<b " * 9000,
    "<del>" * 9000,
    "answer to " * 9000,
    "$$\n" * 9000,
    "\\color" * 80,
    "antwort " * 9000,
    "\\frac{" * 80,
    "x + " * 120,
    "a, " * 160,
    "答案" * 240,
    "Q.E.D" * 90,
    "; " * 240 + "x",
    "a " * 200 + "1 $x$",
    " " * 400 + "\\text{ x",
    "**a" * 150,
    "\\(" * 200 + "x",
)


def test_hostile_answers_are_scored_without_a_comparison(monkeypatch):
    """None starts a process and none ends the run, however much work it asks for and whatever the
    gold answer is."""
    monkeypatch.setattr(MathPool, "_start", lambda _: pytest.fail("a comparison was started"))
    answers = ("5", "\\frac{\\sqrt{3}}{2}", "x+1", "Monday", "(0, 1)")
    forms = ("#### {}", "\\boxed{{{}}}", "The answer is {}.", "<answer>{}</answer>")
    # how a text is searched does not depend on the gold answer
    for form, answer in {*product(forms, ["x+1"]), *product(forms[:1], answers)}:
        responses = [form.format(body) for body in HOSTILE]
        begun = time.process_time()
        scores = MathRewardInterface().score_texts(responses, [answer] * len(responses))
        assert scores == [0.0] * len(responses)
        assert time.process_time() - begun < 5.0, "about 0.2 seconds, or endless"


def test_a_long_answer_of_a_row_is_refused_at_once():
    begun = time.process_time()
    assert MathRewardInterface().score_texts(["5"], ["x" * 20_000]) == [None]
    assert time.process_time() - begun < 1.0, "no time at all, or its square"


def test_a_batch_of_hostile_answers_does_not_end_the_run():
    data = batch([["#### 9^{9^9}"] * 8] * 8, ["5", "\\sqrt{3}"] * 4)
    interface = MathRewardInterface()
    out = interface.inference(role(), data, SPEC)
    assert out.data["rewards"].tolist() == [0.0] * 64
    assert out.metadata["reward_unparsed"] == [1.0] * 8
    assert not interface.pool._workers


def test_verdicts_do_not_depend_on_other_answers_or_order():
    answers = [
        "#### x+1",
        "#### 1+x",
        "#### x-1",
        "#### (x+1)^{20}",
        "#### 9^{9^9}",
        "#### \\sin(x)^2",
        "#### 5",
        "#### (((x",
    ]
    interface = MathRewardInterface(workers=2, timeout_s=60)
    alone = [interface.score_texts([answer], ["x+1"])[0] for answer in answers]
    mixed = list(enumerate(answers * 3))
    random.Random(0).shuffle(mixed)
    together = interface.score_texts([answer for _, answer in mixed], ["x+1"] * len(mixed))
    assert all(
        score == alone[index % len(answers)]
        for (index, _), score in zip(mixed, together, strict=True)
    )
    interface.pool.close()


def test_a_missing_library_is_reported_and_not_scored(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text('print(\'{"broken": "ImportError: no math_verify"}\')')
    with pytest.raises(ModelError, match="no math_verify"):
        MathPool(1, 1.0, [sys.executable, str(script)]).compare([Comparison("a", "b")])
    script.write_text("raise SystemExit(5)")
    with pytest.raises(WorkerError, match=r"did not start.*exit code 5"):
        MathPool(1, 1.0, [sys.executable, str(script)]).compare([Comparison("a", "b")])


def test_a_row_without_an_answer_is_refused():
    with pytest.raises(DataError, match="sample q1 has no answer"):
        MathRewardInterface().inference(role(), batch([["#### 1"], ["#### 1"]], ["1", None]), SPEC)


def test_a_role_without_a_tokenizer_is_refused():
    with pytest.raises(UsageError, match="needs a tokenizer"):
        MathRewardInterface().inference(
            Model("r", None, None, torch.device("cpu")), batch([["1"]], ["1"]), SPEC
        )


def test_processes_end_with_their_parent(tmp_path):
    """A parent killed in the middle of an endless comparison leaves nothing behind."""
    import subprocess

    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\nfrom rlcli.interfaces.rewards._math_pool import Comparison, MathPool\n"
        "pool = MathPool(1, 60.0)\npool.compare([Comparison('x+1', '1+x')])\n"
        "print(pool._workers[0].process.pid, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    worker = psutil.Process(int(parent.stdout.readline()))
    assert is_running(worker)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(worker)


def is_running(process):
    """Not so one that has ended, even if nobody has asked for its exit code yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    "settings",
    [{"on_error": "zero"}, {"max_error_fraction": 2.0}, {"workers": 0}, {"timeout_s": 0.0}],
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        MathRewardInterface(**settings)
