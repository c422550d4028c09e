"""The tokenizer of the arithmetic problems comes ready made; it is the one that the problems teach."""

import json
import sys

from rlcli.registry import load


def test_it_is_what_training_gives():
    load("datasets", "arithmetic")
    problems = sys.modules["rlcli.datasets._arithmetic"]
    made = json.loads(problems.TRAINED_TOKENIZER.read_text(encoding="utf-8"))
    assert made == json.loads(problems.train_tokenizer().to_str())
    assert made == json.loads(problems.tokenizer().to_str())
