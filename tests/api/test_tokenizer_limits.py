"""A tokenizer that would run forever or exhaust memory is refused by everything that opens one."""

import json

import pytest
from chat_model import write_chat_model

from rlcli.api import tokenizer_limits
from rlcli.api.tokenizer_limits import check_tokenizer
from rlcli.checkpoint.huggingface import load_tokenizer
from rlcli.errors import ModelError
from rlcli.inspect.rows import open_tokenizer


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(rules, key):
    return {"type": "Sequence", key: list(rules)}


DOUBLING = [replace({"String": "a"}, "aa")] * 40
CHAIN = [replace({"String": chr(9000 + n)}, chr(9001 + n) * 4) for n in range(30)]
ENDLESS = {
    "type": "Split",
    "pattern": {"Regex": "(x+x+)+y"},
    "behavior": "Isolated",
    "invert": False,
}
HOSTILE = {
    "a letter doubled forty times": {"normalizer": sequence(DOUBLING, "normalizers")},
    "a chain of letters": {"normalizer": sequence(CHAIN, "normalizers")},
    "any letter, by an expression": {
        "normalizer": sequence([replace({"Regex": "[a-z]"}, "qqqqqqqq")] * 16, "normalizers")
    },
    "an expression that tries everything": {"pre_tokenizer": sequence([ENDLESS], "pretokenizers")},
    "decoding": {"decoder": sequence(DOUBLING, "decoders")},
    "a few letters to very many": {"normalizer": replace({"String": "e"}, "e" * 5000)},
}


@pytest.fixture(scope="module")
def usual_model(tmp_path_factory):
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.mark.long
@pytest.mark.parametrize("rules", HOSTILE.values(), ids=HOSTILE)
def test_a_tokenizer_that_exhausts_time_or_memory_is_refused(
    usual_model, tmp_path, monkeypatch, rules
):
    monkeypatch.setattr(tokenizer_limits, "LIMIT_S", 1.0)
    for file in usual_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    described = json.loads((usual_model / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(described | rules))
    for opens in (load_tokenizer, open_tokenizer):
        with pytest.raises(ModelError, match="cannot be used") as caught:
            opens(str(tmp_path))
        assert caught.value.code == "F32"


def test_a_valid_tokenizer_is_checked_only_once(usual_model, monkeypatch):
    check_tokenizer(usual_model, "it")
    monkeypatch.setattr(tokenizer_limits, "start_isolated", None)
    load_tokenizer(str(usual_model))
    check_tokenizer(usual_model / "nothing here", "a folder without one")
