"""A reward asked about texts, without a model and without torch;
`InterfaceContract` compares it with a run."""

import subprocess
import sys

import pytest

from rlcli.api.interface import ModelInterface
from rlcli.registry import load


def test_an_unreadable_gold_answer_has_no_score():
    reward = load("interfaces", "math_reward")()
    assert reward.score_texts(["#### 2", "#### 2"], ["\u202e2", "2"]) == [None, 1.0]


def test_score_texts_is_optional():
    with pytest.raises(NotImplementedError, match="does not score texts"):
        ModelInterface().score_texts([], [])


def test_scoring_texts_does_not_import_torch():
    script = (
        "import sys\nfrom rlcli.registry import load\n"
        "assert load('interfaces', 'math_reward')().score_texts(['#### 4'], ['4']) == [1.0]\n"
        "print([name for name in ('torch', 'transformers', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
