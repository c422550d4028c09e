"""The shipped tokenizer of the arithmetic problems equals the one that training on them gives."""

import json
import sys

from rlcli.registry import load


def test_the_shipped_tokenizer_equals_a_trained_one():
    load("datasets", "arithmetic")
    problems = sys.modules["rlcli.datasets._arithmetic"]
    shipped = json.loads(problems.TRAINED_TOKENIZER.read_text(encoding="utf-8"))
    assert shipped == json.loads(problems.train_tokenizer().to_str())
    assert shipped == json.loads(problems.tokenizer().to_str())
