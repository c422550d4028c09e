"""A reward asked about texts says what it would say about the same responses in a run, without torch."""

import subprocess
import sys

import pytest
import torch

from rlcli.api.config import MicroBatchSpec
from rlcli.api.data import SequenceSample
from rlcli.api.interface import ModelInterface
from rlcli.api.model import Model
from rlcli.registry import load

CASES = [
    ("#### 4", "4"),
    ("\\boxed{1/2}", "0.5"),
    ("it is 7", "7"),
    ("", "3"),
    ("#### 5", "so #### 6"),
    ("#### 1,000", "1000"),
]


@pytest.mark.parametrize("last_number", [False, True])
def test_it_is_what_inference_gives(last_number):
    reward = load("interfaces", "math_reward")(correct_reward=2.0, wrong_reward=-1.0, last_number=last_number)
    tokenizer = load("datasets", "arithmetic").make_tokenizer()
    responses = [tokenizer(text, add_special_tokens=False).input_ids for text, _ in CASES]
    ids = [[1, *response] for response in responses]
    data = SequenceSample.from_default(
        ids=[str(n) for n in range(len(CASES))],
        seqlens=[len(one) for one in ids],
        data={
            "packed_input_ids": torch.tensor([token for one in ids for token in one]),
            "prompt_mask": torch.tensor([place == 0 for one in ids for place in range(len(one))]),
        },
        metadata={"answer": [answer for _, answer in CASES]},
    )
    model = Model(name="reward", module=None, tokenizer=tokenizer, device=torch.device("cpu"))
    in_a_run = reward.inference(model, data, MicroBatchSpec()).data["rewards"].tolist()
    assert reward.score_texts(*zip(*CASES, strict=True)) == in_a_run
    assert set(in_a_run) == {2.0, -1.0}


def test_a_comparison_that_fails_has_no_score(monkeypatch):
    reward = load("interfaces", "math_reward")()
    monkeypatch.setattr(reward.pool, "compare", lambda pairs: ["timeout" for _ in pairs])
    assert reward.score_texts(["#### x+1", "#### 2"], ["1+x", "2"]) == [None, 1.0]


def test_it_is_optional():
    with pytest.raises(NotImplementedError, match="does not score texts"):
        ModelInterface().score_texts([], [])


def test_no_torch_is_needed():
    script = (
        "import sys\nfrom rlcli.registry import load\n"
        "assert load('interfaces', 'math_reward')().score_texts(['#### 4'], ['4']) == [1.0]\n"
        "print([name for name in ('torch', 'transformers', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
