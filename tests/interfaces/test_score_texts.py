"""A reward asked about texts, without a model and without torch; `InterfaceContract` compares it with a run."""

import subprocess
import sys

import pytest

from rlcli.api.interface import ModelInterface
from rlcli.registry import load


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
