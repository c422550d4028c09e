"""Rows of large files take little more memory than their tokens."""

import gc
import json
import tracemalloc
from types import SimpleNamespace

import pytest

from rlcli.api import special_tokens
from rlcli.api.config import DatasetAbstraction
from rlcli.api.data import DatasetUtility
from rlcli.api.special_tokens import tokens_of
from rlcli.registry import load, make_dataset
from rlcli.testing.tokenizer import byte_tokenizer


def build(path, kind, tokenizer, **args):
    described = DatasetAbstraction(kind, {"path": str(path), "max_length": 500, **args})
    return make_dataset(described, DatasetUtility(1, 0, 1, tokenizer))


@pytest.fixture
def written(tmp_path):
    def write(rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.mark.parametrize("kind", ["chat", "paired", "plain_text", "prompt_answer", "prompt_only"])
def test_a_tokenizer_gets_few_texts_at_once(kind, written, monkeypatch):
    """What it returns takes many times the memory of the token ids."""
    tokenizer, most = byte_tokenizer(chat=kind == "chat"), []
    encode = type(tokenizer).__call__

    def counted(self, text, *args, **how):
        most.append(1 if isinstance(text, str) else len(text))
        return encode(self, text, *args, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    path = written(load("datasets", kind).EXAMPLES[:3] * 5)
    tokens = [row.sequences for row in map(build(path, kind, tokenizer).preview, range(15))]
    assert max(most) >= 15
    most.clear()
    monkeypatch.setattr(special_tokens, "AT_ONCE", 4)
    assert tokens == [row.sequences for row in map(build(path, kind, tokenizer).preview, range(15))]
    assert max(most) <= 4


def test_equal_tokens_are_one_object():
    def tokenizer(texts, add_special_tokens):
        return SimpleNamespace(input_ids=[[int("1000"), int("2000")] for _ in texts])

    (first, second) = tokens_of(tokenizer, ["a", "b"])
    assert first == second == [1000, 2000]
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_rows_that_are_cut_are_not_kept_as_they_were_before(written):
    tokenizer, length = byte_tokenizer(), 5000
    path = written([{"text": "x" * length}] * 100)
    tracemalloc.start()
    dataset = build(path, "plain_text", tokenizer, overlong="truncate_right", max_length=10)
    gc.collect()
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert min(dataset.survey().lengths) > length
    assert memory < 100 * length * 4
